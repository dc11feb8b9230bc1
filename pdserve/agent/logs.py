"""Bounds the logs of workers, and reads a log's last line."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

    from pdserve.ids import Bytes

__all__ = ["MOST_LOG_BYTES", "last_line", "rotate"]

MOST_LOG_BYTES: Final[Bytes] = 16 * 2**20
"""A log that is longer is moved to `.log.1`: weeks of a worker's normal lines."""
_TAIL: Final = 4096
_LONGEST: Final = 300


def rotate(log: Path, older: Path, most: Bytes = MOST_LOG_BYTES) -> bool:
    """Copies a log that is too long to `older` and empties it; returns whether it did. The worker
    keeps the file open and appends, so lines of the moment in between are lost. Errors:
    `OSError`."""
    with suppress(FileNotFoundError):
        if log.stat().st_size > most:
            shutil.copyfile(log, older)
            os.truncate(log, 0)
            return True
    return False


def last_line(log: Path) -> str:
    """The last line that says something, at most 300 characters; empty: there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return ""
    said = (" ".join(line.split()) for line in reversed(lines))
    return next((line[:_LONGEST] for line in said if line), "")

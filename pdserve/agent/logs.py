"""Bounds the logs of workers, and reads a log's last line."""

from __future__ import annotations

import os
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
    """Moves the last `most` bytes of a log that is longer to `older` and empties it; returns True
    if it did. The worker keeps the file open and appends, so lines of the moment in between are
    lost. What is copied has a bound: a worker may write faster than a disk copies. The log is
    emptied also if `older` cannot be written, because the disk may be full of it. Errors:
    `OSError`."""
    with suppress(FileNotFoundError):
        if log.stat().st_size > most:
            try:
                older.write_bytes(_end_of(log, most))
            finally:
                os.truncate(log, 0)
            return True
    return False


def _end_of(log: Path, most: Bytes) -> bytes:
    """At most the last `most` bytes."""
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - most))
        return file.read(most)


def last_line(log: Path) -> str:
    """The last line that says something, at most 300 characters; empty: there is none."""
    try:
        lines = _end_of(log, _TAIL).decode("utf-8", "replace").splitlines()
    except OSError:
        return ""
    said = (" ".join(line.split()) for line in reversed(lines))
    return next((line[:_LONGEST] for line in said if line), "")

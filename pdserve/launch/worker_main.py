"""Runs a worker that an agent has started: `python -m pdserve.launch.worker_main FILE FLAGS…`.

It is `pdserve FLAGS…`, and leaves its exit status in FILE. An agent that was started after the
worker is not its parent, so the kernel tells it no status; it reads the file. A process that is
killed or crashes leaves none.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from pdserve.cli.main import main as pdserve
from pdserve.launch import exit_codes

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str]) -> int:
    """Serves until a signal; returns the exit status. Args: the file, then flags."""
    file, *flags = arguments
    status = exit_codes.FAILED
    try:
        status = pdserve(flags)
    finally:
        _leave(Path(file), status)
    return status


def _leave(file: Path, status: int) -> None:
    """Writes the status. On a full disk there is none: the agent then takes the worker for one
    that was killed."""
    with suppress(OSError):
        file.write_text(f"{status}\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

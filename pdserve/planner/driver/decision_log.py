"""Keeps the decision log: one line for each plan that differs, and for each change that ended.

The newest lines are in memory, for `pdserve planner`; all go to the process's log and, if a file is
given, there as well. When the file has its most bytes it becomes FILE.1, in place of the former
one, so the two together are bounded.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from time import gmtime, strftime
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pdserve.ids import Bytes

__all__ = ["MOST_BYTES", "DecisionLog"]

_log = logging.getLogger("pdserve.planner")

MOST_BYTES: Final[Bytes] = 8 << 20
"""Most bytes of the file before it is replaced: some 40,000 lines, weeks of decisions."""
_KEPT: Final = 200
"""Lines in memory."""


def _opened(name: str, flags: int) -> int:
    """Open without blocking: a pipe without a reader raises `OSError`, where a plain `open` would
    block the planner until a reader comes."""
    return os.open(name, flags | os.O_NONBLOCK, 0o666)


class DecisionLog:
    """One planner's decisions, as a person reads them."""

    def __init__(
        self, wall: Callable[[], float], path: Path | None = None, *, most: Bytes = MOST_BYTES
    ) -> None:
        """`wall`: Unix seconds."""
        self.lines: deque[str] = deque(maxlen=_KEPT)
        self._wall = wall
        self._path = path
        self._most = most
        self._new: deque[str] = deque(maxlen=_KEPT)
        """Lines for the file that no `write` has taken yet."""
        self._taken: list[str] = []
        """Lines that `write` has taken and not written yet; only it touches them."""

    def add(self, line: str) -> None:
        """Adds a line, with the time in UTC before it. The file gets it by the next `write`; of
        lines that cannot be written, the newest 200 are kept."""
        stamped = f"{strftime('%Y-%m-%dT%H:%M:%SZ', gmtime(self._wall()))} {line}"
        self.lines.append(stamped)
        _log.info("%s", line)
        if self._path is not None:
            self._new.append(stamped)

    @property
    def unwritten(self) -> bool:
        """True if the file lacks lines."""
        return bool(self._new or self._taken)

    def write(self) -> str:
        """Writes what the file lacks; returns why that fails, or an empty text. It may wait for the
        disk, so it runs in a thread, one call at a time."""
        while self._new:
            self._taken.append(self._new.popleft())
        del self._taken[:-_KEPT]
        try:
            while self._path is not None and self._taken:
                self._append(self._path, self._taken[0])
                del self._taken[0]
        except OSError as error:
            return f"{self._path} cannot be written: {error.strerror}"
        return ""

    def _append(self, path: Path, line: str) -> None:
        if path.exists() and path.stat().st_size + len(line) >= self._most:
            path.replace(path.with_name(f"{path.name}.1"))
        with open(path, "a", encoding="utf-8", opener=_opened) as file:
            file.write(f"{line}\n")

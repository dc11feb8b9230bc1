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
        self,
        wall: Callable[[], float],
        path: Path | None = None,
        *,
        most: Bytes = MOST_BYTES,
        on_trouble: Callable[[str], None] = lambda why: None,
    ) -> None:
        """`wall`: Unix seconds. `on_trouble` is called with the reason when the file cannot be
        written, and with an empty text when it can be again."""
        self.lines: deque[str] = deque(maxlen=_KEPT)
        self._wall = wall
        self._path = path
        self._most = most
        self._on_trouble = on_trouble

    def add(self, line: str) -> None:
        """Adds a line, with the time in UTC before it."""
        stamped = f"{strftime('%Y-%m-%dT%H:%M:%SZ', gmtime(self._wall()))} {line}"
        self.lines.append(stamped)
        _log.info("%s", line)
        if self._path is not None:
            self._write(self._path, stamped)

    def _write(self, path: Path, line: str) -> None:
        try:
            if path.exists() and path.stat().st_size + len(line) >= self._most:
                path.replace(path.with_name(f"{path.name}.1"))
            with open(path, "a", encoding="utf-8", opener=_opened) as file:
                file.write(f"{line}\n")
        except OSError as error:
            self._on_trouble(f"{path} cannot be written: {error.strerror}")
        else:
            self._on_trouble("")

"""Writes log lines and start-up progress to standard error.

On a terminal, progress is one line that is redrawn below the log lines. Elsewhere each stage is a
log line, repeated now and then while it lasts. Writing never blocks, because an event loop writes:
output that a full pipe or a paused terminal does not accept is dropped and counted. The process's
start-up owns it.
"""

from __future__ import annotations

import io
import logging
import os
import select
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from pdserve.clock import Clock
    from pdserve.ids import Seconds

_log = logging.getLogger(__name__)

_REDRAW_EVERY: Seconds = 0.1
_REPEAT_EVERY: Seconds = 10.0
"""Seconds between two log lines of one stage."""
_BAR = 24
_CLEAR = "\r\x1b[K"
_ATOMIC = 4096
"""Bytes that a writable pipe takes without blocking (PIPE_BUF)."""


class Console(io.TextIOBase):
    """A text stream over `stream` that can hold one line of progress at its end."""

    def __init__(self, stream: TextIO, clock: Clock) -> None:
        super().__init__()
        self._stream = stream
        self._clock = clock
        self._terminal = stream.isatty()
        self._line = ""
        self._stage = ""
        self._shown: Seconds = -1e9
        self._dropped = 0
        try:
            self._fd: int | None = stream.fileno()
        except (OSError, ValueError):
            # The stream is not backed by a file.
            self._fd = None

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return self._terminal

    def write(self, text: str) -> int:
        """Write `text` above the line of progress."""
        if self._dropped:
            notice = f"({self._dropped} pieces of log were dropped: the output was not read)\n"
            if self._put(notice):
                self._dropped = 0
        above = self._line and text.endswith("\n")
        if not self._put(f"{_CLEAR}{text}{self._line}" if above else text):
            self._dropped += 1
        return len(text)

    def write_line(self, line: str) -> None:
        """Writes a complete line of another source, such as a child process's log."""
        self.write(f"{line}\n")

    def progress(self, stage: str, fraction: float | None) -> None:
        """Shows the current stage; `fraction` (0 to 1) is its progress, if known."""
        now = self._clock.now()
        fresh = stage != self._stage
        pause = _REDRAW_EVERY if self._terminal else _REPEAT_EVERY
        if not fresh and now - self._shown < pause and fraction != 1.0:
            return
        self._stage, self._shown = stage, now
        if self._terminal:
            self._line = progress_line(stage, fraction)
            self._put(_CLEAR + self._line)
        elif fresh or fraction != 1.0:
            _log.info("%s%s", stage, "" if fraction is None else f" ({fraction:.0%})")

    def finish(self) -> None:
        """Removes the progress line."""
        if self._line:
            self._put(_CLEAR)
        self._line = self._stage = ""

    def _put(self, text: str) -> bool:
        """Writes without blocking; returns False if part of it was dropped."""
        try:
            if self._fd is None:
                self._stream.write(text)
                self._stream.flush()
                return True
            data = text.encode(errors="backslashreplace")
            for start in range(0, len(data), _ATOMIC):
                if not select.select([], [self._fd], [], 0)[1]:
                    return False
                os.write(self._fd, data[start : start + _ATOMIC])
        except (OSError, ValueError):
            # The stream is closed or its reader is gone; serving continues without output.
            return False
        return True


def progress_line(stage: str, fraction: float | None) -> str:
    """A progress line that fits a narrow terminal."""
    stage = stage if len(stage) <= 44 else f"{stage[:43]}…"
    if fraction is None:
        return f"  {stage} …"
    done = round(_BAR * min(1.0, max(0.0, fraction)))
    return f"  {stage:<44} {'█' * done}{'░' * (_BAR - done)} {fraction:4.0%}"

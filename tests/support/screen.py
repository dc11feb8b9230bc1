"""A terminal of a size that a test reads as a person would: it follows what a program writes."""

from __future__ import annotations

import codecs
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_TOKEN = re.compile(r"\x1b\[(\??)([0-9;]*)([A-Za-z])|\x1b[@-Z\\-_]|[^\x1b]", re.DOTALL)
PATIENCE = 60.0


class Screen:
    """What is on a screen; only the sequences that `pdserve top` uses, others fail the test."""

    def __init__(self, columns: int, lines: int) -> None:
        self.columns, self.lines = columns, lines
        self.alternate = False
        self.cursor_shown = True
        self.styles: set[str] = set()
        """All styles ever set."""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest = ""
        self._clear()
        self.scrolled = 0
        """Lines that have left at the top: a display that fits loses none."""

    def _clear(self) -> None:
        self.cells = [[" "] * self.columns for _ in range(self.lines)]
        self.row = self.column = 0

    def resize(self, columns: int, lines: int) -> None:
        self.columns, self.lines = columns, lines
        self._clear()

    def feed(self, data: bytes) -> None:
        text = self._rest + self._decoder.decode(data)
        unfinished = re.search(r"\x1b(\[[?0-9;]*)?$", text)
        self._rest = "" if unfinished is None else unfinished[0]
        for match in _TOKEN.finditer(text[: len(text) - len(self._rest)]):
            if match[3]:
                self._sequence(match[1], match[2], match[3])
            else:
                self._put(match[0])

    def _put(self, one: str) -> None:
        if one == "\r":
            self.column = 0
        elif one == "\n":
            self.column, self.row = 0, self.row + 1
        elif self.column < self.columns:
            self.cells[self.row][self.column] = one
            self.column += 1
        else:
            self.column, self.row = 0, self.row + 1
            self._scroll()
            self._put(one)
        self._scroll()

    def _scroll(self) -> None:
        while self.row >= self.lines:
            self.scrolled += 1
            self.cells = [*self.cells[1:], [" "] * self.columns]
            self.row -= 1

    def _sequence(self, private: str, numbers: str, letter: str) -> None:
        values = [int(part or 0) for part in numbers.split(";")]
        if private and letter in "hl":
            if values == [1049]:
                self.alternate = letter == "h"
            elif values == [25]:
                self.cursor_shown = letter == "h"
        elif letter == "H":
            row, column = [*values, 1, 1][:2] if numbers else (1, 1)
            self.row, self.column = max(0, row - 1), max(0, column - 1)
        elif (letter, numbers) == ("J", "2"):
            row, column = self.row, self.column
            self._clear()
            self.row, self.column = row, column
        elif (letter, numbers) == ("K", "2"):
            self.cells[self.row] = [" "] * self.columns
        elif letter == "m":
            self.styles.add(numbers)
        else:
            raise AssertionError(f"an unknown sequence: {private}{numbers}{letter}")

    @property
    def text(self) -> list[str]:
        return ["".join(row).rstrip() for row in self.cells]


def _take_terminal() -> None:
    """Makes Ctrl-C on the terminal a signal for the program."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


class Terminal:
    """A program on a terminal of its own."""

    def __init__(
        self, command: Sequence[str], environ: Mapping[str, str], columns: int = 80, lines: int = 24
    ) -> None:
        self.screen = Screen(columns, lines)
        self.ours, self.theirs = pty.openpty()
        self.resize(columns, lines)
        self.before = termios.tcgetattr(self.theirs)
        self.process = subprocess.Popen(
            command,
            stdin=self.theirs,
            stdout=self.theirs,
            stderr=self.theirs,
            env=dict(environ),
            start_new_session=True,
            preexec_fn=_take_terminal,
        )

    def resize(self, columns: int, lines: int) -> None:
        size = struct.pack("HHHH", lines, columns, 0, 0)
        fcntl.ioctl(self.theirs, termios.TIOCSWINSZ, size)
        if (columns, lines) != (self.screen.columns, self.screen.lines):
            self.screen.resize(columns, lines)

    def type(self, keys: str) -> None:
        os.write(self.ours, keys.encode())

    def until(self, met: Callable[[list[str]], object], patience: float = PATIENCE) -> list[str]:
        """Read until the screen is as wanted; returns its lines."""
        deadline = time.monotonic() + patience
        while not met(self.screen.text):
            assert time.monotonic() < deadline, "\n".join(self.screen.text)
            self.read(0.2)
        return self.screen.text

    def shows(self, *words: str) -> list[str]:
        """Read until all words are on the screen."""
        return self.until(lambda lines: all(word in "\n".join(lines) for word in words))

    def read(self, patience: float) -> bool:
        """Read what is there; False: nothing came."""
        if not select.select([self.ours], [], [], patience)[0]:
            return False
        self.screen.feed(os.read(self.ours, 65536))
        return True

    def ended(self) -> int:
        """The exit status. The terminal is as it was before."""
        deadline = time.monotonic() + PATIENCE
        while self.process.poll() is None:
            assert time.monotonic() < deadline, "\n".join(self.screen.text)
            self.read(0.05)
        while self.read(0.05):
            pass
        assert not self.screen.alternate
        assert self.screen.cursor_shown
        assert termios.tcgetattr(self.theirs) == self.before
        return self.process.returncode

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.ours)
        os.close(self.theirs)

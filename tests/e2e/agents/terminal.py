"""A program in a terminal of its own: keys are typed, and what it shows is read.

A thread reads all output, so that the program never waits for it, and answers what programs ask of
their terminal. Nothing is drawn: text is found in what the program wrote, without its layout.
"""

from __future__ import annotations

import fcntl
import os
import re
import struct
import subprocess
import termios
import threading
from typing import TYPE_CHECKING

from tests.e2e.agents.scene import kill
from tests.e2e.server import PATIENCE

if TYPE_CHECKING:
    from pathlib import Path

ESCAPE = "\x1b"
ENTER = "\r"
_SIZE = struct.pack("HHHH", 40, 120, 0, 0)
"""Lines and columns."""
_QUERIES = {
    b"\x1b[6n": b"\x1b[1;1R",
    b"\x1b[c": b"\x1b[?62c",
    b"\x1b]10;?": b"\x1b]10;rgb:ffff/ffff/ffff\x1b\\",
    b"\x1b]11;?": b"\x1b]11;rgb:0000/0000/0000\x1b\\",
}
"""Where the cursor is, what kind of terminal it is, and its colours -> the answers."""
_CONTROL = re.compile(r"\x1b\[[0-9;:?>=<]*[a-zA-Z]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b.")


class Terminal:
    """Begins with `with`; afterwards the program has ended."""

    def __init__(self, command: list[str], work: Path, environ: dict[str, str]) -> None:
        self._command = ["setsid", "--ctty", *command]
        self._work = work
        self._environ = {"PATH": os.environ["PATH"], "TERM": "xterm-256color"} | environ
        self._changed = threading.Condition()
        self._output = bytearray()
        self._typed = 0
        """Length of the output when the last key was typed."""
        self._ended = False

    def __enter__(self) -> Terminal:
        self._ours, theirs = os.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, _SIZE)
        try:
            self._process = subprocess.Popen(
                self._command,
                env=self._environ,
                cwd=self._work,
                stdin=theirs,
                stdout=theirs,
                stderr=theirs,
            )
        finally:
            os.close(theirs)
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        return self

    def __exit__(self, *exception: object) -> None:
        kill(self._process)
        self._process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        os.close(self._ours)

    @property
    def runs(self) -> bool:
        return self._process.poll() is None

    def type(self, keys: str) -> None:
        with self._changed:
            self._typed = len(self._output)
        os.write(self._ours, keys.encode())

    def enter(self, line: str) -> None:
        """Type a line and send it. The program has to show each character before the next is typed:
        what comes faster is taken for text that was pasted."""
        for char in line:
            self.type(char)
            self.wait_for(char)
        self.type(ENTER)

    def wait_for(self, text: str) -> None:
        """Until the program has shown a text since the last key. Blanks are not compared: they may
        be moves of the cursor."""
        wanted = "".join(text.split())
        with self._changed:
            self._changed.wait_for(lambda: wanted in self._shown() or self._ended, PATIENCE)
            shown = self._shown()
        assert wanted in shown, f"{text!r} is not shown in:\n{shown[-3000:]}"

    def _shown(self) -> str:
        text = _CONTROL.sub("", bytes(self._output[self._typed :]).decode(errors="replace"))
        return "".join(text.split())

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._ours, 1 << 16)
            except OSError:  # the program has ended
                data = b""
            with self._changed:
                self._output += data
                self._ended = not data
                self._changed.notify_all()
            if not data:
                return
            for query, answer in _QUERIES.items():
                if query in data:
                    os.write(self._ours, answer)

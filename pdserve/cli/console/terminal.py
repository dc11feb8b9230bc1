"""Owns the terminal while `pdserve top` runs, and gives it back however that ends.

Only lines that have changed are drawn, by a thread of its own: a slow terminal gets fewer frames,
and keys are heard while it draws.
"""

from __future__ import annotations

import atexit
import codecs
import contextlib
import os
import re
import sys
import threading
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pdserve.cli.console.viewer import ScreenLine
    from pdserve.ids import Seconds

__all__ = ["KeyReader", "Painter", "Terminal"]

_ENTER: Final = "\x1b[?1049h\x1b[?25l\x1b[2J"
"""Switches to the alternate screen, so that the content comes back later, and hides the cursor."""
_LEAVE: Final = "\x1b[0m\x1b[?25h\x1b[?1049l"
_PATIENCE: Final[Seconds] = 1.0
"""Longest wait for a terminal that takes no more, at the end."""
_PLAIN: Final = {"title": "1", "head": "1", "selected": "7", "bottom": "7"}
_COLOURS: Final = {"title": "1;36", "head": "1;34", "selected": "7", "warning": "33", "bottom": "7"}
_NAMES: Final = {
    **dict.fromkeys(("\x1b[A", "\x1bOA"), "up"),
    **dict.fromkeys(("\x1b[B", "\x1bOB"), "down"),
    **dict.fromkeys(("\x1b[H", "\x1bOH", "\x1b[1~", "\x1b[7~"), "home"),
    **dict.fromkeys(("\x1b[F", "\x1bOF", "\x1b[4~", "\x1b[8~"), "end"),
    "\x1b[5~": "pageup",
    "\x1b[6~": "pagedown",
}
_KEY: Final = re.compile(r"\x1b\[[0-9;]*[A-Za-z~]|\x1bO.|\x1b(?=\x1b|$)|.", re.DOTALL)
"""One key: a terminal's escape sequence, Escape itself, or a character."""
_UNFINISHED: Final = re.compile(r"\x1b(?:\[[0-9;]*|O)?$")


class KeyReader:
    """Makes keys of what a terminal sends; sequences may come in pieces."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest = ""

    @property
    def unfinished(self) -> bool:
        """True if the last piece may be the beginning of a sequence."""
        return bool(self._rest)

    def keys(self, typed: bytes, *, last: bool = False) -> list[str]:
        """The keys so far: characters, or names such as `up`. Args: `last`: nothing follows, so
        an Escape is one."""
        text = self._rest + self._decoder.decode(typed)
        unfinished = None if last else _UNFINISHED.search(text)
        self._rest = "" if unfinished is None else unfinished[0]
        found = _KEY.findall(text[: len(text) - len(self._rest)])
        return [_NAMES.get(key, key) for key in found]


class Painter:
    """Turns screens into the bytes that change the last one into them. Pure."""

    def __init__(self, styles: Mapping[str, str]) -> None:
        self._styles = styles
        self._drawn: list[str] = []
        self._size = (0, 0)

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Painter:
        """With colours, unless NO_COLOR says otherwise or the terminal has none."""
        plain = environ.get("NO_COLOR") or environ.get("TERM", "").endswith(("-m", "-mono"))
        if environ.get("TERM", "dumb") in ("dumb", ""):
            return cls({})
        return cls(_PLAIN if plain or environ.get("TERM", "").startswith("vt") else _COLOURS)

    def paint(self, lines: Sequence[ScreenLine], size: tuple[int, int]) -> str:
        """What to write; empty: nothing has changed."""
        found = []
        if size != self._size:
            self._size, self._drawn = size, []
            found.append("\x1b[0m\x1b[2J")
        styled = [self._styled(line) for line in lines]
        for number, text in enumerate(styled):
            if number >= len(self._drawn) or self._drawn[number] != text:
                found.append(f"\x1b[{number + 1};1H\x1b[0m\x1b[2K{text}")
        self._drawn = styled
        return "".join(found)

    def forget(self) -> None:
        """Draws all again: something else has been on the screen."""
        self._size = (0, 0)

    def _styled(self, line: ScreenLine) -> str:
        style = self._styles.get(line.style)
        return f"\x1b[{style}m{line.text}\x1b[0m" if style and line.text else line.text


class Terminal:
    """Standard input and output, if they are terminals. `enter` it, and `leave` it in any case."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._painter = Painter.of(environ)
        self._dumb = environ.get("TERM") == "dumb"
        self._before: list[Any] | None = None
        self._inside = False
        self._writer: threading.Thread | None = None

    @property
    def shows(self) -> bool:
        """True if output is a terminal on which lines can be drawn again."""
        return sys.stdout is not None and sys.stdout.isatty() and not self._dumb

    @property
    def hears(self) -> bool:
        """True if input is a terminal."""
        return sys.stdin is not None and sys.stdin.isatty()

    def size(self) -> tuple[int, int]:
        """Columns and lines."""
        # Not of COLUMNS and LINES: they do not change with the window.
        with contextlib.suppress(OSError):
            found = os.get_terminal_size(sys.stdout.fileno())
            if found.columns > 0 and found.lines > 0:
                return found.columns, found.lines
        return 80, 24

    def enter(self) -> None:
        """Takes the terminal."""
        if self._inside:
            return
        self._inside = True
        atexit.register(self.leave)
        if self.hears:
            import termios
            import tty

            self._before = termios.tcgetattr(sys.stdin.fileno())
            tty.setcbreak(sys.stdin.fileno())
        self._write(_ENTER)
        self._painter.forget()

    def leave(self) -> None:
        """Gives it back. Idempotent."""
        if not self._inside:
            return
        self._inside = False
        atexit.unregister(self.leave)
        if self._writer is not None:
            self._writer.join(_PATIENCE)
        self._write(_LEAVE)
        if self._writer is not None:
            self._writer.join(_PATIENCE)
        if self._before is not None:
            import termios

            with contextlib.suppress(termios.error):
                termios.tcsetattr(sys.stdin.fileno(), termios.TCSANOW, self._before)

    def draw(self, lines: Sequence[ScreenLine], size: tuple[int, int]) -> bool:
        """Draws a screen; False: the terminal has not taken the last one yet, and this is left
        out."""
        if self._writer is not None and self._writer.is_alive():
            return False
        text = self._painter.paint(lines, size)
        if text:
            self._write(text)
        return True

    def _write(self, text: str) -> None:
        if self._writer is not None and self._writer.is_alive():
            return
        data = text.encode(sys.stdout.encoding or "utf-8", "replace")
        self._writer = threading.Thread(target=_write_all, args=(data,), daemon=True)
        self._writer.start()


def _write_all(data: bytes) -> None:
    descriptor = sys.stdout.fileno()
    left = memoryview(data)
    # The terminal may be gone.
    with contextlib.suppress(OSError):
        while left:
            left = left[os.write(descriptor, left) :]

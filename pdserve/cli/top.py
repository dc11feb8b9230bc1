"""Runs `pdserve top`: redraws a cluster's status or one server's metrics about once a second.

Owns the terminal while it runs and restores it. `status_tables` (a cluster) or `dashboard` (one
server, over HTTP) make the text.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import sys
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from pdserve.cli.console.reach import add_reach, reach_of
from pdserve.cli.dashboard import MetricsPage, dashboard
from pdserve.cli.parser import Parser
from pdserve.cli.status import fetch, health_of
from pdserve.cli.status_tables import render
from pdserve.errors import ConfigError, DialFailed, HandshakeRefused, PdserveError, Unavailable
from pdserve.launch import exit_codes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pdserve.cli.console.reach import Reach
    from pdserve.ids import Seconds
    from pdserve.messages.status import ClusterStatus

__all__ = ["Viewport", "frame", "run"]

_INTERVAL: Final[Seconds] = 1.0
_ENTER: Final = "\x1b[?1049h\x1b[?25l"
"""Switches to the terminal's alternate screen, so that its content comes back later, and hides the
cursor."""
_LEAVE: Final = "\x1b[?25h\x1b[?1049l"
_HINT: Final = "q quits; arrows, PageUp, PageDown, g, G scroll"
_SERVER: Final = "http://127.0.0.1:8000"
"""Default address of `pdserve` on this machine."""
_WINDOW: Final = 10
"""Number of scrapes over which a server's rates are computed."""
_KEYS: Final = {
    **dict.fromkeys(("k", "\x1b[A", "\x1bOA"), (-1, 0)),
    **dict.fromkeys(("j", "\x1b[B", "\x1bOB", "\r", "\n"), (1, 0)),
    **dict.fromkeys(("l", "\x1b[C", "\x1bOC"), (0, 16)),
    **dict.fromkeys(("h", "\x1b[D", "\x1bOD"), (0, -16)),
    **dict.fromkeys((" ", "\x1b[6~"), (20, 0)),
    "\x1b[5~": (-20, 0),
    "g": (-(10**6), -(10**6)),
    "G": (10**6, 0),
}
"""(lines, columns) by which each key scrolls."""
_KEY: Final = re.compile(r"\x1b\[[0-9;]*[A-Za-z~]|\x1bO.|.", re.DOTALL)
"""One key: a terminal's escape sequence, or a character."""


def run(arguments: list[str]) -> int:
    """Redraws until it is stopped."""
    parser = Parser(
        "pdserve top",
        "Watch a server or a cluster in the terminal; q or Ctrl-C ends. If nothing says which, it\n"
        "takes the only one that runs on this machine: a server of this user, the cluster whose\n"
        "router is at 127.0.0.1:7700, else what answers over HTTP on port 8000.",
    )
    parser.own.add_argument("--url", metavar="URL", default="", help="A server, over HTTP.")
    add_reach(parser)
    parsed = parser.parse(arguments)
    with contextlib.suppress(KeyboardInterrupt):
        if parsed.url:
            asyncio.run(_Top(_Server(parsed.url)).run())
        else:
            asyncio.run(_watch(reach_of(parsed)))
    return exit_codes.OK


async def _watch(reach: Reach) -> None:
    """Watches the cluster, or this machine's server if no cluster was named."""
    try:
        await _Top(_Cluster(reach)).run()
    except DialFailed:
        if reach.named:
            raise
        server = _Server(_SERVER)
        if not await _answers(server):
            raise
        await _Top(server).run()


async def _answers(server: _Server) -> bool:
    try:
        await server.look()
    except PdserveError:
        return False
    return True


@dataclass(slots=True)
class Viewport:
    """The visible part of the text: its first line and column."""

    line: int = 0
    column: int = 0

    def press(self, key: str) -> bool:
        """Scrolls; returns False for any other key."""
        if key not in _KEYS:
            return False
        lines, columns = _KEYS[key]
        self.line, self.column = max(0, self.line + lines), max(0, self.column + columns)
        return True


def keys_of(typed: str) -> list[str]:
    """The keys in one read: a key that is held down brings several."""
    return _KEY.findall(typed)


def frame(text: str, size: tuple[int, int], view: Viewport | None = None) -> str:
    """`text` as drawn over the last frame of a terminal of `size` (columns, lines).

    Args: `view` is moved back if it has left the text.
    """
    columns, lines = size
    view = view or Viewport()
    whole = text.split("\n")
    room = max(1, lines - 3)
    view.line = min(view.line, max(0, len(whole) - room))
    view.column = min(view.column, max(0, max(map(len, whole)) - columns + 1))
    shown = whole[view.line : view.line + room]
    below = len(whole) - view.line - len(shown)
    more = [f"… {below} more lines"] if below else []
    cut = [line[view.column : view.column + columns - 1] for line in shown]
    body = "".join(f"{line}\x1b[K\n" for line in (*cut, *more, ""))
    return f"\x1b[H{body}{_HINT[: columns - 1]}\x1b[J"


class _Source(Protocol):
    """What is watched."""

    async def look(self) -> str:
        """The current text. Errors: `PdserveError`."""
        ...

    async def close(self) -> None:
        """Closes everything."""
        ...


class _Cluster:
    """A cluster, as one of its nodes sees it."""

    def __init__(self, reach: Reach) -> None:
        self._visitor = reach.client()
        self._before: ClusterStatus | None = None

    async def look(self) -> str:
        before, self._before = self._before, await self._visitor.status()
        return render(self._before, before)

    async def close(self) -> None:
        await self._visitor.close()


class _Server:
    """One server, from its `/metrics` and `/health`."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._pages: deque[MetricsPage] = deque(maxlen=_WINDOW + 1)

    async def look(self) -> str:
        return await asyncio.to_thread(self._read)

    def _read(self) -> str:
        health = health_of(self._url)
        try:
            page = MetricsPage.read(fetch(self._url, "/metrics").decode(), time.monotonic())
        except ValueError:
            raise Unavailable(f"{self._url}/metrics is no page of metrics") from None
        self._pages.append(page)
        return dashboard(self._pages, health, self._url)

    async def close(self) -> None:
        pass


class _Top:
    """One run of the display."""

    def __init__(self, source: _Source) -> None:
        self._source = source
        self._view = Viewport()
        self._text = ""

    async def run(self) -> None:
        """Runs the display. Errors: those of the first query; later ones are shown, because
        nodes may come back."""
        self._over = asyncio.get_running_loop().create_future()
        try:
            self._text = await self._source.look()
            with _screen(), self._keys():
                while not self._over.done():
                    self._draw()
                    await asyncio.wait({self._over}, timeout=_INTERVAL)
                    self._text = await self._next(self._text)
        finally:
            await self._source.close()

    async def _next(self, text: str) -> str:
        try:
            return await self._source.look()
        except (HandshakeRefused, ConfigError):
            raise
        except PdserveError as error:
            old = text.partition("\n\n")[2] if text.startswith("(") else text
            return f"({error.message}; this is the last answer)\n\n{old}"

    def _draw(self) -> None:
        text = self._text
        if sys.stdout.isatty():
            size = shutil.get_terminal_size()
            sys.stdout.write(frame(text, (size.columns, size.lines), self._view))
        else:
            sys.stdout.write(f"{text}\n\n")
        sys.stdout.flush()

    @contextlib.contextmanager
    def _keys(self) -> Iterator[None]:
        """Makes keys take effect without Enter."""
        if not sys.stdin.isatty():
            yield
            return
        import termios
        import tty

        descriptor = sys.stdin.fileno()
        before: list[Any] = termios.tcgetattr(descriptor)
        loop = asyncio.get_running_loop()
        tty.setcbreak(descriptor)
        loop.add_reader(descriptor, self._on_key, descriptor)
        try:
            yield
        finally:
            loop.remove_reader(descriptor)
            termios.tcsetattr(descriptor, termios.TCSADRAIN, before)

    def _on_key(self, descriptor: int) -> None:
        keys = keys_of(os.read(descriptor, 1024).decode(errors="replace"))
        if any([self._view.press(key) for key in keys]):
            self._draw()
        ended = not keys or "q" in keys or "Q" in keys
        if ended and not self._over.done():
            self._over.set_result(None)


@contextlib.contextmanager
def _screen() -> Iterator[None]:
    if not sys.stdout.isatty():
        yield
        return
    sys.stdout.write(_ENTER)
    try:
        yield
    finally:
        sys.stdout.write(_LEAVE)
        sys.stdout.flush()

"""Runs `pdserve top`: shows a server or a cluster, again about once a second.

`console.viewer` decides what is shown, `console.terminal` owns the terminal.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import sys
import threading
from collections import deque
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from pdserve.cli.console.head import degraded_lines, head_lines
from pdserve.cli.console.layout import lines_of
from pdserve.cli.console.overview import overview
from pdserve.cli.console.pages import MetricsPage, overview_of_pages
from pdserve.cli.console.reach import add_reach, reach_of
from pdserve.cli.console.terminal import KeyReader, Terminal
from pdserve.cli.console.viewer import View, Viewer
from pdserve.cli.parser import Parser
from pdserve.cli.status import health_of, metrics_of
from pdserve.cli.status_tables import notes, tables
from pdserve.errors import ConfigError, DialFailed, HandshakeRefused, PdserveError, Unavailable
from pdserve.launch import exit_codes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pdserve.cli.console.layout import Table
    from pdserve.cli.console.reach import Reach
    from pdserve.ids import Seconds
    from pdserve.messages.status import ClusterStatus

__all__ = ["run"]

T = TypeVar("T")

_INTERVAL: Final[Seconds] = 1.0
_PATIENCE: Final[Seconds] = 10.0
"""A server may take so long to answer; whoever sends it byte by byte would take for ever."""
_ESCAPE: Final[Seconds] = 0.1
"""A byte that begins a key's sequence is the Escape key if nothing follows for so long."""
_SERVER: Final = "http://127.0.0.1:8000"
"""Default address of `pdserve` on this machine."""
_WINDOWS: Final = (10, 60)
"""Numbers of scrapes over which a server's rates are computed."""
_FIRST: Final = (
    *("WORKER READY", "MODEL WORKERS", "KV OF TIER", "ROUTER ROUTED", "FRONTEND ACTIVE"),
    "WORKER MODE",
)
"""Tables that change most stand first."""
_DESCRIPTION: Final = """\
Watch a server or a cluster in the terminal; q or Ctrl-C ends, ? shows the keys. If nothing says
which, it takes the only one that runs on this machine: a server of this user, the cluster whose
router is at 127.0.0.1:7700, else what answers over HTTP on port 8000."""


def run(arguments: list[str]) -> int:
    """Shows it until it is stopped."""
    parser = Parser("pdserve top", _DESCRIPTION)
    parser.own.add_argument("--url", metavar="URL", default="", help="A server, over HTTP.")
    add_reach(parser)
    parsed = parser.parse(arguments)
    if sys.stdout is None:
        raise ConfigError("standard output is closed, so there is nothing to watch on")
    with contextlib.suppress(KeyboardInterrupt):
        if parsed.url:
            asyncio.run(_Top(_Server(parsed.url)).run())
        else:
            asyncio.run(_watch(reach_of(parsed)))
    return exit_codes.OK


async def _watch(reach: Reach) -> None:
    """Watches what was named, or what runs on this machine."""
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
        await server.look(minute=False)
    except PdserveError:
        return False
    return True


class _Source(Protocol):
    """What is watched."""

    async def look(self, *, minute: bool) -> View:
        """How it is now, with rates over 10 or 60 s. Errors: `PdserveError`."""
        ...

    async def close(self) -> None:
        """Closes everything."""
        ...


class _Cluster:
    """A cluster, or a server without one, as one of its nodes sees it."""

    def __init__(self, reach: Reach) -> None:
        self._visitor = reach.client()
        self._before: ClusterStatus | None = None

    async def look(self, *, minute: bool) -> View:
        before, self._before = self._before, await self._visitor.status()
        now = self._before
        found = tables(now, before, minute=minute)
        found.sort(key=_place)
        return View(overview(now, minute=minute), found, notes(now))

    async def close(self) -> None:
        await self._visitor.close()


def _place(table: Table) -> int:
    return _FIRST.index(table.name) if table.name in _FIRST else len(_FIRST)


class _Server:
    """One server, from its `/metrics` and `/health`."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._pages: deque[MetricsPage] = deque(maxlen=_WINDOWS[-1] + 1)
        self._reading: asyncio.Future[tuple[dict[str, Any], MetricsPage]] | None = None
        """The answer that is on its way; one at a time."""

    async def look(self, *, minute: bool) -> View:
        if self._reading is None:
            self._reading = _in_thread(self._read)
        done, _ = await asyncio.wait({self._reading}, timeout=_PATIENCE)
        if not done:
            raise Unavailable(f"{self._url} has not answered for {_PATIENCE:g} s")
        reading, self._reading = self._reading, None
        health, page = reading.result()
        self._pages.append(page)
        count = _WINDOWS[minute]
        return View(overview_of_pages(list(self._pages)[-count - 1 :], health, self._url))

    def _read(self) -> tuple[dict[str, Any], MetricsPage]:
        return health_of(self._url), metrics_of(self._url)

    async def close(self) -> None:
        pass


def _in_thread(work: Callable[[], T]) -> asyncio.Future[T]:
    """Calls `work` in a thread that the end of the process does not wait for."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def run() -> None:
        tell: Callable[[], None]
        try:
            tell = functools.partial(future.set_result, work())
        except Exception as error:
            tell = functools.partial(future.set_exception, error)
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(tell)

    threading.Thread(target=run, daemon=True).start()
    return future


class _Top:
    """One run of the display."""

    def __init__(self, source: _Source) -> None:
        self._source = source
        self._viewer = Viewer()
        self._terminal = Terminal()
        self._reader = KeyReader()
        self._escape: asyncio.TimerHandle | None = None

    async def run(self) -> None:
        """Runs the display. Errors: those of the first query; later ones are shown, because
        nodes may come back."""
        self._loop = asyncio.get_running_loop()
        self._over = self._loop.create_future()
        self._again = asyncio.Event()
        try:
            self._viewer.view = await self._source.look(minute=self._viewer.minute)
            if not self._terminal.shows:
                await self._print_forever()
                return
            with self._signals(), self._screen(), self._keys():
                await self._show_forever()
        finally:
            await self._source.close()

    async def _print_forever(self) -> None:
        """For files, pipes and dumb terminals: everything, one look after the other."""
        while True:
            view = self._viewer.view
            parts = [head_lines(view.overview, 100), degraded_lines(view.overview, 100), view.notes]
            parts += [lines_of(table, 1000) for table in view.tables]
            text = "\n\n".join("\n".join(part) for part in parts if part)
            sys.stdout.write(f"{text}\n\n")
            sys.stdout.flush()
            await asyncio.sleep(_INTERVAL)
            await self._look()

    async def _show_forever(self) -> None:
        while not self._over.done():
            self._draw()
            self._again.clear()
            waiting = self._loop.create_task(self._again.wait(), name="another look")
            await asyncio.wait(
                {waiting, self._over}, timeout=_INTERVAL, return_when=asyncio.FIRST_COMPLETED
            )
            waiting.cancel()
            if not self._over.done():
                looking = self._loop.create_task(self._look(), name="look")
                await asyncio.wait({looking, self._over}, return_when=asyncio.FIRST_COMPLETED)
                if not looking.done():
                    looking.cancel()
                    await asyncio.wait({looking})
                    return
                looking.result()

    async def _look(self) -> None:
        try:
            self._viewer.view = await self._source.look(minute=self._viewer.minute)
        except (HandshakeRefused, ConfigError):
            raise
        except PdserveError as error:
            self._viewer.trouble = error.message
        else:
            self._viewer.trouble = ""

    def _draw(self) -> None:
        size = self._terminal.size()
        if not self._terminal.draw(self._viewer.screen(*size), size):
            self._loop.call_later(_ESCAPE, self._draw_if_on)

    def _draw_if_on(self) -> None:
        if not self._over.done():
            self._draw()

    # ------------------------------------------------------------------ terminal

    @contextlib.contextmanager
    def _screen(self) -> Iterator[None]:
        self._terminal.enter()
        try:
            yield
        finally:
            self._terminal.leave()

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Ends in order on a signal, stops and comes back, and follows the window's size."""
        found: dict[signal.Signals, Callable[[], None]] = {
            signal.SIGINT: self._end,
            signal.SIGTERM: self._end,
            signal.SIGHUP: self._end,
            signal.SIGQUIT: self._end,
            signal.SIGTSTP: self._pause,
            signal.SIGWINCH: self._draw_if_on,
        }
        for number, handle in found.items():
            self._loop.add_signal_handler(number, handle)
        try:
            yield
        finally:
            for number in found:
                self._loop.remove_signal_handler(number)

    def _pause(self) -> None:
        self._terminal.leave()
        os.kill(os.getpid(), signal.SIGSTOP)
        # It goes on here, in the foreground again.
        self._terminal.enter()
        self._draw()

    def _end(self) -> None:
        if not self._over.done():
            self._over.set_result(None)

    @contextlib.contextmanager
    def _keys(self) -> Iterator[None]:
        """Makes keys take effect without Enter."""
        if not self._terminal.hears:
            yield
            return
        descriptor = sys.stdin.fileno()
        self._loop.add_reader(descriptor, self._on_input, descriptor)
        try:
            yield
        finally:
            self._loop.remove_reader(descriptor)
            if self._escape is not None:
                self._escape.cancel()

    def _on_input(self, descriptor: int) -> None:
        try:
            typed = os.read(descriptor, 1024)
        except OSError:
            typed = b""
        if not typed:
            self._end()
            return
        self._press(self._reader.keys(typed))
        if self._reader.unfinished:
            self._escape = self._loop.call_later(_ESCAPE, self._on_silence)

    def _on_silence(self) -> None:
        self._press(self._reader.keys(b"", last=True))

    def _press(self, keys: list[str]) -> None:
        minute = self._viewer.minute
        for key in keys:
            if not self._viewer.press(key):
                self._end()
                return
            # What a key does may depend on what the one before has shown.
            self._viewer.screen(*self._terminal.size())
        if self._viewer.minute != minute:
            self._again.set()
        if keys:
            self._draw_if_on()

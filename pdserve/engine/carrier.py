"""Where a core lives: a child process, or a thread of this one (tests).

A carrier starts one core, hands out our end of its socket, says how the core ended, and can end it
by force. It never reads the socket. `CoreClient` makes one per life of the core and always waits
for its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import sys
import threading
from typing import TYPE_CHECKING, Protocol

from pdserve.clock import SystemClock
from pdserve.engine.host import CoreHost
from pdserve.engine.link import LinkEnd
from pdserve.engine.progress import ProgressPage

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdserve.engine.family import Family
    from pdserve.ids import Seconds

__all__ = ["Carrier", "HostProcess", "ProcessCarrier", "ThreadCarrier"]

_LINE_LIMIT = 8192
_STDERR_GRACE: Seconds = 0.5
_ROUTINE = re.compile(
    r"\d\d:\d\d:\d\d\.\d{3} (DEBUG|INFO|WARNING) "
    r'|\{"time": "[^"]*", "level": "(debug|info|warning)"'
)
"""Lines of `observe.logs`, of either form, that are no errors."""
"""After the exit: a grandchild may hold the pipe open, the last line has come by then."""


class Carrier(Protocol):
    """One life of a core."""

    @property
    def page(self) -> ProgressPage | None:
        """Where the core shows that it gets on; None before `launch`. It stays readable."""
        ...

    async def launch(self) -> socket.socket:
        """Start it; returns our end of its socket, which the caller owns. Called once.

        Cancellation: whatever was started ends with the socket; call `kill` and `ended`.
        """
        ...

    async def ended(self) -> str:
        """Wait for the end; returns what is known of it, to follow "the engine process".

        Cancellation: only the waiting stops; it may be called again.
        """
        ...

    def kill(self) -> None:
        """End it without its cooperation, as far as the kind of carrier allows."""
        ...


class ProcessCarrier:
    """A process of its own: `HostProcess` with one end of a socket pair."""

    def __init__(
        self,
        *,
        log_format: str = "text",
        log_level: str = "info",
        on_line: Callable[[str], None] | None = None,
    ) -> None:
        """`on_line` gets each line of the child's stderr; by default it goes to our own."""
        self._log = ("--log-format", log_format, "--log-level", log_level)
        self._on_line = on_line
        self._process: HostProcess | None = None
        self.page: ProgressPage | None = None

    @property
    def pid(self) -> int | None:
        """The child's process id; None before `launch`."""
        return None if self._process is None else self._process.pid

    async def launch(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                self._process = await HostProcess.start(self._log, [theirs], self._on_line)
            (self.page,) = self._process.pages
        except BaseException:
            ours.close()
            raise
        return ours

    async def ended(self) -> str:
        return "never started" if self._process is None else await self._process.ended()

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()


class HostProcess:
    """One run of `python -m pdserve.engine.host`: its stderr, its exit, its end by force."""

    def __init__(
        self,
        transport: asyncio.SubprocessTransport,
        child: _ChildProtocol,
        pages: Sequence[ProgressPage],
    ) -> None:
        """Use `start`."""
        self.pages = pages
        """Of its cores, in order; with its exit their memory is given back."""
        self._transport = transport
        self._child = child
        child.exited.add_done_callback(self._close_pages)

    @classmethod
    async def start(
        cls,
        arguments: Sequence[str],
        socks: Sequence[socket.socket],
        on_line: Callable[[str], None] | None = None,
        *,
        inherits: Sequence[int] = (),
    ) -> HostProcess:
        """Start it with `arguments` and a core behind each of `socks`, which stay the caller's; it
        `inherits` further descriptors. Raises `OSError`.

        Cancellation: what was started is killed.
        """
        pages: list[ProgressPage] = []
        try:
            for _ in socks:
                pages.append(ProgressPage.create())  # noqa: PERF401  those made are closed below
            return await cls._start(arguments, socks, pages, on_line, inherits)
        except BaseException:
            for page in pages:
                page.close()
            raise
        finally:
            for page in pages:
                page.close_fd()

    @classmethod
    async def _start(
        cls,
        arguments: Sequence[str],
        socks: Sequence[socket.socket],
        pages: Sequence[ProgressPage],
        on_line: Callable[[str], None] | None,
        inherits: Sequence[int],
    ) -> HostProcess:
        loop = asyncio.get_running_loop()
        fds = [sock.fileno() for sock in socks]
        shared = [page.fd for page in pages if page.fd is not None]
        named = [part for fd in fds for part in ("--fd", str(fd))]
        named += [part for fd in shared for part in ("--page", str(fd))]
        # -P: the child's search path is ours, not whatever directory we happen to stand in.
        program = (sys.executable, "-P", "-m", "pdserve.engine.host", "--parent", str(os.getpid()))
        transport, child = await loop.subprocess_exec(
            lambda: _ChildProtocol(loop, on_line or _to_stderr),
            *program,
            *named,
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            pass_fds=(*fds, *shared, *inherits),
            env=os.environ | {"PYTHONPATH": _search_path()},
        )
        return cls(transport, child, pages)

    def _close_pages(self, exited: asyncio.Future[None]) -> None:
        for page in self.pages:
            page.close()

    @property
    def pid(self) -> int:
        """The process id."""
        return self._transport.get_pid()

    @property
    def exited(self) -> asyncio.Future[None]:
        """Done once the process is gone. Only to be looked at and waited for."""
        return self._child.exited

    async def ended(self) -> str:
        """See `Carrier.ended`."""
        await asyncio.wait({self._child.exited})  # unlike `await`, no harm in being cancelled
        await asyncio.wait({self._child.stderr_closed}, timeout=_STDERR_GRACE)
        status = _describe(self._transport.get_returncode())
        self._transport.close()
        last = self._child.last_line
        return f"{status}: {last}" if last else status

    def kill(self) -> None:
        """SIGKILL. Idempotent."""
        with contextlib.suppress(ProcessLookupError):
            self._transport.send_signal(signal.SIGKILL)


class _ChildProtocol(asyncio.SubprocessProtocol):
    """Passes stderr on by lines, remembers the last one that may tell why it ended, notes the
    exit. What is logged in daily life tells nothing, and clients would read it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, on_line: Callable[[str], None]) -> None:
        self.exited: asyncio.Future[None] = loop.create_future()
        self.stderr_closed: asyncio.Future[None] = loop.create_future()
        self.last_line = ""
        self._on_line = on_line
        self._partial = b""

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        *lines, self._partial = (self._partial + data).split(b"\n")
        for line in lines:
            self._line(line)
        if len(self._partial) > _LINE_LIMIT:
            self._line(self._partial)
            self._partial = b""

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        if self._partial:
            self._line(self._partial)
        if not self.stderr_closed.done():
            self.stderr_closed.set_result(None)

    def process_exited(self) -> None:
        if not self.exited.done():
            self.exited.set_result(None)

    def _line(self, line: bytes) -> None:
        text = line[:_LINE_LIMIT].decode(errors="replace").rstrip()
        if text:
            if not _ROUTINE.match(text):
                self.last_line = text
            self._on_line(text)


class ThreadCarrier:
    """A host in a daemon thread: nothing but closing its socket can end it, so a core that hangs
    in a step stays behind. For tests and for looking at a core with a debugger."""

    def __init__(self, family: Family | None = None) -> None:
        """Carriers with the same `family` share the weights."""
        self._family = family
        self._thread: threading.Thread | None = None
        self._ended: asyncio.Event | None = None
        self.page: ProgressPage | None = None
        self._status = 0
        self._ours: socket.socket | None = None

    async def launch(self) -> socket.socket:
        loop = asyncio.get_running_loop()
        ended = self._ended = asyncio.Event()
        ours, theirs = socket.socketpair()
        page = self.page = ProgressPage.in_memory()

        def run() -> None:
            link, family = LinkEnd(theirs), self._family
            if family is None:
                host = CoreHost(link, SystemClock(), page=page)
            else:
                host = CoreHost(link, SystemClock(), family.make_core, turn=family.turn, page=page)
            self._status = host.run()
            with contextlib.suppress(RuntimeError):  # the loop was closed without waiting for us
                loop.call_soon_threadsafe(ended.set)

        self._ours = ours.dup()
        self._thread = threading.Thread(target=run, name="pdserve-engine-core", daemon=True)
        self._thread.start()
        return ours

    async def ended(self) -> str:
        if self._ended is None or self._thread is None:
            return "never started"
        await self._ended.wait()
        self._thread.join()
        self._hang_up()
        return f"ended with status {self._status} (as a thread)"

    def kill(self) -> None:
        self._hang_up()

    def _hang_up(self) -> None:
        if self._ours is not None:
            with contextlib.suppress(OSError):
                self._ours.shutdown(socket.SHUT_RDWR)
            self._ours.close()
            self._ours = None


def _describe(returncode: int | None) -> str:
    if returncode is None:
        return "ended"
    if returncode >= 0:
        return f"exited with code {returncode}"
    try:
        return f"was killed by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"was killed by signal {-returncode}"


def _search_path() -> str:
    """The child imports exactly what we would."""
    return os.pathsep.join(os.path.abspath(entry) for entry in sys.path)


def _to_stderr(line: str) -> None:
    sys.stderr.write(f"{line}\n")

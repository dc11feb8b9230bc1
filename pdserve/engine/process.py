"""One run of the process in which cores live: its start, its stderr, its exit, its end by force.

It knows nothing of what goes through the cores' sockets, nor what an exit means: a carrier owns it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
from typing import TYPE_CHECKING

from pdserve.observe.heartbeat import HeartbeatPage

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Sequence

    from pdserve.ids import Seconds

__all__ = ["CoreProcess"]

_LINE_LIMIT = 8192
_STDERR_GRACE: Seconds = 0.5
"""After the exit: a grandchild may hold the pipe open, the last line has come by then."""
_ROUTINE = re.compile(
    r"\d\d:\d\d:\d\d\.\d{3} (DEBUG|INFO|WARNING) "
    r'|\{"time": "[^"]*", "level": "(debug|info|warning)"'
)
"""Lines of `observe.logs`, of either form, that are no errors."""


class CoreProcess:
    """One run of `python -m pdserve.engine_core.main`: its stderr, its exit, its end by force."""

    def __init__(
        self,
        transport: asyncio.SubprocessTransport,
        child: _ChildProtocol,
        pages: Sequence[HeartbeatPage],
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
    ) -> CoreProcess:
        """Start it with `arguments` and a core behind each of `socks`, which stay the caller's; it
        `inherits` further descriptors. Raises `OSError`.

        Cancellation: what was started is killed.
        """
        pages: list[HeartbeatPage] = []
        try:
            for _ in socks:
                pages.append(HeartbeatPage.create())  # noqa: PERF401  those made are closed below
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
        pages: Sequence[HeartbeatPage],
        on_line: Callable[[str], None] | None,
        inherits: Sequence[int],
    ) -> CoreProcess:
        loop = asyncio.get_running_loop()
        fds = [sock.fileno() for sock in socks]
        shared = [page.fd for page in pages if page.fd is not None]
        named = [part for fd in fds for part in ("--fd", str(fd))]
        named += [part for fd in shared for part in ("--page", str(fd))]
        # -P: the child's search path is ours, not whatever directory we happen to stand in.
        program = (
            sys.executable,
            "-P",
            "-m",
            "pdserve.engine_core.main",
            "--parent",
            str(os.getpid()),
        )
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
        """Waits for the end of the process; returns how it ended, as text to follow "the engine
        process". Cancellation stops only the wait."""
        await asyncio.wait({self._child.exited})  # unlike `await`, no harm in being cancelled
        await asyncio.wait({self._child.stderr_closed}, timeout=_STDERR_GRACE)
        returncode = self._transport.get_returncode()
        self._transport.close()
        last = self._child.last_line
        if not last and returncode is not None and returncode > 0:
            last = "what it logged before says why"
        status = _describe(returncode)
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

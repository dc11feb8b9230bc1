"""One run of the process that holds the cores: start, stderr, exit, kill.

It knows neither what the cores' sockets carry nor what an exit means; its launcher owns it.
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
    from collections.abc import Callable, Mapping, Sequence

    from pdserve.ids import Seconds

__all__ = ["CoreProcess", "process_arguments"]

_LINE_LIMIT = 8192
_STDERR_GRACE: Seconds = 0.5
"""Seconds to wait for the end of stderr after the exit. A grandchild may hold the pipe open, but
the last line has come by then."""
_ROUTINE = re.compile(
    r"\d\d:\d\d:\d\d\.\d{3} (DEBUG|INFO|WARNING) "
    r'|\{"time": "[^"]*", "level": "(debug|info|warning)"'
)
"""Log lines of `observe.logs` (text or JSON) that are not errors."""


def process_arguments(
    log_format: str, log_level: str, log_fields: Mapping[str, str], engine: str
) -> tuple[str, ...]:
    """Return the command line's end: how the process logs, and the engine it imports at once."""
    early = ("--engine", engine) if engine else ()
    fields = (f"{name}={value}" for name, value in log_fields.items())
    return (
        *early,
        *("--log-format", log_format, "--log-level", log_level),
        *("--log-fields", *fields),
    )


class CoreProcess:
    """One run of `python -m pdserve.engine_core.child`: its stderr, its exit, its kill."""

    def __init__(
        self,
        transport: asyncio.SubprocessTransport,
        child: _ChildProtocol,
        pages: Sequence[HeartbeatPage],
    ) -> None:
        """Use `start`."""
        self.pages = pages
        """Heartbeats of its cores, in order; their memory is released when the process exits."""
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
        """Start the process with `arguments` and one core behind each of `socks`, which stay the
        caller's. The child also gets the descriptors in `inherits`. Raises `OSError`.

        Cancellation: kills what was started.
        """
        pages: list[HeartbeatPage] = []
        try:
            for _ in socks:
                pages.append(HeartbeatPage.create())  # noqa: PERF401  closed after errors
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
        # -P: the child's search path is this process's, without the current directory.
        program = (
            sys.executable,
            "-P",
            "-m",
            "pdserve.engine_core.child",
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
        """Done once the process has exited. For the caller to wait on, not to set."""
        return self._child.exited

    async def ended(self) -> str:
        """Wait for the exit; returns how the process ended, as text that follows "the engine
        process". Cancellation stops only the wait."""
        # Unlike `await`, `wait` leaves the future alone when this call is cancelled.
        await asyncio.wait({self._child.exited})
        await asyncio.wait({self._child.stderr_closed}, timeout=_STDERR_GRACE)
        returncode = self._transport.get_returncode()
        self._transport.close()
        last = self._child.last_line
        if not last and returncode is not None and returncode > 0:
            last = "what it logged before says why"
        status = _describe(returncode)
        return f"{status}: {last}" if last else status

    def kill(self) -> None:
        """Send SIGKILL. Idempotent."""
        with contextlib.suppress(ProcessLookupError):
            self._transport.send_signal(signal.SIGKILL)


class _ChildProtocol(asyncio.SubprocessProtocol):
    """Passes stderr on by lines, notes the exit, and keeps the last line that may explain it.
    Routine log lines explain nothing and would reach clients, so they are not kept."""

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
    """The search path of this process, so that the child imports the same modules."""
    return os.pathsep.join(os.path.abspath(entry) for entry in sys.path)


def _to_stderr(line: str) -> None:
    sys.stderr.write(f"{line}\n")

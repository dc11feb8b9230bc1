"""Launches an engine core: the `CoreLauncher` protocol, and the launcher of a process per core.

A launcher starts one core, returns the node's end of its socket, tells how the core ended, and can
kill it. It never reads the socket. `CoreClient` makes one per run of the core and waits for its
end. `shared_process` has the launcher of cores that share a process; `pdserve.testing` has one that
runs the core in a thread.
"""

from __future__ import annotations

import socket
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

from pdserve.engine.process import CoreProcess, process_arguments

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pdserve.observe.heartbeat import HeartbeatPage

__all__ = ["CoreLauncher", "ProcessLauncher"]


class CoreLauncher(Protocol):
    """Launches one run of a core. Used once."""

    @property
    def page(self) -> HeartbeatPage | None:
        """The core's heartbeat; None before `launch`. It stays readable after the core's end."""
        ...

    @property
    def pid(self) -> int | None:
        """The id of the process that the core runs in; None before `launch`, or if it is this
        one."""
        ...

    async def launch(self) -> socket.socket:
        """Start the core; returns the node's end of its socket, which the caller owns. Raises
        `OSError`. Called once.

        Cancellation: a core that was started ends with its socket; call `kill` and `ended`.
        """
        ...

    async def ended(self) -> str:
        """Wait for the core's end; returns how it ended, as text to follow "the engine process".

        Cancellation: only the wait stops; it may be called again.
        """
        ...

    def kill(self) -> None:
        """End the core without its cooperation, as far as this kind of launcher can."""
        ...


class ProcessLauncher:
    """Launches a core in a child process of its own (`CoreProcess`)."""

    def __init__(
        self,
        *,
        log_format: str = "text",
        log_level: str = "info",
        log_fields: Mapping[str, str] = MappingProxyType({}),
        on_line: Callable[[str], None] | None = None,
        engine: str = "",
    ) -> None:
        """`log_fields` are in each of the child's JSON lines. `on_line` gets each line of the
        child's stderr; by default it is copied to ours. The child imports `engine` at once, before
        it is told to load it."""
        self._arguments = process_arguments(log_format, log_level, log_fields, engine)
        self._on_line = on_line
        self._process: CoreProcess | None = None
        self._waiting: socket.socket | None = None
        """The node's end of the socket of a process that `start_early` has started."""
        self.page: HeartbeatPage | None = None

    @property
    def pid(self) -> int | None:
        """The child's process id; None before `launch`."""
        return None if self._process is None else self._process.pid

    async def start_early(self) -> None:
        """Start the process before `launch`, which then finds it waiting. Raises `OSError`."""
        self._waiting = await self._start()

    async def discard(self) -> None:
        """End a process that was started early and not launched. Cancellation: it is killed."""
        if self._waiting is not None:
            self._waiting.close()
            self._waiting = None
            self.kill()
            _ = await self.ended()

    async def launch(self) -> socket.socket:
        waiting, self._waiting = self._waiting, None
        if waiting is None or self._process is None:
            return await self._start()
        if self._process.exited.done():
            waiting.close()
            _ = await self._process.ended()
            return await self._start()
        return waiting

    async def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                self._process = await CoreProcess.start(self._arguments, [theirs], self._on_line)
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

"""Launches several cores in one process that share their weights, for an all-in-one node.

Each core has a client of its own, which launches, watches and restarts it as if it were alone. A
run of the process is a *generation*: the first client that launches starts it, or `start_early`
before any client, and the others find their socket waiting. A core whose client never launches
waits for `StartCore` and costs nothing.

A core that stops in order leaves the others running, and the process exits with the last one. Any
other end takes all cores: a core that breaks down, a `kill` by one client, or a client that
launches again while its old core still runs. The clients then restart, each after its own delay,
and meet in the next generation.
"""

from __future__ import annotations

import asyncio
import os
import socket
from types import MappingProxyType
from typing import TYPE_CHECKING

from pdserve.engine.process import CoreProcess, process_arguments

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pdserve.engine.launcher import CoreLauncher
    from pdserve.ids import Seconds
    from pdserve.observe.heartbeat import HeartbeatPage

__all__ = ["SharedCoreProcess"]

_KILL_TIMEOUT: Seconds = 5.0
"""Seconds for the exit of a killed generation."""


class SharedCoreProcess:
    """Runs one process at a time, for the cores of `members` clients."""

    def __init__(
        self,
        members: int,
        *,
        log_format: str = "text",
        log_level: str = "info",
        log_fields: Mapping[str, str] = MappingProxyType({}),
        on_line: Callable[[str], None] | None = None,
        engine: str = "",
    ) -> None:
        """`log_fields` are in each of the process's JSON lines. `on_line` gets each line of the
        process's stderr; by default it is copied to ours. The process imports `engine` at once,
        before a core is told to load it."""
        self._members = members
        self._arguments = process_arguments(log_format, log_level, log_fields, engine)
        self._on_line = on_line
        self._generation: _Generation | None = None
        self._launching = asyncio.Lock()

    @property
    def pid(self) -> int | None:
        """Process id of the newest generation; None before the first."""
        return None if self._generation is None else self._generation.process.pid

    async def start_early(self) -> None:
        """Start the first process before any client launches its core. Raises `OSError`."""
        async with self._launching:
            if self._generation is None:
                self._generation = await self._start()

    async def discard(self) -> None:
        """End a process that was started early and in which no core was launched. Cancellation: it
        is killed."""
        generation = self._generation
        if generation is not None and not generation.claimed:
            generation.kill()
            _ = await generation.process.ended()

    def launcher(self, member: int) -> CoreLauncher:
        """Make the launcher for one run of core `member`, counted from 0."""
        return _Place(self, member)

    async def join(self, member: int) -> tuple[_Generation, socket.socket]:
        """Return the running generation, or start one, and the node's end of the member's socket in
        it.

        Raises `OSError` if no process can be started, or if the last one does not exit.
        """
        async with self._launching:
            generation = self._generation
            if generation is None or not generation.has_place(member):
                if generation is not None:
                    await generation.make_way()
                self._generation = generation = await self._start()
            return generation, generation.claim(member)

    async def _start(self) -> _Generation:
        return await _Generation.start(self._members, self._arguments, self._on_line)


class _Place:
    """The `CoreLauncher` of one core in one generation."""

    def __init__(self, shared: SharedCoreProcess, member: int) -> None:
        self._shared = shared
        self._member = member
        self._generation: _Generation | None = None

    @property
    def page(self) -> HeartbeatPage | None:
        generation = self._generation
        return None if generation is None else generation.process.pages[self._member]

    @property
    def pid(self) -> int | None:
        return None if self._generation is None else self._generation.process.pid

    async def launch(self) -> socket.socket:
        self._generation, ours = await self._shared.join(self._member)
        return ours

    async def ended(self) -> str:
        if self._generation is None:
            return "never started"
        return await self._generation.ended(self._member)

    def kill(self) -> None:
        if self._generation is not None:
            self._generation.kill()


class _Generation:
    """One run of the process: which cores were launched in it, and which have ended."""

    def __init__(self, process: CoreProcess, places: list[socket.socket], ends: int) -> None:
        """`ends` is a pipe: the process writes the number of each core that stopped in order."""
        self._loop = asyncio.get_running_loop()
        self.process = process
        self._vacant: dict[int, socket.socket] = dict(enumerate(places))
        self._cores = [self._loop.create_future() for _ in places]
        """Done when the core has stopped in order, or the process has exited."""
        self._claimed: set[int] = set()
        self._doomed = False
        self._ends: int | None = ends
        os.set_blocking(ends, False)
        self._loop.add_reader(ends, self._read_ends)
        process.exited.add_done_callback(self._over)

    @classmethod
    async def start(
        cls, members: int, arguments: tuple[str, ...], on_line: Callable[[str], None] | None
    ) -> _Generation:
        """Start a process. Raises `OSError`. Cancellation: leaves nothing behind."""
        pairs = [socket.socketpair() for _ in range(members)]
        ours, theirs = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        reader, writer = os.pipe()
        try:
            named = ["--ends", str(writer), *arguments]
            process = await CoreProcess.start(named, theirs, on_line, inherits=[writer])
        except BaseException:
            os.close(reader)
            _close(ours)
            raise
        finally:
            os.close(writer)
            _close(theirs)
        return cls(process, ours, reader)

    # ------------------------------------------------------------------ places

    @property
    def claimed(self) -> bool:
        """True once a core has been launched in the process."""
        return bool(self._claimed)

    def has_place(self, member: int) -> bool:
        """Whether the process runs, as far as is known, and `member` was not launched in it yet."""
        return member in self._vacant and not self._doomed

    def claim(self, member: int) -> socket.socket:
        """Return the member's socket, which the caller then owns."""
        self._claimed.add(member)
        return self._vacant.pop(member)

    async def make_way(self) -> None:
        """Kill the process before the next generation starts. Raises `OSError` if it does not
        exit."""
        self.kill()
        await asyncio.wait({self.process.exited}, timeout=_KILL_TIMEOUT)
        if not self.process.exited.done():
            raise OSError("the last engine process does not exit")

    def kill(self) -> None:
        self._doomed = True
        self.process.kill()

    # ------------------------------------------------------------------ ends

    async def ended(self, member: int) -> str:
        """Wait for the end of the member's core; returns how it ended. The process goes on if other
        cores live in it."""
        await asyncio.wait({self._cores[member]})
        if self._others_live():
            return "has ended this core and goes on"
        return await self.process.ended()

    def _others_live(self) -> bool:
        return any(not self._cores[member].done() for member in self._claimed)

    def _read_ends(self) -> None:
        """Read the numbers of cores that have stopped, or the end of the pipe."""
        if self._ends is None:
            return
        try:
            members = os.read(self._ends, len(self._cores))
        except (BlockingIOError, InterruptedError):
            return
        if not members:
            self._close_pipe()
        for member in members:
            self._core_ended(member)
        if self._claimed and not self._others_live():
            self._doomed = True
            # This ends the cores that were never launched, and so the process.
            self._vacate()

    def _over(self, exited: asyncio.Future[None]) -> None:
        self._doomed = True
        self._close_pipe()
        self._vacate()
        for member in range(len(self._cores)):
            self._core_ended(member)

    def _core_ended(self, member: int) -> None:
        if not self._cores[member].done():
            self._cores[member].set_result(None)

    def _close_pipe(self) -> None:
        if self._ends is not None:
            self._loop.remove_reader(self._ends)
            os.close(self._ends)
            self._ends = None

    def _vacate(self) -> None:
        _close(list(self._vacant.values()))
        self._vacant.clear()


def _close(sockets: list[socket.socket]) -> None:
    for sock in sockets:
        sock.close()

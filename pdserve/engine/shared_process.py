"""Carriers of several cores that live in one process and share what they read: an all-in-one's.

Every member has a client of its own, which launches, watches and restarts its core as if nobody
else were there. What it gets is its place in a *generation*, one run of the process: the first who
launches starts it, the others find their socket waiting. A member that never comes leaves a host
behind that waits for a `Start` and costs nothing.

Who ends in order leaves the others alone, and the process ends with the last. Every other end is
everybody's: a core that breaks down ends the process, so does `kill` by one member, and so does a
member that launches again while its old place is still there. The clients then start again, each
after its own pause, and meet in the next generation.
"""

from __future__ import annotations

import asyncio
import os
import socket
from typing import TYPE_CHECKING

from pdserve.engine.process import CoreProcess

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.engine.launcher import CoreLauncher
    from pdserve.ids import Seconds
    from pdserve.observe.heartbeat import HeartbeatPage

__all__ = ["SharedCoreProcess"]

_KILL_TIMEOUT: Seconds = 5.0
"""For the exit of the generation before, once it was killed."""


class SharedCoreProcess:
    """One process at a time, for the cores of `members` clients."""

    def __init__(
        self,
        members: int,
        *,
        log_format: str = "text",
        log_level: str = "info",
        on_line: Callable[[str], None] | None = None,
    ) -> None:
        """`on_line` gets each line of the process's stderr; by default it goes to our own."""
        self._members = members
        self._log = ("--log-format", log_format, "--log-level", log_level)
        self._on_line = on_line
        self._generation: _Generation | None = None
        self._launching = asyncio.Lock()

    @property
    def pid(self) -> int | None:
        """Of the newest process; None before the first."""
        return None if self._generation is None else self._generation.process.pid

    def carrier(self, member: int) -> CoreLauncher:
        """For one life of the core of `member`, counted from 0."""
        return _Place(self, member)

    async def join(self, member: int) -> tuple[_Generation, socket.socket]:
        """The generation that runs, or a new one, and our end of the member's socket in it.

        Raises `OSError` if no process can be started, or the one before does not go.
        """
        async with self._launching:
            generation = self._generation
            if generation is None or not generation.has_place(member):
                if generation is not None:
                    await generation.make_way()
                generation = await _Generation.start(self._members, self._log, self._on_line)
                self._generation = generation
            return generation, generation.claim(member)


class _Place:
    """A `CoreLauncher`: one member in one generation."""

    def __init__(self, shared: SharedCoreProcess, member: int) -> None:
        self._shared = shared
        self._member = member
        self._generation: _Generation | None = None

    @property
    def page(self) -> HeartbeatPage | None:
        generation = self._generation
        return None if generation is None else generation.process.pages[self._member]

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
    """One run of the process: who has taken his place in it, and whose core has ended."""

    def __init__(self, process: CoreProcess, places: list[socket.socket], ends: int) -> None:
        """`ends`: the pipe in which the process says whose core has ended in order."""
        self._loop = asyncio.get_running_loop()
        self.process = process
        self._vacant: dict[int, socket.socket] = dict(enumerate(places))
        self._cores = [self._loop.create_future() for _ in places]
        """Done when the core has ended in order, or the process has."""
        self._claimed: set[int] = set()
        self._doomed = False
        self._ends: int | None = ends
        os.set_blocking(ends, False)
        self._loop.add_reader(ends, self._read_ends)
        process.exited.add_done_callback(self._over)

    @classmethod
    async def start(
        cls, members: int, log: tuple[str, ...], on_line: Callable[[str], None] | None
    ) -> _Generation:
        """Raises `OSError`. Cancellation: nothing is left."""
        pairs = [socket.socketpair() for _ in range(members)]
        ours, theirs = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        reader, writer = os.pipe()
        try:
            arguments = ["--ends", str(writer), *log]
            process = await CoreProcess.start(arguments, theirs, on_line, inherits=[writer])
        except BaseException:
            os.close(reader)
            _close(ours)
            raise
        finally:
            os.close(writer)
            _close(theirs)
        return cls(process, ours, reader)

    # ------------------------------------------------------------------ places

    def has_place(self, member: int) -> bool:
        """It runs, as far as we know, and the member has not been in it."""
        return member in self._vacant and not self._doomed

    def claim(self, member: int) -> socket.socket:
        """The member's socket, from now on the caller's."""
        self._claimed.add(member)
        return self._vacant.pop(member)

    async def make_way(self) -> None:
        """End it for the next generation. Raises `OSError` if it stays."""
        self.kill()
        await asyncio.wait({self.process.exited}, timeout=_KILL_TIMEOUT)
        if not self.process.exited.done():
            raise OSError("the process before does not end")

    def kill(self) -> None:
        self._doomed = True
        self.process.kill()

    # ------------------------------------------------------------------ ends

    async def ended(self, member: int) -> str:
        """See `CoreLauncher.ended`. The process goes on if other cores live in it."""
        await asyncio.wait({self._cores[member]})
        if self._others_live():
            return "has ended this core and goes on"
        return await self.process.ended()

    def _others_live(self) -> bool:
        return any(not self._cores[member].done() for member in self._claimed)

    def _read_ends(self) -> None:
        """The pipe is readable: numbers of cores, or its end."""
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
            self._vacate()  # hosts that nobody came to end with this, and so does the process

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

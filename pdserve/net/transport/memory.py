"""Simulates a network in one process, with TCP's semantics and faults, for tests and simulation.

Hosts have names and reach each other by `name:port`. All times and choices come from the event
loop's clock and the world's seeded `random`, so a loop with virtual time replays a run exactly.
Faults are methods of the world; `faults` counts their effects, so that a test can check that they
happened.

    delay, bandwidth, random splits   `set_conditions`
    partition, one way or both        `partition`, `heal`: silence, not an error, as in a network
    reset, at once or inside a frame  `reset`, `reset_after`
    a process that is stopped         `pause`, `resume`: its kernel still accepts connections
    a process that dies               `crash`: its peers see resets, its listeners are gone
    a slow reader                     `set_conditions(bandwidth=...)`, or a paused transport

It knows nothing of frames. A world belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pdserve.errors import ConfigError, DialRefused, DialTimeout
from pdserve.net.address import join, split
from pdserve.net.transport.memory_pipe import Conditions, MemoryTransport
from pdserve.net.transport.memory_pipe import connect as join_ends

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from random import Random

    from pdserve.ids import Bytes, Seconds
    from pdserve.net.base import NetListener

__all__ = ["Conditions", "MemoryNetwork", "MemoryWorld"]

_FIRST_PORT = 49152


class MemoryWorld:
    """All hosts, listeners and connections; every fault is a method."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.context = contextvars.copy_context()
        """Context for callbacks that belong to no host: the context of the world's creator."""
        self.faults: Counter[str] = Counter()
        """How often each kind of fault had an effect."""
        self._default = Conditions()
        self._conditions: dict[tuple[str, str], Conditions] = {}
        self._held: dict[str, None] = {}
        self._listeners: dict[tuple[str, int], _Listener] = {}
        self._transports: dict[MemoryTransport, None] = {}
        self._unaccepted: list[tuple[str, Callable[[], None]]] = []
        self._waiting: dict[asyncio.Future[None], None] = {}
        self._next_port = _FIRST_PORT

    def network(self, host: str) -> MemoryNetwork:
        """The network as a node on `host` uses it."""
        return MemoryNetwork(self, host)

    # ------------------------------------------------------------------ faults

    def set_conditions(
        self, source: str | None = None, target: str | None = None, **changes: Any
    ) -> None:
        """Changes fields of `Conditions` from `source` to `target`; without hosts, everywhere."""
        if source is None or target is None:
            self._default = replace(self._default, **changes)
            for pair, conditions in self._conditions.items():
                self._conditions[pair] = replace(conditions, **changes)
        else:
            now = self.conditions(source, target)
            self._conditions[source, target] = replace(now, **changes)
        self._look()

    def partition(self, a: str, b: str, *, one_way: bool = False) -> None:
        """Stops delivery from `a` to `b`, and back unless `one_way`."""
        self.set_conditions(a, b, silent=True)
        if not one_way:
            self.set_conditions(b, a, silent=True)

    def heal(self, a: str | None = None, b: str | None = None) -> None:
        """Ends partitions between two hosts, or all; what was under way arrives."""
        if a is None or b is None:
            self.set_conditions(silent=False)
        else:
            self.set_conditions(a, b, silent=False)
            self.set_conditions(b, a, silent=False)

    def reset(self, a: str, b: str) -> None:
        """Resets every connection between two hosts."""
        for transport in self._between(a, b):
            self.fired("reset")
            transport.pipes()[0].break_off()

    def reset_after(self, source: str, target: str, count: Bytes | None) -> None:
        """Resets each connection once `count` more bytes have arrived from `source` at `target`;
        None cancels that.
        """
        for transport in self._between(source, target):
            pipe = next(pipe for pipe in transport.pipes() if pipe.source == source)
            pipe.reset_after = count

    def pause(self, host: str) -> None:
        """Stalls the process on `host`: it reads nothing, and nothing it writes leaves."""
        self._held[host] = None

    def resume(self, host: str) -> None:
        """Continues a paused process, with all that has arrived meanwhile."""
        self._held.pop(host, None)
        waiting, self._unaccepted = self._unaccepted, []
        for where, accept in waiting:
            if where == host:
                accept()
            else:
                self._unaccepted.append((where, accept))
        self._look()

    def crash(self, host: str) -> None:
        """Ends the process on `host`, not its kernel: connections are reset, dials refused. A peer
        behind a partition sees the reset when the partition ends.
        """
        self.fired("crash")
        for address in [address for address in self._listeners if address[0] == host]:
            del self._listeners[address]
        for transport in tuple(self._transports):
            outgoing = transport.pipes()[0]
            if outgoing.source != host:
                continue
            if outgoing.conditions.silent:
                outgoing.drop(reset=True)
                transport.was_reset()
            else:
                outgoing.break_off()

    # ------------------------------------------------------------------ interface for pipes

    def conditions(self, source: str, target: str) -> Conditions:
        return self._conditions.get((source, target), self._default)

    def held(self, host: str) -> bool:
        return host in self._held

    def fired(self, fault: str) -> None:
        self.faults[fault] += 1

    def over(self, transport: MemoryTransport) -> None:
        self._transports.pop(transport, None)

    def _look(self) -> None:
        """Applies changed conditions: pipes and packets that were held up go on."""
        for transport in tuple(self._transports):
            for pipe in transport.pipes():
                pipe.look()
        waiting, self._waiting = self._waiting, {}
        for trip in waiting:
            if not trip.done():
                trip.set_result(None)

    def _between(self, a: str, b: str) -> Iterator[MemoryTransport]:
        """One transport of each connection between two hosts."""
        for transport in tuple(self._transports):
            outgoing = transport.pipes()[0]
            if (outgoing.source, outgoing.target) == (a, b):
                yield transport

    # ------------------------------------------------------------------ listening, connecting

    @property
    def connections(self) -> int:
        """Number of connection ends that are not over."""
        return len(self._transports)

    def connections_of(self, host: str) -> list[MemoryTransport]:
        """The connection ends at `host`."""
        return [end for end in self._transports if end.pipes()[0].source == host]

    def listen(
        self, host: str, port: int, factory: Callable[[], asyncio.BaseProtocol]
    ) -> _Listener:
        if port == 0:
            port = self._take_port()
        if (host, port) in self._listeners:
            raise ConfigError(f"cannot listen on {join(host, port)}: it is in use")
        listener = self._listeners[host, port] = _Listener(self, host, port, factory)
        return listener

    def unlisten(self, listener: _Listener) -> None:
        if self._listeners.get((listener.host, listener.port)) is listener:
            del self._listeners[listener.host, listener.port]

    async def connect(
        self, source: str, address: str, factory: Callable[[], asyncio.BaseProtocol]
    ) -> None:
        """Connects after a round trip. Waits without limit if packets do not arrive."""
        target, port = split(address)
        await self._trip(source, target)
        listener = self._listeners.get((target, port))
        await self._trip(target, source)
        if listener is None or self._listeners.get((target, port)) is not listener:
            raise DialRefused(f"nothing listens at {address}")
        loop = asyncio.get_running_loop()
        dialler = (source, self._take_port()), factory(), contextvars.copy_context()
        context = listener.context.copy()
        acceptor = (target, port), context.run(listener.factory), context
        ours, theirs = join_ends(self, loop, dialler, acceptor)
        self._transports[ours] = self._transports[theirs] = None
        if self.held(target):
            self._unaccepted.append((target, theirs.made))
        else:
            loop.call_soon(theirs.made, context=self.context)
        ours.made()

    async def _trip(self, source: str, target: str) -> None:
        """Sends a packet from one kernel to another until it arrives."""
        loop = asyncio.get_running_loop()
        while (now := self.conditions(source, target)).silent:
            waiting = loop.create_future()
            self._waiting[waiting] = None
            try:
                await asyncio.wait({waiting})
            finally:
                self._waiting.pop(waiting, None)
        if now.delay_max:
            await asyncio.sleep(self.random.uniform(now.delay_min, now.delay_max))

    def _take_port(self) -> int:
        self._next_port += 1
        return self._next_port - 1


class MemoryNetwork:
    """One host's view of a world (a `base.ByteNetwork`)."""

    def __init__(self, world: MemoryWorld, host: str) -> None:
        self._world = world
        self._host = host

    def binding(self, transport: asyncio.BaseTransport) -> bytes:
        return b""

    async def listen(
        self, address: str, factory: Callable[[], asyncio.BaseProtocol]
    ) -> NetListener:
        host, port = split(address)
        if host != self._host:
            raise ConfigError(f"cannot listen on {address}: this host is {self._host}")
        return self._world.listen(host, port, factory)

    async def connect(
        self, address: str, factory: Callable[[], asyncio.BaseProtocol], *, timeout: Seconds
    ) -> None:
        try:
            async with asyncio.timeout(timeout):
                await self._world.connect(self._host, address, factory)
        except TimeoutError:
            raise DialTimeout(f"{address} did not answer within {timeout:g} s") from None


class _Listener:
    """A listening address (a `base.NetListener`)."""

    def __init__(
        self,
        world: MemoryWorld,
        host: str,
        port: int,
        factory: Callable[[], asyncio.BaseProtocol],
    ) -> None:
        self.host = host
        self.port = port
        self.factory = factory
        self.context = contextvars.copy_context()
        self.address = join(host, port)
        self._world = world

    async def close(self) -> None:
        self._world.unlisten(self)

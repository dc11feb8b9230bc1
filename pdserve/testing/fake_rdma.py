"""Fakes RDMA in Python, for simulation and for tests of every fault.

It does what real devices do: work requests of one queue pair land in order, those of two in any; a
write needs the right key and stays inside its region, else both queue pairs are lost; the source is
read when the write happens, not when it is posted; bytes of a failed send may land later; a process
that dies has packets under way; a destroyed queue pair accepts nothing more.

Faults come from the fabric's randomness, or from calls (`hold`, `kill`, `break_keys`). Time is the
event loop's, so that a virtual loop makes all of it deterministic.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import Counter, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec

from pdserve.transfer.rdma.verbs_path import VerbsPath
from pdserve.transfer.transport_base import TransportBase

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextvars import Context
    from random import Random

    from pdserve.ids import Bytes, Epoch, NodeId, NodeLife, Seconds
    from pdserve.messages.transfer import PathHello, RegionCard
    from pdserve.transfer.base import CallPeer, Region
    from pdserve.transfer.rdma.verbs_path import WorkRequestChain
    from pdserve.transfer.transport_base import HelloExchange

__all__ = ["FakeFabric", "FakeFaults", "FakePath", "FakeTransport"]

_IN_FLIGHT: Final = 4
"""Work requests of a queue pair that a dying process leaves on the wire."""


@dataclass(slots=True)
class FakeFaults:
    """The faults of work requests, each with its probability or times. All off by default."""

    delay: tuple[Seconds, Seconds] = (0.0, 0.0)
    """Least and most seconds of one, after the one before it."""
    lost: float = 0.0
    """Probability that it never lands; the sender gives up."""
    late: float = 0.0
    """Probability that it lands after the sender has given up."""
    give_up: Seconds = 0.5
    """Seconds for which a sender tries."""
    late_by: tuple[Seconds, Seconds] = (0.0, 2.0)
    """Least and most seconds after that until it lands."""
    wrong: float = 0.0
    """Probability that it lands with a wrong byte."""


class FakeFabric:
    """Connects the fake devices of one simulated world."""

    def __init__(
        self,
        random: Random,
        faults: FakeFaults | None = None,
        pace: Callable[[Bytes], Seconds] = lambda size: 0.0,
    ) -> None:
        """`pace` returns the seconds of one write of so many bytes, before faults; 0 bytes: a
        notification."""
        self.pace = pace
        self.random = random
        self.faults = faults or FakeFaults()
        self.counts: Counter[str] = Counter()
        """What has happened: landed, lost, late, late_landed, late_dropped, wrong, refused,
        killed."""
        self.pairs: dict[int, FakeQueuePair] = {}
        self.held: set[NodeLife] = set()
        self.context: Context | None = None
        """The context in which late packets arrive: they are on the wire, whatever happens to their
        sender. None: the sender's context."""
        self._numbers = 0

    def takes(self, pair: FakeQueuePair, size: Bytes) -> Seconds:
        """Seconds of a write of so many bytes that the queue pair begins now."""
        return self.pace(size)

    def takes_probe(self, size: Bytes) -> Seconds:
        """Seconds of a probe of so many bytes, on a path without other traffic."""
        return self.pace(size)

    def number(self) -> int:
        """A new queue pair number."""
        self._numbers += 1
        return self._numbers

    def hold(self, node: NodeLife) -> None:
        """Hold back everything that the node posts until `release`."""
        self.held.add(node)

    def release(self, node: NodeLife) -> None:
        """Let the held work requests continue."""
        self.held.discard(node)
        for pair in list(self.pairs.values()):
            if pair.owner == node:
                pair.at_home(pair.pump)

    def kill(self, node: NodeLife) -> None:
        """The process dies: its queue pairs send nothing more, except for packets already on the
        wire."""
        self.counts["killed"] += 1
        for pair in list(self.pairs.values()):
            if pair.owner == node:
                pair.die()

    def landed(self, target: FakeQueuePair, region: int, offset: Bytes, data: bytes) -> None:
        """A late packet arrives."""
        if target.state == "destroyed":
            self.counts["late_dropped"] += 1
            return
        self.counts["late_landed"] += 1
        target.transport.writing(region, offset, len(data))
        view = target.transport.regions[region].view
        assert view is not None
        view[offset : offset + len(data)] = data


@dataclass(slots=True, eq=False)
class _Write:
    """One work request: a write, or a notification (`length` 0) at the end of a chain."""

    chain: WorkRequestChain
    source: int = 0
    destination: int = 0
    here: Bytes = 0
    there: Bytes = 0
    length: Bytes = 0


class FakeQueuePair:
    """A simulated queue pair; implements `transfer.rdma.verbs_path.QueuePair`."""

    def __init__(self, transport: FakeTransport) -> None:
        self.transport = transport
        self.fabric = transport.fabric
        self.owner = transport.key
        self.number = self.fabric.number()
        self.peer = 0
        self.path: FakePath | None = None
        self.state = "ready"
        self._context = contextvars.copy_context()
        """The context of the queue pair's own process: in a world of several processes, an event at
        a peer runs in the peer's context."""
        self._queue: deque[_Write] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self.fabric.pairs[self.number] = self

    def post(self, chain: WorkRequestChain) -> None:
        for move in chain.moves:
            for here, there, length in move.runs:
                write = _Write(chain, move.source, move.destination, here, there, length)
                self._queue.append(write)
        self._queue.append(_Write(chain))
        self.pump()

    def at_home(self, call: Callable[..., None], *args: object) -> None:
        """Call soon, in the context of the process that owns this; not while that process is
        paused."""
        asyncio.get_running_loop().call_soon(call, *args, context=self._context)

    def _notified(self, word: int) -> None:
        if self.state == "ready" and self.path is not None:
            self.path.notified(word)

    def destroy(self) -> None:
        self.state = "destroyed"
        self._queue.clear()
        self._cancel()
        self.fabric.pairs.pop(self.number, None)

    def die(self) -> None:
        """The owning process dies; some packets stay on the wire."""
        on_wire = [self._queue[i] for i in range(min(_IN_FLIGHT, len(self._queue)))]
        for write in on_wire:
            self._send_late(write, 0.0)
        self.destroy()

    # ------------------------------------------------------------------ work queue

    def pump(self) -> None:
        """Start the first work request, unless one is under way."""
        idle = self._timer is None and self.state == "ready" and self._queue
        if idle and self.owner not in self.fabric.held:
            low, high = self.fabric.faults.delay
            delay = low + (high - low) * self.fabric.random.random()
            self._later(delay + self.fabric.takes(self, self._queue[0].length), self._land)

    def _later(self, delay: Seconds, call: object) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(delay, call)  # type: ignore[arg-type]

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _land(self) -> None:
        self._timer = None
        if self.owner in self.fabric.held:
            return
        fabric, write = self.fabric, self._queue[0]
        faults, dice = fabric.faults, fabric.random.random()
        target = fabric.pairs.get(self.peer)
        if dice < faults.lost or target is None or target.state != "ready":
            fabric.counts["lost"] += 1
            self._later(faults.give_up, self._give_up)
        elif dice < faults.lost + faults.late:
            fabric.counts["late"] += 1
            self._send_late(write, faults.give_up)
            self._later(faults.give_up, self._give_up)
        elif write.length and not self._write(write, target, wrong=dice > 1.0 - faults.wrong):
            fabric.counts["refused"] += 1
            target.at_home(target.break_, "write", "a remote access error: key or range")
            self.break_("write", "the peer refused the key or the range")
        else:
            self._completed(write, target)

    def _write(self, write: _Write, target: FakeQueuePair, *, wrong: bool) -> bool:
        key = self.path.key_of(write.destination) if self.path is not None else -1
        if key != target.transport.keys[write.destination]:
            return False
        source = self.transport.regions[write.source].view
        memory = target.transport.regions[write.destination].view
        assert source is not None
        assert memory is not None
        if write.there < 0 or write.there + write.length > len(memory):
            return False
        self.transport.reading(write.source, write.here, write.length)
        target.transport.writing(write.destination, write.there, write.length)
        data = source[write.here : write.here + write.length]
        memory[write.there : write.there + write.length] = data
        self.fabric.counts["landed"] += 1
        if wrong:
            self.fabric.counts["wrong"] += 1
            memory[write.there] ^= 1
        return True

    def _completed(self, write: _Write, target: FakeQueuePair) -> None:
        self._queue.popleft()
        if not write.length:
            target.at_home(target._notified, write.chain.word)
            if self.path is not None:
                self.path.completed(write.chain.key)
        self.pump()

    def _send_late(self, write: _Write, after: Seconds) -> None:
        """What is on the wire carries the bytes of now."""
        target = self.fabric.pairs.get(self.peer)
        source = self.transport.regions[write.source].view
        if target is None or not write.length or source is None:
            return
        self.transport.reading(write.source, write.here, write.length)
        low, high = self.fabric.faults.late_by
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # a simulation has ended, and nobody is there to get the bytes
            return
        loop.call_later(
            after + low + (high - low) * self.fabric.random.random(),
            self.fabric.landed,
            target,
            write.destination,
            write.there,
            bytes(source[write.here : write.here + write.length]),
            context=self.fabric.context,
        )

    def _give_up(self) -> None:
        self._timer = None
        self.break_("write", "the peer does not acknowledge: retries exhausted")

    def break_(self, step: str, reason: str) -> None:
        """Fail the queue pair, and with it the path."""
        if self.state == "ready":
            self.state = "failed"
            self._queue.clear()
            self._cancel()
            if self.path is not None:
                self.path.fail(step, reason)


class FakePath(VerbsPath):
    """A path over fake queue pairs."""

    backend = "fake"
    transport: FakeTransport
    theirs: Sequence[RegionCard]

    async def probe(self, size: Bytes) -> Bytes:
        """Let the time of a probe pass."""
        await asyncio.sleep(self.transport.fabric.takes_probe(size))
        return size

    def key_of(self, region: int) -> int:
        """The key that the peer gave for its region."""
        return self.theirs[region].keys[0]


class _Rails(msgspec.Struct, frozen=True, array_like=True):
    """Details of PathHello and Welcome."""

    numbers: tuple[int, ...]


class FakeTransport(TransportBase):
    """A node with fake devices."""

    name = "fake"

    def __init__(
        self,
        node: NodeId,
        epoch: Epoch,
        regions: Sequence[Region],
        ask: CallPeer,
        fabric: FakeFabric,
        *,
        key: NodeLife,
        rails: int = 2,
        stripe: Bytes = 1 << 20,
    ) -> None:
        """`key` is this life of the node, as others name it. Regions need a view."""
        self.fabric = fabric
        self.key = key
        self.keys = [fabric.random.getrandbits(32) for _ in regions]
        super().__init__(node, epoch, regions, ask)
        self._rails = rails
        self._stripe = stripe

    def reading(self, region: int, offset: Bytes, length: Bytes) -> None:
        """Hook: bytes of this node are about to be sent."""

    def writing(self, region: int, offset: Bytes, length: Bytes) -> None:
        """Hook: bytes of a peer are about to land here."""

    def break_keys(self) -> None:
        """Make the keys that peers know invalid from now on."""
        self.keys = [key ^ 1 for key in self.keys]

    def _cards(self) -> tuple[RegionCard, ...]:
        pairs = zip(self.regions, self.keys, strict=True)
        return tuple(region.card((key,)) for region, key in pairs)

    async def _dial(self, peer: NodeLife, number: int, exchange: HelloExchange) -> FakePath:
        pairs = [FakeQueuePair(self) for _ in range(self._rails)]
        try:
            welcome = await exchange(_details(pairs))
            path = self._path(peer, number, welcome.regions, pairs, welcome.details)
        except BaseException:
            for pair in pairs:
                pair.destroy()
            raise
        path.remote = welcome.path
        return path

    async def _accept(
        self, peer: NodeLife, number: int, hello: PathHello
    ) -> tuple[FakePath, bytes]:
        rails = msgspec.msgpack.decode(hello.details, type=_Rails)
        pairs = [FakeQueuePair(self) for _ in range(len(rails.numbers))]
        try:
            path = self._path(peer, number, hello.regions, pairs, hello.details)
        except BaseException:
            for pair in pairs:
                pair.destroy()
            raise
        return path, _details(pairs)

    def _path(
        self,
        peer: NodeLife,
        number: int,
        theirs: Sequence[RegionCard],
        pairs: list[FakeQueuePair],
        details: bytes,
    ) -> FakePath:
        path = FakePath(
            peer,
            number,
            ours=self.cards,
            theirs=theirs,
            grants=self.grants,
            forget=self.forget,
            ask=self.ask,
        )
        remote = msgspec.msgpack.decode(details, type=_Rails).numbers
        for pair, other in zip(pairs, remote, strict=True):
            pair.path, pair.peer = path, other
        path.rails, path.peer_rails, path.stripe = pairs, len(remote), self._stripe
        path.transport, path.theirs = self, theirs
        return path


def _details(pairs: Sequence[FakeQueuePair]) -> bytes:
    return msgspec.msgpack.encode(_Rails(tuple(pair.number for pair in pairs)))

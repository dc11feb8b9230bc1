"""Movers on one loop or on threads of their own, whose questions a test carries as nodes do."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from pdserve.engine_core.kv_transfer.connector import (
    AttemptBroken,
    AttemptFenced,
    AttemptGranted,
    AttemptKey,
    ConnectorEvent,
    KvConnector,
    PartArrived,
    PartDelivered,
)
from pdserve.engine_core.kv_transfer.loop_connector import LoopKvConnector
from pdserve.engine_core.kv_transfer.thread_connector import ThreadKvConnector
from pdserve.errors import LinkLost, PdserveError
from pdserve.ids import NodeId, NodeLife
from pdserve.kv.storage import BlockMemory
from pdserve.messages.engine import (
    ControlCommand,
    ControlEvent,
    InboundControl,
    InboundControlReply,
    OutboundControl,
    OutboundControlReply,
    PathState,
    PathStates,
)
from pdserve.messages.transfer import TransferControl
from pdserve.testing.fake_rdma import FakeFabric, FakeTransport
from pdserve.testing.kv_oracle import expected_block, layouts, pattern
from pdserve.testing.transfer_support import ControlEnd
from pdserve.transfer.backends import TransferBackend
from pdserve.transfer.base import GrantSpec, KvPart, Region
from tests.support.patience import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

(LAYOUT,) = layouts(4, 1)
BLOCK = len(expected_block(LAYOUT, 0))


def fake(fabric: FakeFabric, name: str = "fake") -> TransferBackend:
    class Named(FakeTransport):
        def _path(self, *args):
            path = super()._path(*args)
            path.backend = name
            return path

    Named.name = name

    def make(key: NodeLife, regions, ask) -> FakeTransport:
        return Named(key.node, key.epoch, regions, ask, fabric, key=key)

    return TransferBackend(name=name, make=make, expected=lambda: 1e9)


@dataclass(eq=False)
class End:
    """One node's engine: a pool, and a mover that is yet to be set."""

    world: World
    key: NodeLife
    blocks: int
    mover: KvConnector = field(init=False)
    moved: list[ConnectorEvent] = field(default_factory=list)
    paths: list[PathState] = field(default_factory=list)
    asked: int = 0
    memory: BlockMemory = field(init=False)
    region: Region = field(init=False)
    control: ControlEnd | None = None
    """The node's end of the mover's socket; None: the mover is on this loop."""

    def __post_init__(self) -> None:
        self.memory = BlockMemory(self.blocks, (BLOCK,))
        export = self.memory.export() if self.memory.backing == "memfd" else None
        fd = None if export is None else export.fd
        self.region = Region(LAYOUT, self.blocks, self.memory.view(), fd)
        self.poison(range(self.blocks))

    def poison(self, blocks) -> None:
        for block in blocks:
            self.memory.view(block)[:] = pattern(BLOCK)

    def fill(self, names: dict[int, int]) -> None:
        for block, name in names.items():
            self.memory.view(block)[:] = expected_block(LAYOUT, name)

    def holds(self, names: dict[int, int]) -> bool:
        """These blocks have this content, all others nobody's."""
        return all(
            self.memory.view(block)
            == (expected_block(LAYOUT, names[block]) if block in names else pattern(BLOCK))
            for block in range(self.blocks)
        )

    def nudge(self) -> None:
        self.world.loop.call_soon_threadsafe(self.pump)

    def pump(self) -> None:
        """What a core does with a mover's events."""
        self.moved += self.mover.poll()
        self.world.changed.set()

    def say(self, event: ControlEvent) -> None:
        """What a node does with what a mover says, on the world's loop."""
        match event:
            case OutboundControl():
                self.asked += 1
                self.world.carry(self, event)
            case InboundControlReply():
                self.world.replied(self, event)
            case PathStates():
                self.paths = event.paths
        self.world.changed.set()

    def tell(self, command: ControlCommand) -> None:
        """What a node tells a mover."""
        if self.control is None:
            assert isinstance(self.mover, LoopKvConnector)
            self.mover.take(command)
        else:
            self.control.post(command)

    def by_thread(self, backends: Sequence[TransferBackend]) -> ThreadKvConnector:
        """Get a mover in a thread of its own, with the control socket that it has."""
        call = self.world.loop.call_soon_threadsafe
        self.control = ControlEnd(lambda event: void(call(self.say, event)))
        self.mover = mover = ThreadKvConnector(backends, self.nudge, self.control.theirs)
        return mover

    def of(self, kind, key: AttemptKey) -> list:
        return [m for m in self.moved if isinstance(m, kind) and m.key == key]

    def deliveries(self, handle: int) -> list[PartDelivered]:
        return [m for m in self.moved if isinstance(m, PartDelivered) and m.handle == handle]

    def order(self, key: AttemptKey, blocks: list[int]) -> GrantSpec:
        return GrantSpec(f"r-{key.handle}", key.attempt, 0, 4 * len(blocks), blocks)

    def free(self) -> None:
        if self.control is not None:
            self.control.close()
        if self.region.view is not None:
            self.region.view.release()
        self.memory.close()


class World:
    """Ends and the network between them. Make it on the loop."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.ends: dict[NodeLife, End] = {}
        self.changed = asyncio.Event()
        self.cut: set[NodeLife] = set()
        """Nothing they ask, or are asked, gets through."""
        self.silent: set[NodeLife] = set()
        """What they are asked is never answered."""
        self.refuse: Callable[[OutboundControl], PdserveError | None] = lambda question: None
        self._numbers = 0
        self._asking: dict[int, tuple[End, int]] = {}

    def end(self, name: str, epoch: int, blocks: int = 32) -> End:
        key = NodeLife(NodeId(name), epoch)
        end = self.ends[key] = End(self, key, blocks)
        return end

    def carry(self, asker: End, question: OutboundControl) -> None:
        peer = self.ends.get(NodeLife(NodeId(question.node), question.epoch))
        error = self.refuse(question)
        if peer is None or {asker.key, peer.key} & self.cut:
            error = LinkLost("nobody is there")
        if error is not None or peer is None:
            assert error is not None
            kind, message = type(error).__name__, error.message
            answer = OutboundControlReply(
                number=question.number, control=None, kind=kind, message=message
            )
            asker.tell(answer)
            return
        if peer.key in self.silent:
            return
        self._numbers += 1
        self._asking[self._numbers] = (asker, question.number)
        call = InboundControl(
            number=self._numbers,
            node=asker.key.node,
            epoch=asker.key.epoch,
            backend=question.backend,
            control=passed(question.control),
        )
        peer.tell(call)

    def replied(self, peer: End, reply: InboundControlReply) -> None:
        asker, number = self._asking.pop(reply.number)
        control = None if reply.control is None else passed(reply.control)
        asker.tell(
            OutboundControlReply(
                number=number, control=control, kind=reply.kind, message=reply.message
            )
        )

    async def until(self, met: Callable[[], bool], timeout: float = PATIENCE) -> None:
        async with asyncio.timeout(timeout):
            while not met():
                self.changed.clear()
                await self.changed.wait()


def void(result: object) -> None:
    """Drop a result."""


def passed(control: TransferControl) -> TransferControl:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(control), type=TransferControl)


def part(number: int, blocks: list[int], start: int = 0) -> KvPart:
    return KvPart(number, start, blocks, (0, LAYOUT.layers), bytes(range(16)) * len(blocks))


async def granted(
    world: World, end: End, peer: End, key: AttemptKey, blocks: list[int]
) -> AttemptGranted:
    """Open an attempt and wait for its ticket."""
    end.mover.open(key, peer.key, end.order(key, blocks))
    await world.until(lambda: bool(end.of((AttemptGranted, AttemptBroken), key)))
    (found,) = end.of((AttemptGranted, AttemptBroken), key)
    assert isinstance(found, AttemptGranted), found
    return found


async def lost(world: World, end: End, peer: End, key: AttemptKey, blocks: list[int]) -> None:
    """Open an attempt and wait until it is lost."""
    end.mover.open(key, peer.key, end.order(key, blocks))
    await world.until(lambda: bool(end.of(AttemptBroken, key)))


async def filled(world: World, d: End, p: End, key: AttemptKey, from_: list[int], to: list[int]):
    """One attempt from its opening to its end; both ends are done with it."""
    ticket = (await granted(world, d, p, key, to)).ticket
    p.mover.deliver(key.handle, d.key, ticket, part(0, from_))
    await world.until(lambda: bool(d.of((PartArrived, AttemptBroken), key)))
    await delivered(world, p, key.handle)
    assert d.of(AttemptBroken, key) == []
    (sent,) = p.deliveries(key.handle)
    assert sent.error is None, sent
    d.mover.finish(key)
    return sent


async def delivered(world: World, end: End, handle: int) -> None:
    """Wait until a part for this request is sent, or is known not to be."""
    await world.until(lambda: bool(end.deliveries(handle)))


async def revoked(world: World, end: End, key: AttemptKey, timeout: float) -> None:
    """Want nothing more of it; the fence comes within `timeout`."""
    before = len(end.of(AttemptFenced, key))
    end.mover.revoke(key)
    await world.until(lambda: len(end.of(AttemptFenced, key)) > before, timeout)

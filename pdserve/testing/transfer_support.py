"""Two nodes with pools for tests of KV transfers: wired to each other, poisoned, and watched."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from pdserve.errors import LinkLost, TransferError
from pdserve.ids import NodeId
from pdserve.kv.storage import BlockMemory
from pdserve.messages.transfer import Control
from pdserve.testing.device_memory import DeviceMemory
from pdserve.testing.kv_oracle import block_of, pattern, received
from pdserve.transfer.base import Order, Part, PeerKey, Region

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence

    from pdserve.ids import Bytes, Seconds
    from pdserve.messages.transfer import KvLayout, Ticket
    from pdserve.transfer.base import Ask, Path, Transport

__all__ = ["Ends", "Make", "NewMemory", "RecordingSink", "Side", "Waiter", "ends", "host_memory"]

PATIENCE: Seconds = 20.0
"""How long a test waits for what has to happen."""


class Make(Protocol):
    """A back end's transport for one side."""

    def __call__(self, key: PeerKey, regions: Sequence[Region], ask: Ask) -> Transport: ...


class NewMemory(Protocol):
    """Makes a rank's pool, for blocks of so many bytes."""

    def __call__(self, key: PeerKey, blocks: int, size: Bytes) -> BlockMemory | DeviceMemory: ...


class RecordingSink:
    """Remembers what it hears; `look` is called with each part, at that very moment."""

    def __init__(self, look: Callable[[int], None] | None = None) -> None:
        self.parts: list[int] = []
        self.failed: list[TransferError] = []
        self._look = look
        self._changed = asyncio.Event()

    def on_part(self, part: int) -> None:
        self.parts.append(part)
        if self._look is not None:
            self._look(part)
        self._changed.set()

    def on_failed(self, error: TransferError) -> None:
        self.failed.append(error)
        self._changed.set()

    async def until(self, met: Callable[[RecordingSink], bool]) -> None:
        """Wait until `met(self)`."""
        async with asyncio.timeout(PATIENCE):
            while not met(self):
                self._changed.clear()
                await self._changed.wait()


class Waiter:
    """A delivery's `done`."""

    def __init__(self) -> None:
        self.calls: list[TransferError | None] = []
        self._event = asyncio.Event()

    def __call__(self, error: TransferError | None) -> None:
        self.calls.append(error)
        self._event.set()

    async def wait(self) -> TransferError | None:
        """What it ended with."""
        async with asyncio.timeout(PATIENCE):
            await self._event.wait()
        return self.calls[0]


def host_memory(key: PeerKey, blocks: int, size: Bytes) -> BlockMemory:
    """What most back ends move."""
    return BlockMemory(blocks, (size,))


@dataclass(eq=False)
class Side:
    """One node: its ranks' memories and its transport."""

    key: PeerKey
    layouts: Sequence[KvLayout]
    blocks: int
    new_memory: NewMemory = host_memory
    memories: list[Any] = field(default_factory=list)
    """What `new_memory` has made; tests know of which kind."""
    regions: list[Region] = field(default_factory=list)
    transport: Transport = field(init=False)

    def allocate(self) -> None:
        """Poisoned pools."""
        for layout in self.layouts:
            size = len(block_of(layout, 0))
            memory = self.new_memory(self.key, self.blocks, size)
            self.memories.append(memory)
            if isinstance(memory, DeviceMemory):
                self.regions.append(Region(layout, self.blocks, address=memory.address))
                continue
            export = memory.export() if memory.backing == "memfd" else None
            fd = None if export is None else export.fd
            self.regions.append(Region(layout, self.blocks, memory.view(), fd))
        self.poison(range(self.blocks))

    def poison(self, blocks: Iterable[int]) -> None:
        """Nobody may write to these from now on."""
        for memory in self.memories:
            for block in blocks:
                memory.view(block)[:] = pattern(memory.block_bytes)

    def fill(self, names: Mapping[int, int]) -> None:
        """Compute the KV of these blocks (block to content)."""
        for layout, memory in zip(self.layouts, self.memories, strict=True):
            for block, name in names.items():
                memory.view(block)[:] = block_of(layout, name)

    def holds(self, names: Mapping[int, int], layers: Iterable[int]) -> bool:
        """Exactly this is in the pools, and poison everywhere else."""
        layers = list(layers)
        return all(
            memory.view() == received(layout, self.blocks, names, layers)
            for layout, memory in zip(self.layouts, self.memories, strict=True)
        )

    def free(self) -> None:
        """Give the memories up."""
        for region in self.regions:
            if region.view is not None:
                region.view.release()
        for memory in self.memories:
            memory.close()


@dataclass(eq=False)
class Ends:
    """A source and a destination."""

    source: Side
    destination: Side
    cut: bool = False
    """Control gets through no more."""

    async def connect(self) -> tuple[Path, Path]:
        """The source's and the destination's end of a path."""
        ours = await self.source.transport.connect(self.destination.key, timeout=PATIENCE)
        theirs = self.destination.transport.path(self.source.key)
        assert theirs is not None
        return ours, theirs

    def ask_of(self, key: PeerKey) -> Ask:
        """How a node's transport asks the other's: typed records, encoded on the way."""

        async def ask(peer: PeerKey, control: Control, timeout: Seconds) -> Control:
            await asyncio.sleep(0)
            sides = {side.key: side for side in (self.source, self.destination)}
            if self.cut or peer not in sides:
                raise LinkLost("the link is cut, or nobody lives there any more")
            async with asyncio.timeout(timeout):
                answer = await sides[peer].transport.answer(key, _passed(control))
            return _passed(answer)

        return ask


@contextlib.asynccontextmanager
async def ends(
    make: Make,
    sources: Sequence[KvLayout],
    destinations: Sequence[KvLayout],
    *,
    blocks: int = 16,
    new_memory: NewMemory = host_memory,
) -> AsyncIterator[Ends]:
    """Two nodes, which are closed at the end; the pools' memory is the last to go."""
    world = Ends(
        Side(PeerKey(NodeId("p"), 1), sources, blocks, new_memory),
        Side(PeerKey(NodeId("d"), 2), destinations, blocks, new_memory),
    )
    sides = (world.source, world.destination)
    for side in sides:
        side.allocate()
        side.transport = make(side.key, side.regions, world.ask_of(side.key))
    try:
        yield world
    finally:
        for side in sides:
            await side.transport.close()
        for side in sides:
            side.free()


def _passed(control: Control) -> Control:
    """As it comes out at the other end."""
    passed: Control = msgspec.msgpack.decode(msgspec.msgpack.encode(control), type=Control)
    return passed


def order(blocks: Sequence[int], tokens: int, first_token: int = 0, name: str = "r-1/0") -> Order:
    """An attempt at filling these."""
    return Order(name, 1, first_token, tokens, blocks)


def deliver(path: Path, ticket: Ticket, part: Part) -> Waiter:
    """Deliver, and get something to wait for."""
    waiter = Waiter()
    path.deliver(ticket, part, waiter)
    return waiter

"""Provides two connected nodes with poisoned, watched pools for tests of KV transfers.

`ControlEnd` is the node's end of a KV connector's control socket, and `CallCarrier` carries the
calls of one connector to another one, where there are no nodes.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from pdserve.errors import LinkLost, TransferError
from pdserve.ids import NodeId, NodeLife
from pdserve.kv.storage import BlockMemory
from pdserve.messages.engine import (
    ControlEvent,
    InboundControl,
    InboundControlReply,
    OutboundControl,
    OutboundControlReply,
    SetNodeLife,
)
from pdserve.messages.transfer import TransferControl
from pdserve.testing.device_memory import DeviceMemory
from pdserve.testing.kv_oracle import expected_block, expected_pool, pattern
from pdserve.transfer.base import GrantSpec, KvPart, Region
from pdserve.wire.length_prefixed import FrameDecoder, encode_frame

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence

    from pdserve.ids import Bytes, Seconds
    from pdserve.messages.engine import ControlCommand
    from pdserve.messages.transfer import RankKvLayout, TransferTicket
    from pdserve.transfer.base import CallPeer, KvPath, KvTransport

__all__ = [
    "CallCarrier",
    "ControlEnd",
    "MakeMemory",
    "MakeTransport",
    "RecordingTransferSink",
    "TransferNode",
    "TransferPair",
    "Waiter",
    "host_memory",
    "transfer_pair",
]

PATIENCE: Seconds = 20.0
"""Seconds that a test waits for what must happen."""


class MakeTransport(Protocol):
    """Creates a backend's transport for one side."""

    def __call__(self, key: NodeLife, regions: Sequence[Region], ask: CallPeer) -> KvTransport: ...


class MakeMemory(Protocol):
    """Creates a rank's pool, for blocks of so many bytes."""

    def __call__(self, key: NodeLife, blocks: int, size: Bytes) -> BlockMemory | DeviceMemory: ...


class RecordingTransferSink:
    """Records its calls; `look` is called with each part as it arrives."""

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

    async def until(self, met: Callable[[RecordingTransferSink], bool]) -> None:
        """Wait until `met(self)`."""
        async with asyncio.timeout(PATIENCE):
            while not met(self):
                self._changed.clear()
                await self._changed.wait()


class Waiter:
    """The `done` of a delivery, which a test can wait for."""

    def __init__(self) -> None:
        self.calls: list[TransferError | None] = []
        self._event = asyncio.Event()

    def __call__(self, error: TransferError | None) -> None:
        self.calls.append(error)
        self._event.set()

    async def wait(self) -> TransferError | None:
        """Wait for the end; returns the error, or None."""
        async with asyncio.timeout(PATIENCE):
            await self._event.wait()
        return self.calls[0]


def host_memory(key: NodeLife, blocks: int, size: Bytes) -> BlockMemory:
    """A pool in host memory, as most backends use."""
    return BlockMemory(blocks, (size,))


@dataclass(eq=False)
class TransferNode:
    """One node: its ranks' memories and its transport."""

    key: NodeLife
    layouts: Sequence[RankKvLayout]
    blocks: int
    new_memory: MakeMemory = host_memory
    memories: list[Any] = field(default_factory=list)
    """What `new_memory` has made; tests know its type."""
    regions: list[Region] = field(default_factory=list)
    transport: KvTransport = field(init=False)

    def allocate(self) -> None:
        """Allocate poisoned pools."""
        for layout in self.layouts:
            size = len(expected_block(layout, 0))
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
        """Fill these blocks with the pattern: nothing may write to them from now on."""
        for memory in self.memories:
            for block in blocks:
                memory.view(block)[:] = pattern(memory.block_bytes)

    def fill(self, names: Mapping[int, int]) -> None:
        """Fill these blocks with the KV of their content (block to content)."""
        for layout, memory in zip(self.layouts, self.memories, strict=True):
            for block, name in names.items():
                memory.view(block)[:] = expected_block(layout, name)

    def holds(self, names: Mapping[int, int], layers: Iterable[int]) -> bool:
        """Assert that the pools have exactly this, and the pattern everywhere else."""
        layers = list(layers)
        return all(
            memory.view() == expected_pool(layout, self.blocks, names, layers)
            for layout, memory in zip(self.layouts, self.memories, strict=True)
        )

    def free(self) -> None:
        """Free the memories."""
        for region in self.regions:
            if region.view is not None:
                region.view.release()
        for memory in self.memories:
            memory.close()


@dataclass(eq=False)
class TransferPair:
    """A source and a destination."""

    source: TransferNode
    destination: TransferNode
    cut: bool = False
    """True: control messages no longer arrive."""

    async def connect(self) -> tuple[KvPath, KvPath]:
        """Connect; returns the source's and the destination's end of the path."""
        ours = await self.source.transport.connect(self.destination.key, timeout=PATIENCE)
        theirs = self.destination.transport.path(self.source.key)
        assert theirs is not None
        return ours, theirs

    def ask_of(self, key: NodeLife) -> CallPeer:
        """The `CallPeer` of a node's transport; encodes and decodes the records."""

        async def ask(
            peer: NodeLife, control: TransferControl, timeout: Seconds
        ) -> TransferControl:
            await asyncio.sleep(0)
            sides = {side.key: side for side in (self.source, self.destination)}
            if self.cut or peer not in sides:
                raise LinkLost("the link is cut, or the peer is gone")
            async with asyncio.timeout(timeout):
                answer = await sides[peer].transport.answer(key, _passed(control))
            return _passed(answer)

        return ask


@contextlib.asynccontextmanager
async def transfer_pair(
    make: MakeTransport,
    sources: Sequence[RankKvLayout],
    destinations: Sequence[RankKvLayout],
    *,
    blocks: int = 16,
    new_memory: MakeMemory = host_memory,
) -> AsyncIterator[TransferPair]:
    """Two nodes, closed at the end; the pools' memory is freed last."""
    world = TransferPair(
        TransferNode(NodeLife(NodeId("p"), 1), sources, blocks, new_memory),
        TransferNode(NodeLife(NodeId("d"), 2), destinations, blocks, new_memory),
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


def _passed(control: TransferControl) -> TransferControl:
    """Encodes and decodes a message, as on its way to the other end."""
    passed: TransferControl = msgspec.msgpack.decode(
        msgspec.msgpack.encode(control), type=TransferControl
    )
    return passed


def order(
    blocks: Sequence[int], tokens: int, first_token: int = 0, name: str = "r-1/0"
) -> GrantSpec:
    """A `GrantSpec` to fill these blocks."""
    return GrantSpec(name, 1, first_token, tokens, blocks)


def deliver(path: KvPath, ticket: TransferTicket, part: KvPart) -> Waiter:
    """Deliver a part; returns an object to wait for its end."""
    waiter = Waiter()
    path.deliver(ticket, part, waiter)
    return waiter


class ControlEnd:
    """One end of a socket pair. `theirs` is for the connector; close this after the connector."""

    def __init__(self, on_event: Callable[[ControlEvent], None]) -> None:
        """`on_event` is called in a thread."""
        self._ours, self.theirs = socket.socketpair()
        self._on_event = on_event
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._read, name="pdserve-control-end", daemon=True)
        self._thread.start()

    def post(self, command: ControlCommand) -> None:
        """Send a command; callable from any thread. Dropped if the connector is closed."""
        with self._lock, contextlib.suppress(OSError):
            self._ours.sendall(encode_frame(msgspec.msgpack.encode(command)))

    def _read(self) -> None:
        frames, decoder = FrameDecoder(), msgspec.msgpack.Decoder(ControlEvent)
        with contextlib.suppress(OSError):
            while data := self._ours.recv(65536):
                for body in frames.feed(data):
                    self._on_event(decoder.decode(body))

    def close(self) -> None:
        """Close both ends of the socket and end the thread. Idempotent."""
        with contextlib.suppress(OSError):
            self._ours.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._ours.close()
        self.theirs.close()


class CallCarrier:
    """One worker's control calls, carried to and from its only peer."""

    def __init__(self, life: NodeLife) -> None:
        self.life = life
        self.peer: CallCarrier = self
        self.deaf = False
        """Nothing that the peer asks arrives."""
        self._numbers = 0
        self._calls: dict[int, int] = {}
        """Numbers of the peer's calls, by those here."""
        self.end = ControlEnd(self._pass)

    def join(self, peer: CallCarrier) -> None:
        """Connect two workers, and tell their connectors whose they are."""
        self.peer, peer.peer = peer, self
        for each in (self, peer):
            each.end.post(SetNodeLife(*each.life))

    def _pass(self, event: ControlEvent) -> None:
        match event:
            case OutboundControl():
                self.peer._ask(event)
            case InboundControlReply():
                number = self._calls.pop(event.number)
                reply = OutboundControlReply(number, event.control, event.kind, event.message)
                self.peer.end.post(reply)

    def _ask(self, event: OutboundControl) -> None:
        """The peer's only caller is its reading thread."""
        if self.deaf:
            return
        self._numbers += 1
        self._calls[self._numbers] = event.number
        self.end.post(InboundControl(self._numbers, *self.peer.life, event.backend, event.control))

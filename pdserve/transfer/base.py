"""The port: how KV gets from one node's blocks into another's, whatever carries it.

    Transport   one back end on one node: paths to peers        fake, shm, tcp (rdma, cuda_ipc)
    Path        one peer, one life of it: grants and deliveries
    Grant       destination: these blocks may be filled under this ticket
    Sink        destination: hears what has arrived
    Ask         how a transport talks to its counterpart: over the authenticated link

The destination *grants*: it binds blocks to a ticket, which travels to the source. The source
*delivers* parts: some of its blocks, some of their layers, as they are computed. Who moves the
bytes is the back end's matter (rdma writes them, tcp sends them to a receiver that places them, shm
and cuda_ipc let the destination fetch them) and changes nothing of what follows.

**Order.** `GrantSink.on_part` comes after all bytes of the part are in the blocks, on every road.
Parts may arrive in another order than they were delivered in.

**Completion.** `done` of a delivery comes once. Without an error, the part has arrived and its sink
has been or is being told; either way, the source's blocks are no longer read afterwards.

**Fence.** A failure, a timeout or a death says nothing about bytes that are still under way. Two
things do, and only after one of them may the blocks be used for anything else:
    `Grant.revoke` returned    the writer has acknowledged that nothing is under way for this grant
    `KvPath.close` returned      this node has destroyed what the peer could write through: needs
                               nobody's cooperation, and holds for all grants of the path
`Grant.finish` needs neither: the owner has been told of all parts that there are.

Calls come on the event loop that the transport was made on. Nothing here blocks it: bytes are moved
by hardware or by threads. Errors are `TransferError`s and name transfer, peer, step and reason.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from pdserve.ids import NodeLife
from pdserve.messages.transfer import RegionCard, TransferControl
from pdserve.transfer.copy_plan import block_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.errors import TransferError
    from pdserve.ids import Bytes, Seconds
    from pdserve.messages.transfer import RankKvLayout, TransferTicket
    from pdserve.transfer.copy_plan import Layers

__all__ = [
    "CallPeer",
    "DeliveryDone",
    "Grant",
    "GrantSink",
    "GrantSpec",
    "KvPart",
    "KvPath",
    "KvTransport",
    "PathStats",
    "Region",
]


CallPeer = Callable[[NodeLife, TransferControl, float], Awaitable[TransferControl]]
"""Says something to the peer's transport and returns its answer, within so many seconds. Raises a
`PdserveError` when there is none. What it says arrives at the peer's `KvTransport.answer`."""

DeliveryDone = Callable[["TransferError | None"], None]


@dataclass(frozen=True, slots=True, eq=False)
class Region:
    """The pool of one rank on this node: a run of memory that peers may reach, and no more of it.

    It must outlive the transport. `view` is its bytes in this process, None in device memory; `fd`
    is a descriptor that others can map, if there is one (`kv.storage.MemoryExport.fd`)."""

    layout: RankKvLayout
    blocks: int
    view: memoryview | None = None
    fd: int | None = None
    address: int = 0

    @property
    def size(self) -> Bytes:
        """Of all blocks."""
        return self.blocks * block_bytes(self.layout)

    def card(self, keys: tuple[int, ...] = ()) -> RegionCard:
        """As peers learn of it."""
        return RegionCard(layout=self.layout, blocks=self.blocks, address=self.address, keys=keys)


@dataclass(frozen=True, slots=True)
class GrantSpec:
    """What a destination wants filled. Becomes a `TransferTicket` once it has a slot."""

    transfer: str
    attempt: int
    first_token: int
    tokens: int
    blocks: Sequence[int]


@dataclass(frozen=True, slots=True)
class KvPart:
    """What a source has ready: `blocks` hold the tokens from `start` on, in `layers`."""

    number: int
    """Names the part in the notification; of one ticket, each is delivered once."""
    start: int
    """A token's position in the sequence, at a block's beginning. Blocks before the ticket's first
    token are skipped: the destination has them."""
    blocks: Sequence[int]
    layers: Layers
    names: bytes = b""
    """16 bytes per block, their hashes; empty: they have none. For back ends that can compare."""


class GrantSink(Protocol):
    """Who hears what arrives under a grant. Called on the loop; quick, must not raise."""

    def on_part(self, part: int) -> None:
        """All bytes of the part are in the blocks. Once per part."""
        ...

    def on_failed(self, error: TransferError) -> None:
        """No further part will arrive. Once at most, and no fence: call `revoke`."""
        ...


class Grant(Protocol):
    """The destination's side of one attempt."""

    @property
    def ticket(self) -> TransferTicket: ...

    @property
    def closed(self) -> bool:
        """Fenced or finished: the blocks are the owner's again."""
        ...

    def finish(self) -> None:
        """All parts there are have arrived. The caller knows their number from the source; without
        that knowledge, `revoke`."""
        ...

    async def revoke(self, *, timeout: Seconds) -> None:
        """Want nothing more; returns when nothing can arrive any more: a fence.

        Raises `TransferTimeout` or another `TransferError` if that could not be had; then the
        blocks stay in quarantine, and closing the path is the fence. Its sink falls silent at once.
        Cancellation: as after a failure."""
        ...


class KvPath(Protocol):
    """One peer, in one life of it, over one back end. Both ends may grant and deliver."""

    @property
    def peer(self) -> NodeLife: ...

    @property
    def backend(self) -> str: ...

    @property
    def down(self) -> TransferError | None:
        """Why nothing more can be started; None while it can."""
        ...

    def grant(self, order: GrantSpec, sink: GrantSink) -> Grant:
        """Let the peer fill these blocks. Raises `TransferRefused` for what cannot be (blocks of
        another grant, a wrong number), `PathLost`, `Overloaded` without a free slot."""
        ...

    def deliver(self, ticket: TransferTicket, part: KvPart, done: DeliveryDone) -> None:
        """Bring a part to the blocks of the peer's ticket. `part.blocks` must keep their content
        until `done`. Raises `TransferRefused`, `PathLost`, `Overloaded`; then `done` is not called.
        """
        ...

    def withdraw(self, ticket: TransferTicket) -> None:
        """Deliver nothing more under this ticket. What is under way ends by its `done`, when the
        source's blocks are no longer read; the peer's sink fails."""
        ...

    async def close(self, reason: str) -> None:
        """End all of it; idempotent. Returns when no byte that came, or comes, by this path can be
        written to this node's memory: a fence for all its grants. Deliveries under way end by
        `PathLost`, sinks of open grants fail. Not to be cancelled."""
        ...

    @property
    def stats(self) -> PathStats:
        """Its counters. The record is the path's own and goes on counting."""
        ...


class KvTransport(Protocol):
    """One back end on one node."""

    @property
    def name(self) -> str: ...

    async def connect(self, peer: NodeLife, *, timeout: Seconds) -> KvPath:
        """The path to a peer, set up if there is none. Raises `TransferError`, naming the step.
        When both ends connect at once, both get a path that works; they may be two."""
        ...

    async def answer(self, peer: NodeLife, control: TransferControl) -> TransferControl:
        """What the peer's transport asked. The caller has authenticated the peer. Raises
        `TransferError`, which the caller passes on."""
        ...

    def path(self, peer: NodeLife) -> KvPath | None:
        """The path to a peer that is up, whoever asked for it."""
        ...

    async def close(self) -> None:
        """Close every path, give up every resource."""
        ...


@dataclass(slots=True)
class PathStats:
    """Only grow during one life of a path, but for the last two."""

    parts_delivered: int = 0
    bytes_delivered: Bytes = 0
    runs_delivered: int = 0
    deliveries_failed: int = 0
    parts_received: int = 0
    bytes_received: Bytes = 0
    """0 over queue pairs: their notifications do not say it."""
    grants: int = 0
    grants_failed: int = 0
    fenced: int = 0
    """Grants that ended by a fence."""
    stale: int = 0
    """Notifications for no current grant. After a fence there must be none: each is a bug."""
    refused: int = 0
    """What the peer asked for and was not allowed."""
    outgoing: int = 0
    """Deliveries under way."""
    granted: int = 0
    """Grants that are not closed."""

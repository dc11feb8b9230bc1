"""Defines the transfer port: how KV gets from one node's blocks into another's, over any backend.

    KvTransport  one backend on one node: paths to peers       rdma, cuda_ipc, shm, tcp, a fake
    KvPath       one life of one peer: grants and deliveries
    Grant        destination: these blocks may be filled under this ticket
    GrantSink    destination: the callback for what has arrived
    CallPeer     how a transport talks to its counterpart, over the authenticated link

The destination *grants*: it binds blocks to a ticket, which travels to the source. The source
*delivers* parts: some of its blocks, some of their layers, as they are computed. How the bytes move
depends on the backend (rdma writes them, tcp sends them to a receiver that places them, with shm
and cuda_ipc the destination fetches them); what follows holds for all of them.

**Order.** `GrantSink.on_part` is called after all bytes of the part are in the blocks. Parts may
arrive in another order than they were delivered in.

**Completion.** `done` of a delivery is called once. Without an error, the part has arrived and its
sink has been or is being told. With or without one, the source's blocks are no longer read.

**Fence.** A failure, a timeout or a death says nothing about bytes that are still under way. Only
after one of these two may the blocks be used for anything else:
    `Grant.revoke` returned    the writer has acknowledged that nothing is under way for this grant
    `KvPath.close` returned    this node has destroyed what the peer could write through; it needs
                               no cooperation of the peer, and holds for all grants of the path
`Grant.finish` needs neither, because the owner knows that all parts have arrived.

Call everything on the event loop that the transport was made on. Nothing here blocks it: hardware
or threads move the bytes. Errors are `TransferError`s and name transfer, peer, step and reason.
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
"""Sends a control message to the peer's transport (`KvTransport.answer`) and returns its answer.
The float is the timeout in seconds. Errors: a `PdserveError` without an answer."""

DeliveryDone = Callable[["TransferError | None"], None]


@dataclass(frozen=True, slots=True, eq=False)
class Region:
    """The KV pool of one rank on this node: the memory that peers may reach.

    It must outlive the transport. `view` is its bytes in this process, None in device memory; `fd`
    is a descriptor that others can map, if there is one (`kv.storage.MemoryExport.fd`).

    With `ranks` it stands for the pools of all ranks of a model: `layout` is that of the whole
    model, block i is block i of every rank, and `view` only says that they are in host memory.
    """

    layout: RankKvLayout
    blocks: int
    view: memoryview | None = None
    fd: int | None = None
    address: int = 0
    ranks: tuple[Region, ...] = ()
    """The pools of all ranks, in order; empty: this is a pool itself."""

    @property
    def pools(self) -> tuple[Region, ...]:
        """What transports are made for: the pools of the ranks, or this one."""
        return self.ranks or (self,)

    @property
    def block_bytes(self) -> Bytes:
        """Bytes of a block, over all ranks. Heads that several ranks hold count for each."""
        return sum(block_bytes(pool.layout) for pool in self.pools)

    @property
    def size(self) -> Bytes:
        """Bytes of all blocks."""
        return self.blocks * self.block_bytes

    def card(self, keys: tuple[int, ...] = ()) -> RegionCard:
        """The description that peers get."""
        return RegionCard(layout=self.layout, blocks=self.blocks, address=self.address, keys=keys)


@dataclass(frozen=True, slots=True)
class GrantSpec:
    """What a destination wants filled. With a slot it becomes a `TransferTicket`."""

    transfer: str
    attempt: int
    first_token: int
    tokens: int
    blocks: Sequence[int]


@dataclass(frozen=True, slots=True)
class KvPart:
    """What a source has ready: `blocks` hold the tokens from `start` on, for `layers`."""

    number: int
    """The part's number, unique within its ticket."""
    start: int
    """Position of the first token in the sequence; begins a block. Blocks before the ticket's first
    token are skipped, because the destination has them."""
    blocks: Sequence[int]
    layers: Layers
    names: bytes = b""
    """Block hashes, 16 bytes each, for backends that compare them; empty: unknown."""


class GrantSink(Protocol):
    """Receives what happens to a grant. Called on the event loop; must be quick and must not
    raise."""

    def on_part(self, part: int) -> None:
        """All bytes of the part are in the blocks. Called once for each part."""
        ...

    def on_failed(self, error: TransferError) -> None:
        """No further part will arrive. Called at most once. It is no fence: call `revoke`."""
        ...


class Grant(Protocol):
    """The destination's side of one attempt."""

    @property
    def ticket(self) -> TransferTicket: ...

    @property
    def closed(self) -> bool:
        """True once fenced or finished: the blocks belong to the owner again."""
        ...

    def finish(self) -> None:
        """Close the grant after all parts have arrived. The caller knows their number from the
        source; without it, call `revoke`."""
        ...

    async def revoke(self, *, timeout: Seconds) -> None:
        """Stop the transfer; returns when nothing can arrive any more, which is a fence. The sink
        gets no further call.

        Errors: `TransferTimeout` or another `TransferError` without the peer's confirmation; the
        blocks then stay in quarantine until the path is closed. Cancellation: as after an error.
        """
        ...


class KvPath(Protocol):
    """A connection to one life of one peer over one backend. Both ends may grant and deliver."""

    @property
    def peer(self) -> NodeLife: ...

    @property
    def backend(self) -> str: ...

    @property
    def down(self) -> TransferError | None:
        """Why the path accepts nothing new; None while it is up."""
        ...

    def grant(self, order: GrantSpec, sink: GrantSink) -> Grant:
        """Let the peer fill these blocks. Errors: `TransferRefused` (blocks of another grant, a
        wrong number of blocks), `PathLost`, `Overloaded` without a free slot."""
        ...

    def deliver(self, ticket: TransferTicket, part: KvPart, done: DeliveryDone) -> None:
        """Send a part to the blocks of the peer's ticket. `part.blocks` must keep their content
        until `done` is called. Errors: `TransferRefused`, `PathLost`, `Overloaded`; `done` is then
        not called."""
        ...

    def withdraw(self, ticket: TransferTicket) -> None:
        """Deliver nothing more under this ticket. Deliveries under way end by their `done`, after
        which the source's blocks are no longer read. The peer's sink fails."""
        ...

    async def probe(self, size: Bytes) -> Bytes:
        """Bring so many bytes from the peer into memory of no use, the way that KV takes; returns
        how many have come, fewer if the peer's pool is smaller. Errors: `TransferRefused` with the
        reason, if this backend or this peer has no probes. Cancellation: what is under way may
        still come, and is dropped."""
        ...

    async def close(self, reason: str) -> None:
        """End the path; returns when nothing can be written to this node's memory through it, which
        is a fence for all its grants. Deliveries under way end with `PathLost`, and the sinks of
        open grants fail. Idempotent. Do not cancel it."""
        ...

    @property
    def stats(self) -> PathStats:
        """The path's counters: a live record."""
        ...


class KvTransport(Protocol):
    """One backend on one node."""

    @property
    def name(self) -> str: ...

    async def connect(self, peer: NodeLife, *, timeout: Seconds) -> KvPath:
        """Return the path to a peer, and set it up if there is none. If both ends connect at once,
        there may be two paths; both work. Errors: `TransferError`, which names the step."""
        ...

    async def answer(self, peer: NodeLife, control: TransferControl) -> TransferControl:
        """Answer a control message of the peer's transport. The caller has authenticated the peer.
        Errors: `TransferError`, which the caller sends to the peer."""
        ...

    def path(self, peer: NodeLife, number: int = 0) -> KvPath | None:
        """The path to this life of a peer that is up, whichever end asked for it. `number`: the
        one that has this number at this end, as `TransferTicket.path` says."""
        ...

    async def close(self) -> None:
        """Close every path and free all resources."""
        ...


@dataclass(slots=True)
class PathStats:
    """Counters of one life of a path; the last two are gauges."""

    parts_delivered: int = 0
    bytes_delivered: Bytes = 0
    runs_delivered: int = 0
    deliveries_failed: int = 0
    parts_received: int = 0
    bytes_received: Bytes = 0
    """0 over RDMA, whose notifications do not carry it."""
    grants: int = 0
    grants_failed: int = 0
    fenced: int = 0
    """Grants closed by a fence."""
    stale: int = 0
    """Notifications for no open grant. After a fence there must be none: each is a bug."""
    refused: int = 0
    """Requests of the peer that were refused."""
    outgoing: int = 0
    """Deliveries under way."""
    granted: int = 0
    """Grants that are not closed."""

"""Fetches KV between nodes of one host; shm and cuda_ipc differ only in what memory is read.

**Greeting** over a Unix socket without a name in the file system. The connecting process must have
this user's id and the secret that was sent over the authenticated link. The greeting passes
descriptors and whatever else the peer needs to map the pools. The socket also shows at once when
the peer ends.

**Who moves bytes**: the source announces a part, the destination copies it in a thread, in chunks,
and reports. So no other process writes to this node's blocks, and a fence needs no peer: stop
copying, and wait for the present chunk. With checksums of everything, a large part is announced
piece by piece, and the source sums the next piece while the destination copies this one.

**What guards the bytes**: the source keeps a table that its peers can read. A delivery has an entry
(attempt, epoch, its own number) that is valid only while the blocks keep their content; a block has
a header (its hash, the epoch). The destination compares them before and after it copies, so blocks
that were reused meanwhile are never served. It also compares checksums of some or all blocks
(`verify`).

A backend says how the peer's pools are mapped and copied (`PullPath`), and how its own are passed
and checksummed (`PullTransport`).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from array import array
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple, Protocol

import msgspec
from msgspec.structs import replace

from pdserve.errors import TransferCorrupt, TransferWithdrawn
from pdserve.messages.transfer import MAX_BLOCKS
from pdserve.net.log_throttle import LogThrottle
from pdserve.net.transport.bounded_acceptor import BoundedAcceptor
from pdserve.transfer.copy_plan import PlanError
from pdserve.transfer.path_base import MAX_DELIVERIES, DeliveryKey, PathBase
from pdserve.transfer.same_host.shared_table import (
    GIVEN_UP,
    MAX_ENTRIES,
    ExpectedEntry,
    SharedTable,
)
from pdserve.transfer.same_host.unix_socket import (
    boot_id,
    check_user,
    close_all,
    receive_greeting,
    send_greeting,
    seqpacket,
    who_connects,
)
from pdserve.transfer.transport_base import TransportBase
from pdserve.transfer.verify import SAMPLE, Verify, stricter

if TYPE_CHECKING:
    import mmap
    from collections.abc import Callable, Iterator, Sequence

    from pdserve.ids import Bytes, Epoch, NodeId, NodeLife, Seconds
    from pdserve.messages.transfer import PathHello, RegionCard, TransferTicket
    from pdserve.transfer.base import CallPeer, GrantSink, GrantSpec, Region
    from pdserve.transfer.block_mapping import BlockMapping, RegionCopy
    from pdserve.transfer.grants import GrantEntry
    from pdserve.transfer.path_base import Delivery
    from pdserve.transfer.same_host.unix_socket import SocketGreeting
    from pdserve.transfer.transport_base import HelloExchange

__all__ = [
    "BLOCKS_PER_PACKET",
    "PATIENCE",
    "PeerPools",
    "PullJob",
    "PullPath",
    "PullTransport",
    "Verify",
    "encode_packet",
]

_log = logging.getLogger(__name__)

PATIENCE: Final[Seconds] = 30.0
"""How long a peer may leave everything announced unfetched before the path fails."""
_PACKET: Final[Bytes] = 128 * 1024
BLOCKS_PER_PACKET: Final = 2048
"""Most blocks of one packet; a larger part takes several."""
_BLOCK: Final = array("I")
"""Encoding of a block id."""
_SUMS: Final = 64
"""About the number of checksums of a part if all of it is compared, at most twice as many; planning
each block alone takes longer than reading it."""
_PIECES: Final = MAX_BLOCKS // BLOCKS_PER_PACKET + 2 * _SUMS
"""Most packets of one part; each piece may end with one that is not full."""
_PIECE: Final[Bytes] = 4 << 20
"""Bytes that are summed before they are announced: several times what a change of threads costs."""
_UNWANTED: Final = "it is not wanted any more"
_GREETING: Final[Seconds] = 10.0
"""Seconds for either end to send its greeting."""
_STRANGERS: Final = 64
"""Most connections without a greeting; one more ends the oldest one of the process with the
most."""


_Group = tuple[int, int]
"""Blocks of a part: the index of the first one and their number, or the index after the last."""
_Sum = tuple[int, int, int]
"""A checksum: (index in the whole part, number of blocks, CRC-32 of them in order)."""
_Summing = deque[tuple[asyncio.Future[Any], _Group]]
"""Pieces of a part that are being summed and are not announced, in order."""


class _Fetch(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Announces a part, or a piece of one."""

    slot: int
    generation: int
    attempt: int
    part: int
    entry: int
    number: int
    start: int
    layers: tuple[int, int]
    blocks: bytes
    """Little-endian u32."""
    names: bytes = b""
    sums: tuple[_Sum, ...] = ()
    more: bool = False


class _Fetched(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """A part has been fetched; with `error` it was not, and will not be."""

    slot: int
    generation: int
    part: int
    error: str = ""


_Packet = _Fetch | _Fetched
_decode = msgspec.msgpack.Decoder(_Packet).decode
encode_packet = msgspec.msgpack.Encoder().encode


class _Greeted(NamedTuple):
    """A connected peer and what it passed."""

    connection: socket.socket
    greeting: SocketGreeting
    fds: list[int]


class _Details(msgspec.Struct, frozen=True, array_like=True):
    """Details of PathHello: the socket to connect to, and the secret."""

    host: str
    name: str
    token: bytes


# ------------------------------------------------------------------------------ a path


@dataclass(slots=True, eq=False)
class _Arriving:
    """A part whose packets are arriving, or are being fetched."""

    held: list[_Fetch] = field(default_factory=list)
    """Packets that are not begun: a checksum reaches into the next one."""
    packets: int = 0
    begun: int = 0
    """Blocks that are fetched or being fetched."""
    jobs: int = 0
    """Jobs that have not ended."""
    complete: bool = False
    """Whether the last packet is here."""
    granted: GrantEntry | None = None
    reason: str = ""
    """Why it failed first."""
    size: Bytes = 0

    @property
    def ended(self) -> bool:
        return self.complete and not self.jobs and not self.held

    def joined(self) -> _Fetch | None:
        """The packets that wait, as one; None: not yet."""
        reach = max(
            (place + count for each in self.held for place, count, _ in each.sums), default=0
        )
        here = self.begun + sum(len(each.blocks) for each in self.held) // _BLOCK.itemsize
        if reach > here and not self.complete:
            return None
        held, self.held = self.held, []
        return _joined(held)


@dataclass(slots=True, eq=False)
class PullJob:
    """Blocks of a part that are being fetched."""

    granted: GrantEntry
    fetch: _Fetch
    share: BlockMapping
    first: int
    """Index of the first of these blocks in the part, from which checksums count."""
    stop: bool = False
    """Set by the loop, read by the thread between two chunks."""
    work: Future[Any] | None = None
    """The work in the thread; `future` is the same on the loop."""
    future: asyncio.Future[Any] | None = None

    def summed_whole(self) -> bool:
        """True if the checksums cover all of these blocks, each once and in order."""
        at = self.first
        for place, count, _ in self.fetch.sums:
            if place != at:
                return False
            at += count
        return bool(self.fetch.sums) and at == self.first + len(self.share.blocks)


class PeerPools(Protocol):
    """The peer's table and its pools, mapped into this process for reading."""

    @property
    def table(self) -> mmap.mmap: ...

    def close(self) -> None:
        """Unmap the pools; no copy may be running."""
        ...


class PullPath(PathBase):
    """A path that fetches. A backend adds `_map` and `_copy`."""

    transport: PullTransport

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.theirs: Sequence[RegionCard] = kwargs["theirs"]
        self._socket: socket.socket | None = None
        self._pools: PeerPools | None = None
        self._entries: dict[DeliveryKey, int] = {}
        self._jobs: set[PullJob] = set()
        self._arriving: dict[DeliveryKey, _Arriving] = {}
        self._unsent: deque[bytes] = deque()
        self._writing = False
        self._told_verify = False
        """Whether the log says that the peer wants more checksums than this node's setting."""

    # ------------------------------------------------------------------ what back ends bring

    def _map(self, greeting: SocketGreeting, fds: Sequence[int]) -> PeerPools:
        """In the thread: map what the peer has passed. Raises `PlanError`, `OSError`. The
        descriptors stay the caller's."""
        raise NotImplementedError

    def _copy(self, job: PullJob, moves: Sequence[RegionCopy]) -> Bytes:
        """In the thread: bring these runs into this node's pools; returns when all of them are
        there, or none of them is under way any more after `job.stop` was set. Bytes copied."""
        raise NotImplementedError

    # ------------------------------------------------------------------ the socket

    async def attach(
        self, connection: socket.socket, greeting: SocketGreeting, fds: Sequence[int]
    ) -> None:
        """Use what the peer's greeting passed. Errors: `PlanError`, `OSError`."""
        mapping = self.transport.run(partial(self._map, greeting, fds))
        try:
            pools: PeerPools = await asyncio.shield(mapping)
        except asyncio.CancelledError:
            # The thread cannot be stopped, and the descriptors are its until it has ended.
            await asyncio.wait([mapping])
            if mapping.exception() is None:
                mapping.result().close()
            raise
        self._pools = pools
        self._socket = connection
        asyncio.get_running_loop().add_reader(connection, self._read)

    def _read(self) -> None:
        assert self._socket is not None
        try:
            packet = self._socket.recv(_PACKET)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self.fail("peer", str(error))
            return
        if not packet:
            self.fail("peer", "the peer's process, or its transport, has ended")
            return
        try:
            self._on_packet(_decode(packet))
        except msgspec.MsgspecError as error:
            self.fail("protocol", str(error))

    def _on_packet(self, packet: _Packet) -> None:
        if self.down is not None:
            return
        if isinstance(packet, _Fetch):
            self._on_fetch(packet)
        else:
            self._on_fetched(packet)

    def _send(self, packet: _Packet) -> None:
        self._unsent.append(encode_packet(packet))
        if not self._writing:
            self._write()

    def _write(self) -> None:
        """Send as much as the socket takes; the rest follows."""
        if self._socket is None:
            return
        loop = asyncio.get_running_loop()
        try:
            while self._unsent:
                self._socket.send(self._unsent[0], socket.MSG_NOSIGNAL)
                self._unsent.popleft()
        except (BlockingIOError, InterruptedError):
            if not self._writing:
                self._writing = True
                loop.add_writer(self._socket, self._write)
            return
        except OSError as error:
            self.fail("peer", str(error))
            return
        if self._writing:
            self._writing = False
            loop.remove_writer(self._socket)

    # ------------------------------------------------------------------ the source

    def _begin(self, outgoing: Delivery) -> None:
        share, ticket = outgoing.share, outgoing.ticket
        self.out.check(share, ticket.blocks)
        entry, number = self.transport.table.open(ticket.attempt, share)
        self._entries[outgoing.key] = entry
        verify = self._agreed(ticket)
        places = self.transport.sampled(len(share.blocks), number, verify)
        count = len(share.blocks)
        announce = partial(self._announce, outgoing, entry, number)
        if not places:
            announce((), (0, count))
        elif 0 < outgoing.size <= self.transport.inline:
            self._sum_here(outgoing, places, announce)
        else:
            pieces: _Summing = deque()
            for some, span in _pieces(places, count, outgoing.size, verify):
                summing = self.transport.run(partial(self._sums, outgoing, some))
                pieces.append((summing, span))
                summing.add_done_callback(partial(self._summed, outgoing, announce, pieces))

    def _sum_here(
        self, outgoing: Delivery, places: Sequence[_Group], announce: Callable[..., None]
    ) -> None:
        """Sum a small part on the loop: changing threads takes longer."""
        try:
            sums = self._sums(outgoing, places)
        except Exception as error:
            # As in the thread: any error ends the path alone.
            self.fail("verify", f"checksums: {error!r}")
        else:
            announce(sums, (0, len(outgoing.share.blocks)))

    def _agreed(self, ticket: TransferTicket) -> Verify:
        """The stricter setting of both ends."""
        ours = self.transport.verify
        agreed = stricter(ours, ticket.verify)
        if agreed != ours and not self._told_verify:
            self._told_verify = True
            _log.info(
                "KV for %s over %s has checksums as --verify-kv=%s there wants, not %s as here",
                *(self.peer, self.backend, agreed, ours),
            )
        return agreed

    def _sums(self, outgoing: Delivery, places: Sequence[_Group]) -> tuple[_Sum, ...]:
        """Checksums of blocks to announce; runs in the thread."""
        share, blocks = outgoing.share, outgoing.ticket.blocks
        sum_of = self.transport.sum_of
        return tuple((*at, sum_of(self.out, share, blocks, at, source=True)) for at in places)

    def _summed(
        self,
        outgoing: Delivery,
        announce: Callable[..., None],
        pieces: _Summing,
        _: asyncio.Future[Any],
    ) -> None:
        """Announce the pieces that are summed, in order: several threads end in any."""
        while pieces and pieces[0][0].done():
            summing, span = pieces.popleft()
            if self.down is not None or self.outgoing.get(outgoing.key) is not outgoing:
                return
            if summing.cancelled() or summing.exception() is not None:
                self.fail("verify", f"checksums: {summing}")
            else:
                announce(summing.result(), span)

    def _announce(
        self,
        outgoing: Delivery,
        entry: int,
        number: int,
        sums: tuple[_Sum, ...],
        span: _Group,
    ) -> None:
        """Send blocks `span` (first, last) of a part in as many packets as it takes."""
        share, ticket = outgoing.share, outgoing.ticket
        block_tokens = self.out.block_tokens
        begin, end = span
        for first in range(begin, max(begin + 1, end), BLOCKS_PER_PACKET):
            last = min(end, first + BLOCKS_PER_PACKET)
            fetch = _Fetch(
                slot=ticket.slot,
                generation=ticket.generation,
                attempt=ticket.attempt,
                part=outgoing.part,
                entry=entry,
                number=number,
                start=ticket.first_token + (share.place + first) * block_tokens,
                layers=share.layers,
                blocks=array(_BLOCK.typecode, share.blocks[first:last]).tobytes(),
                names=share.names[16 * first : 16 * last],
                sums=tuple(each for each in sums if first <= each[0] < last),
                more=last < len(share.blocks),
            )
            self._send(fetch)

    def _on_fetched(self, packet: _Fetched) -> None:
        key = DeliveryKey(packet.slot, packet.generation, packet.part)
        outgoing = self.outgoing.get(key)
        if outgoing is None:
            self._stats.refused += 1
            return
        error = None
        if packet.error:
            transfer, reason = outgoing.ticket.transfer, f"the peer says: {packet.error}"
            error = self._error(TransferWithdrawn, transfer, "fetch", reason)
        self._release(key)
        self.settle(key, error)

    def _abandon(self, key: DeliveryKey) -> None:
        """Void the entry; the destination finds that and reports."""
        entry = self._entries.get(key)
        if entry is not None:
            self.transport.table.void(entry)

    def _release(self, key: DeliveryKey) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.transport.table.give_back(entry)

    # ------------------------------------------------------------------ the destination

    def grant(self, order: GrantSpec, sink: GrantSink) -> GrantEntry:
        """Open a grant, whose ticket says how much is compared here."""
        granted = super().grant(order, sink)
        granted.ticket = replace(granted.ticket, verify=self.transport.verify)
        return granted

    def _on_fetch(self, fetch: _Fetch) -> None:
        key = DeliveryKey(fetch.slot, fetch.generation, fetch.part)
        part = self._arriving.setdefault(key, _Arriving())
        part.packets += 1
        if part.complete or part.packets > _PIECES or len(self._arriving) > MAX_DELIVERIES:
            self.fail("protocol", "too many parts at once, or packets of a part")
            return
        part.held.append(fetch)
        part.complete = not fetch.more
        found = part.joined()
        if found is not None and not part.reason:
            part.reason = self._begin_fetch(key, part, found)
        if part.ended:
            self._conclude(key, part)

    def _begin_fetch(self, key: DeliveryKey, part: _Arriving, fetch: _Fetch) -> str:
        """Copy what these packets announce; returns why the part has failed already, if it has."""
        granted = self.grants.find(self, fetch.slot, fetch.generation, exact=True)
        if granted is None or granted.state != "open" or granted.ticket.attempt != fetch.attempt:
            return "the attempt is not current"
        part.granted = granted
        try:
            job = PullJob(granted, fetch, self._share(granted, fetch), part.begun)
        except PlanError as error:
            return str(error)
        part.begun += len(fetch.blocks) // _BLOCK.itemsize
        if (
            part.packets == 1
            and part.complete
            and self.into.size(job.share) <= self.transport.inline
        ):
            return self._fetch_here(part, job)
        part.jobs += 1
        self._jobs.add(job)
        job.work = self.transport.submit(partial(self._fetch, job))
        job.future = asyncio.wrap_future(job.work)
        job.future.add_done_callback(partial(self._on_done, key, part, job))
        return ""

    def _fetch_here(self, part: _Arriving, job: PullJob) -> str:
        """Copy a small part on the loop: changing threads takes longer."""
        try:
            reason, part.size = self._fetch(job)
        except Exception as error:
            # As in the thread: any error fails the part alone.
            reason = repr(error)
        return reason

    def _share(self, granted: GrantEntry, fetch: _Fetch) -> BlockMapping:
        ticket = granted.ticket
        if not 0 <= fetch.entry < MAX_ENTRIES:
            raise PlanError("the table has no such entry")
        if len(fetch.blocks) % _BLOCK.itemsize:
            raise PlanError(f"{len(fetch.blocks)} bytes are not a list of block ids")
        blocks = array(_BLOCK.typecode, fetch.blocks)
        share = self.into.share(
            ticket.first_token, ticket.tokens, fetch.start, blocks, fetch.layers, fetch.names
        )
        self.into.check(share, ticket.blocks)
        return share

    def _fetch(self, job: PullJob) -> tuple[str, Bytes]:
        """Copy a part, in the thread; returns why it failed (empty: it did not) and the bytes
        copied."""
        pools = self._pools
        if pools is None or job.stop:
            return _UNWANTED, 0
        fetch = job.fetch
        announced = (fetch.number, fetch.attempt)
        expected = ExpectedEntry(self.peer.epoch, fetch.entry, announced, job.share)
        reason = expected.mismatch(pools.table) or self._lacking(job)
        if reason:
            return reason, 0
        reason, size = self._bring(job)
        if job.stop:
            return _UNWANTED, size
        return expected.mismatch(pools.table) or reason, size

    def _lacking(self, job: PullJob) -> str:
        """Why these checksums are not enough; empty: they are."""
        wanted = len(job.share.blocks)
        for place, count, _ in job.fetch.sums:
            if not job.first <= place < place + count <= job.first + wanted:
                return "a checksum of a block that is not there"
        compared = sum(count for _, count, _ in job.fetch.sums)
        if self.transport.verify == "all" and compared != wanted:
            return (
                f"it brings checksums of {compared} blocks of {wanted}, and --verify-kv=all is set "
                "here"
            )
        return ""

    def _bring(self, job: PullJob) -> tuple[str, Bytes]:
        """In the thread: copy and compare; returns why it failed (empty: it did not) and the bytes
        copied."""
        size = self._copy(job, self.into.moves(job.share, job.granted.ticket.blocks))
        return "" if job.stop else self._compare(job), size

    def _compare(self, job: PullJob) -> str:
        blocks = job.granted.ticket.blocks
        for place, count, expected in job.fetch.sums:
            at = (place - job.first, count)
            if self.transport.sum_of(self.into, job.share, blocks, at, source=False) != expected:
                return self.differs(job, place, count)
        return ""

    def differs(self, job: PullJob, place: int, count: int) -> str:
        """What is said of blocks whose checksum is another one."""
        first = job.granted.ticket.blocks[job.share.place + place - job.first]
        others = f" and the next {count - 1}" if count > 1 else ""
        return f"the checksum of block {first}{others} differs"

    def _on_done(
        self, key: DeliveryKey, part: _Arriving, job: PullJob, future: asyncio.Future[Any]
    ) -> None:
        self._jobs.discard(job)
        part.jobs -= 1
        if self.down is not None:
            return
        reason, size = _UNWANTED, 0  # of one that was never begun
        if not future.cancelled():
            error = future.exception()
            reason, size = (f"{error!r}", 0) if error is not None else future.result()
        part.reason = part.reason or reason
        part.size += size
        if part.ended:
            self._conclude(key, part)

    def _conclude(self, key: DeliveryKey, part: _Arriving) -> None:
        """Report a part that was copied, or was not for its reason."""
        del self._arriving[key]
        granted, reason = part.granted, part.reason
        if granted is None or granted.state != "open":
            reason = reason or _UNWANTED
        elif reason:
            transfer = granted.ticket.transfer
            kind = TransferWithdrawn if reason == GIVEN_UP else TransferCorrupt
            self.spoiled(granted, self._error(kind, transfer, "fetch", reason))
        else:
            self.arrived(*key, part.size)
        self._report(key, reason)

    def _report(self, key: DeliveryKey, reason: str) -> None:
        if reason:
            self._stats.refused += 1
        self._send(_Fetched(*key, reason[:500]))

    async def _fence(self, granted: GrantEntry, timeout: Seconds) -> None:
        await self._stop([job for job in self._jobs if job.granted is granted])

    async def _stop(self, jobs: Sequence[PullJob]) -> None:
        """Return when the thread is done with these. It skips those that it has not begun: it
        copies for all peers, and their turn may be far off."""
        for job in jobs:
            job.stop = True
            if job.work is not None:
                job.work.cancel()
        futures = [job.future for job in jobs if job.future is not None]
        if futures:
            await asyncio.wait(futures)

    # ------------------------------------------------------------------ the end

    async def _destroy(self) -> None:
        connection, self._socket = self._socket, None
        if connection is not None:
            loop = asyncio.get_running_loop()
            loop.remove_reader(connection)
            loop.remove_writer(connection)
        for key in list(self._entries):
            self._release(key)
        await self._stop(list(self._jobs))
        self._arriving.clear()
        self._unsent.clear()
        pools, self._pools = self._pools, None
        if pools is not None:
            await self.transport.run(pools.close)
        if connection is not None:
            await self._part(connection)
            connection.close()

    async def _part(self, connection: socket.socket) -> None:
        """Called before the socket is closed, which tells the peer that this end has closed its
        pools."""


def _pieces(
    places: Sequence[_Group], count: int, size: Bytes, verify: Verify
) -> Iterator[tuple[Sequence[_Group], _Group]]:
    """Cut a part into pieces that are summed and announced one after the other: the groups to sum,
    and the piece's first block and the one after its last. Of a sample little is summed: one
    piece."""
    step = len(places)
    if verify == "all":
        step = min(step, -(-_PIECE * step // max(1, size)))
    for at in range(0, len(places), step):
        some, rest = places[at : at + step], places[at + step :]
        yield some, (some[0][0] if at else 0, rest[0][0] if rest else count)


def _joined(pieces: Sequence[_Fetch]) -> _Fetch:
    if len(pieces) == 1:
        return pieces[0]
    return msgspec.structs.replace(
        pieces[0],
        blocks=b"".join(piece.blocks for piece in pieces),
        names=b"".join(piece.names for piece in pieces),
        sums=tuple(pair for piece in pieces for pair in piece.sums),
    )


# ------------------------------------------------------------------------------ the transport


class PullTransport(TransportBase):
    """A node whose pools peers on this host may read. A backend adds `_pass` and `_sum`."""

    path_type: ClassVar[type[PullPath]]
    threads = 1
    """Number of threads that copy parts."""
    inline: Bytes = 0
    """Parts of at most so many bytes are copied on the loop, which must not wait for a device."""

    def __init__(
        self,
        node: NodeId,
        epoch: Epoch,
        regions: Sequence[Region],
        ask: CallPeer,
        *,
        verify: Verify = "sample",
        patience: Seconds = PATIENCE,
    ) -> None:
        """Errors: `OSError` if the system lacks a feature."""
        super().__init__(node, epoch, regions, ask)
        self.verify: Verify = verify
        self._patience = patience
        self.table = SharedTable(max(region.blocks for region in regions), epoch)
        self._thread: ThreadPoolExecutor | None = None
        self._accepting: BoundedAcceptor | None = None
        self._socket_name = ""
        """The name of the listening socket."""
        self._complaints = LogThrottle()
        self._expected: dict[bytes, asyncio.Future[_Greeted]] = {}

    # ------------------------------------------------------------------ what back ends bring

    def _pass(self) -> tuple[list[int], bytes]:
        """What peers need to map the pools: descriptors, and a record about them."""
        raise NotImplementedError

    def _sum(self, region: int, from_: array[int], lengths: array[int], start: int) -> int:
        """CRC-32 of runs of one of this node's pools; runs in the thread."""
        raise NotImplementedError

    # ------------------------------------------------------------------ the thread

    def run(self, work: Callable[[], Any]) -> asyncio.Future[Any]:
        """Run blocking work in one of the copying threads."""
        return asyncio.wrap_future(self.submit(work))

    def submit(self, work: Callable[[], Any]) -> Future[Any]:
        """Runs like `run`, for a caller that may cancel the work before it begins."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(self.threads, f"pdserve-{self.name}")
        return self._thread.submit(work)

    def sampled(
        self, count: int, number: int, verify: Verify | None = None
    ) -> list[tuple[int, int]]:
        """The blocks whose content is compared: index of each group's first block, and the group's
        size. `verify` defaults to this node's setting."""
        verify = self.verify if verify is None else verify
        if verify == "off" or not count:
            return []
        if verify == "all":
            step = max(1, count // _SUMS)
            return [(place, min(step, count - place)) for place in range(0, count, step)]
        return [(place, 1) for place in range(number % min(SAMPLE, count), count, SAMPLE)]

    def sum_of(
        self,
        route: Any,
        share: BlockMapping,
        destinations: Sequence[int],
        at: tuple[int, int],
        *,
        source: bool,
    ) -> int:
        """Checksum of groups of blocks (index, number) of a mapping, at either end."""
        place, count = at
        total = 0
        for move in route.moves(share.part(place, count), destinations):
            region = move.source if source else move.destination
            offsets = move.runs.source if source else move.runs.destination
            total = self._sum(region, offsets, move.runs.length, total)
        return total

    # ------------------------------------------------------------------ a path comes about

    async def _dial(self, peer: NodeLife, number: int, exchange: HelloExchange) -> PullPath:
        token = secrets.token_bytes(32)
        greeted: asyncio.Future[_Greeted]
        greeted = asyncio.get_running_loop().create_future()
        self._expected[token] = greeted
        try:
            welcome = await exchange(encode_packet(_Details(boot_id(), self._listen(), token)))
            connection, greeting, fds = await greeted
        except BaseException:
            if greeted.done() and not greeted.cancelled() and not greeted.exception():
                connection, greeting, fds = greeted.result()
                connection.close()
                close_all(fds)
            raise
        finally:
            self._expected.pop(token, None)
        try:
            path = self._path(peer, number, welcome.regions)
            path.remote = welcome.path
            await path.attach(connection, greeting, fds)
        except BaseException:
            connection.close()
            raise
        finally:
            close_all(fds)
        return path

    async def _accept(
        self, peer: NodeLife, number: int, hello: PathHello
    ) -> tuple[PullPath, bytes]:
        details = msgspec.msgpack.decode(hello.details, type=_Details)
        if details.host != boot_id():
            raise PlanError("the peer runs on another host")
        path = self._path(peer, number, hello.regions)
        connection = seqpacket()
        fds: list[int] = []
        try:
            connection.connect("\0" + details.name)
            check_user(connection)
            self._greet(connection, details.token)
            greeting, fds = await self._greeting(connection)
            if not secrets.compare_digest(greeting.token, details.token):
                raise PlanError("the peer answered for another path")
            await path.attach(connection, greeting, fds)
        except BaseException:
            connection.close()
            raise
        finally:
            close_all(fds)
        return path, b""

    def _path(self, peer: NodeLife, number: int, theirs: Sequence[RegionCard]) -> PullPath:
        path = self.path_type(
            peer,
            number,
            ours=self.cards,
            theirs=theirs,
            grants=self.grants,
            forget=self.forget,
        )
        path.transport = self
        path.patience = self._patience
        return path

    def _listen(self) -> str:
        """Listen on a socket without a name in the file system; returns its name."""
        if self._accepting is None:
            self._socket_name = f"pdserve-{secrets.token_hex(16)}"
            listening = seqpacket()
            listening.bind(f"\0{self._socket_name}")
            listening.listen(_STRANGERS)
            self._accepting = BoundedAcceptor([listening], _STRANGERS, self._admit, who_connects)
        return self._socket_name

    async def _admit(self, connection: socket.socket, host: str) -> None:
        """Find the path of a connection by its greeting; one that does not greet in time is
        closed."""
        try:
            check_user(connection)
            greeting, fds = await self._greeting(connection)
        except (OSError, PlanError, msgspec.MsgspecError) as error:
            connection.close()
            self._complain(host, error)
            return
        except BaseException:
            connection.close()
            raise
        expected = self._expected.get(greeting.token)
        if expected is None or expected.done():
            close_all(fds)
            connection.close()
            return
        try:
            self._greet(connection, greeting.token)
        except OSError as error:
            close_all(fds)
            connection.close()
            expected.set_exception(error)
        else:
            expected.set_result(_Greeted(connection, greeting, fds))

    def _complain(self, host: str, error: Exception) -> None:
        suppressed = self._complaints.admit("stranger", asyncio.get_running_loop().time())
        if suppressed is not None:
            more = f" ({suppressed} more like it were not logged)" if suppressed else ""
            said = (self.name, host, error, more)
            _log.warning("%s: a connection from %s failed before its path was up: %s%s", *said)

    def _greet(self, connection: socket.socket, token: bytes) -> None:
        """Send the greeting: the table and the pools, for reading only."""
        fds, words = self._pass()
        send_greeting(connection, token, [self.table.fd, *fds], words)

    async def _greeting(self, connection: socket.socket) -> tuple[SocketGreeting, list[int]]:
        """Wait for the peer's greeting."""
        loop = asyncio.get_running_loop()
        readable = loop.create_future()
        loop.add_reader(connection, _settle, readable)
        try:
            async with asyncio.timeout(_GREETING):
                await readable
        except TimeoutError:
            raise PlanError(f"the peer did not greet within {_GREETING:g} s") from None
        finally:
            loop.remove_reader(connection)
        return receive_greeting(connection)

    async def close(self) -> None:
        if self._accepting is not None:
            await self._accepting.close()
            self._accepting = None
        first = not self.closed
        await super().close()
        if self._thread is not None:
            self._thread.shutdown(wait=True)  # idle: every path has ended
            self._thread = None
        if first:
            self.table.close()


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)

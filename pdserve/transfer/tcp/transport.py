"""Implements the TCP backend, which works between any hosts: the source sends, and the destination
places the bytes.

A path has its own connection beside the authenticated link, so blocks do not delay tokens. Small
parts and reports are sent and received on the event loop; a thread sends what is larger or has to
wait, and another one receives what is larger. The connecting side must know the secret that was
sent over the link. If links are encrypted, so are these bytes: the path then has two connections,
one for each direction, and the listening side must show the certificate that was named over the
link.

No field of a frame is an address. A frame names slot, generation, attempt, epoch, and a range of
the ticket's blocks. The receiver computes the addresses from its own plan, and places bytes only
while the grant is open, which it checks before every system call. So a lock of this node is the
fence; for a pool in device memory, which is staged (`pool_access`), it also waits for the copies
that are under way.

Payloads have a CRC-32 of all, some or none of their bytes (`verify`): the stricter setting of both
ends holds. A delivery is done when the receiver reports that it has placed and checked all of it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import queue
import secrets
import threading
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import msgspec

from pdserve.errors import PathLost, TransferCorrupt, TransferRefused, TransferWithdrawn
from pdserve.messages.transfer import MAX_BLOCKS
from pdserve.net.log_throttle import LogThrottle
from pdserve.net.transport.bounded_acceptor import BoundedAcceptor
from pdserve.net.transport.sockets import bind_all, connect_any, resolve_now
from pdserve.transfer.block_mapping import BlockMapping
from pdserve.transfer.copy_plan import PlanError
from pdserve.transfer.cuda.driver import CudaError
from pdserve.transfer.cuda.nvidia import NvidiaDriver
from pdserve.transfer.path_base import DeliveryKey, PathBase
from pdserve.transfer.path_probe import PROBE_BYTES
from pdserve.transfer.tcp.framing import BulkError, BulkSocket, ReadPause, Sent, WriteGuard
from pdserve.transfer.tcp.handshake import (
    TOKEN_BYTES,
    proof,
    receive_exactly,
    send_all,
    set_socket_options,
    tls_handshake,
)
from pdserve.transfer.tcp.pool_access import HostPools, StagedPools
from pdserve.transfer.tcp.tls_socket import TlsSocket, peer_fingerprint, wrap_tls
from pdserve.transfer.transport_base import TransportBase
from pdserve.transfer.verify import Verify, covers, sampled_range, stricter

if TYPE_CHECKING:
    import socket
    import ssl
    from collections.abc import Callable, Generator, Sequence

    from pdserve.ids import Bytes, Epoch, NodeId, NodeLife, Seconds
    from pdserve.messages.transfer import PathHello, RegionCard
    from pdserve.net.transport.tls import TlsSource
    from pdserve.transfer.base import CallPeer, GrantSink, GrantSpec, Region
    from pdserve.transfer.block_mapping import RegionCopy
    from pdserve.transfer.cuda.driver import CudaDriver
    from pdserve.transfer.grants import GrantEntry
    from pdserve.transfer.path_base import Delivery
    from pdserve.transfer.tcp.framing import Range
    from pdserve.transfer.tcp.pool_access import PoolAccess
    from pdserve.transfer.transport_base import HelloExchange

__all__ = ["PROGRESS", "TcpTransport"]

_Works = queue.SimpleQueue["Callable[[], None] | None"]
"""What a thread has to do, in order; None ends it."""

_log = logging.getLogger(__name__)

PROGRESS: Final[Seconds] = 10.0
"""How long a step inside a frame may take before the path fails."""
_FRAME: Final[Bytes] = 4 << 20
"""Approximate payload of one frame; the sender checks between two frames whether it shall stop."""
_INLINE: Final[Bytes] = 256 << 10
"""Frames of at most so many bytes are sent and received on the event loop: about 100 us, as long as
two changes of threads."""
_FRAMES: Final = 16
"""Most frames that are received before the event loop does something else."""
_GREETING: Final[Seconds] = 10.0
_STRANGERS: Final = 64
"""Most connections that have not proved their secret; one more ends the oldest one of the host with
the most."""
_BACKLOG: Final = 64


class _Data(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """A range of a part's blocks; the payload is their bytes, for each pair of ranks in turn."""

    slot: int
    generation: int
    attempt: int
    epoch: int
    part: int
    place: int
    """Index of the first block in the ticket."""
    count: int
    layers: tuple[int, int]
    last: bool
    """True on the part's last frame."""
    checked: tuple[int, int]
    """The range of the payload that the checksum covers."""


class _Dropped(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """The rest of a part will not be sent."""

    slot: int
    generation: int
    part: int


class _Applied(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """All of a part has been placed and checked; with `error` it was not."""

    slot: int
    generation: int
    part: int
    error: str = ""


class _ProbeOrder(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Asks for a probe of so many bytes. Only sent to a peer whose `_Details` say that it has
    probes."""

    number: int
    size: int


class _Probe(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """The answer; the payload is zeros, with a checksum if all payloads have one."""

    number: int


_Frame = _Data | _Dropped | _Applied | _ProbeOrder | _Probe
_decode = msgspec.msgpack.Decoder(_Frame).decode
_encode = msgspec.msgpack.Encoder().encode


class _Proposal(msgspec.Struct, frozen=True, array_like=True):
    """Details of PathHello: the least `verify`, and whether TLS is required."""

    verify: Verify
    tls: bool = False


class _Details(msgspec.Struct, frozen=True, array_like=True):
    """Details of PathWelcome: the address and secrets to connect with, and the agreed `verify`."""

    host: str
    port: int
    tokens: tuple[bytes, ...]
    """Secrets, one for each connection; under TLS the first is for what the dialling side sends."""
    verify: Verify
    certificate: bytes = b""
    """SHA-256 of the certificate that the listening side shows; empty: no TLS."""
    probes: bool = False
    """Whether the listening side answers `_ProbeOrder`; false: it is of a release that does not."""


class _Unsent(NamedTuple):
    """A frame whose payload is still in the pools."""

    record: bytes
    moves: Sequence[RegionCopy]
    size: Bytes
    checked: Range


class _OpenGrant(WriteGuard):
    """One grant, as the receiving thread sees it."""

    def __init__(self, lock: threading.Lock, granted: GrantEntry) -> None:
        super().__init__(lock)
        self.ticket = granted.ticket
        self.open = True
        self.failed: dict[int, str] = {}
        """Parts of which something is missing. The reader's own."""
        self.sizes: dict[int, Bytes] = {}
        self.ended: set[int] = set()
        """Parts that are here. Nothing more is placed for them: the owner may have the blocks."""

    def allowed(self) -> bool:
        return self.open


class _Unplaced(WriteGuard):
    """Guards a payload that goes into no block."""

    def allowed(self) -> bool:
        return True


class TcpPath(PathBase):
    """A path over one TCP connection, or two under TLS."""

    backend = "tcp"
    transport: TcpTransport

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.tokens: tuple[bytes, ...] = ()
        """The tokens that identify the peer's connections, if this node listens."""
        self.verify: Verify = "all"
        """What both ends have agreed on."""
        self.pools: PoolAccess = HostPools(())
        """This node's pools. Set by the transport."""
        self.probed = False
        """Whether the peer answers probes."""
        self._probe: tuple[int, asyncio.Future[None]] | None = None
        """The probe that is under way: its number, and its end."""
        self._probes = itertools.count(1)
        self._probe_bytes: Bytes = 0
        """Bytes of probes that the peer has ordered. The reader's own."""
        self._turns = itertools.count(1)
        self._loop = asyncio.get_running_loop()
        self._home = threading.get_ident()
        """The event loop's thread."""
        self._reader: Generator[ReadPause, None, None] | None = None
        self._reading = False
        """Whether the event loop reads; else the receiving thread does, or the path has ended."""
        self._turn: asyncio.Handle | None = None
        """The next turn of reading, if it waits for no bytes."""
        self._midway = False
        """Whether more frames of a part follow. The reader's own."""
        self._stalling: asyncio.TimerHandle | None = None
        self._waiting: asyncio.TimerHandle | None = None
        """The next look at how long a thread has waited for a device."""
        self._joined: dict[int, socket.socket] = {}  # not all are there
        self._out: BulkSocket | None = None
        self._in: BulkSocket | None = None
        self._threads: list[threading.Thread] = []
        self._finished: list[asyncio.Future[None]] = []
        self._lock = threading.Lock()
        self._open: dict[tuple[int, int], _OpenGrant] = {}  # under the lock
        self._stopped_keys: set[DeliveryKey] = set()  # added to by the loop, read by the sender
        self._queue: _Works = queue.SimpleQueue()
        self._large: _Works = queue.SimpleQueue()
        """The receiving thread's work: to read on from a large payload."""
        self._fences: _Works = queue.SimpleQueue()
        """Fences that wait for a device, in a thread of their own."""

    def join(self, place: int, connection: socket.socket, of: int, *, dialled: bool) -> None:
        """The peer has proved its secret on one connection; starts the path once it has all of
        them."""
        self._joined[place] = connection
        if len(self._joined) < of:
            return
        ends, progress = dict(self._joined), self.transport.progress
        self._joined.clear()
        if of == 1:
            self._out = self._in = BulkSocket(ends[0], progress)
        else:
            sealed = [TlsSocket(cast("ssl.SSLSocket", ends[n]), progress) for n in range(of)]
            self._out, self._in = sealed if dialled else reversed(sealed)
        self._start("send", self._queue, self.pools.close_source)
        self._start("receive", self._large, self.pools.close_destination)
        if self.pools.waits:
            self._start("fence", self._fences)
            self._watch_device(None)
        self._reader = self._receiving(self._in)
        self._watch_socket()

    def _start(self, name: str, works: _Works, close: Callable[[], None] = lambda: None) -> None:
        """Start a thread. It calls `close` at its end, behind which it touches no pool."""
        finished = self._loop.create_future()
        self._finished.append(finished)
        thread = threading.Thread(
            target=self._thread,
            args=(works, close, finished),
            name=f"pdserve-tcp-{name}",
            daemon=True,
        )
        self._threads.append(thread)
        thread.start()

    def _thread(
        self, works: _Works, close: Callable[[], None], finished: asyncio.Future[None]
    ) -> None:
        reason = "closed here"
        try:
            while (work := works.get()) is not None:
                work()
        except Exception as error:
            reason = self._reason_of(error)
        self._tell(self.fail, "connection", reason)
        close()
        self._tell(finished.set_result, None)

    def _reason_of(self, error: Exception) -> str:
        """Why the path ends by this error."""
        if isinstance(error, BulkError):
            return str(error)
        if isinstance(error, CudaError):
            return f"staging: {error}"
        _log.error("%r", self, exc_info=error)
        return repr(error)

    def _tell(self, call: Callable[..., object], *args: object) -> None:
        """Call on the event loop. The path's end waits for the threads, so the loop is there."""
        if threading.get_ident() == self._home:
            call(*args)
            return
        self._loop.call_soon_threadsafe(call, *args)

    # ------------------------------------------------------------------ the source

    def _begin(self, outgoing: Delivery) -> None:
        self.out.check(outgoing.share, outgoing.ticket.blocks)
        if outgoing.size > _INLINE or self.pools.waits:
            self._queue.put(partial(self._send_part, outgoing))
            return
        frame = self._frame(outgoing, 0, len(outgoing.share.blocks))
        views = [view for batch in self.pools.source(frame.moves) for view in batch]
        self._post(frame.record, views, frame.checked)

    def _post(
        self, record: bytes, views: Sequence[memoryview] = (), checked: Range | None = None
    ) -> None:
        """Send a small frame, if possible without a change of threads."""
        bulk = self._out
        assert bulk is not None
        try:
            sent = bulk.send_now(record, views, checked)
        except BulkError as error:
            self._tell(self.fail, "connection", str(error))
            return
        if sent is Sent.NOTHING:
            self._queue.put(partial(bulk.send, record, views, checked))
        elif sent is Sent.REST:
            self._queue.put(bulk.flush)

    def _abandon(self, key: DeliveryKey) -> None:
        self._stopped_keys.add(key)

    def _send_part(self, outgoing: Delivery) -> None:
        """Send one part; runs in the thread."""
        assert self._out is not None
        count = len(outgoing.share.blocks)
        step = max(1, _FRAME * count // max(1, outgoing.size))
        for first in range(0, max(1, count), step):
            if outgoing.key in self._stopped_keys:
                self._out.send(_encode(_Dropped(*outgoing.key)))
                return
            frame = self._frame(outgoing, first, step)
            payload = self.pools.source(frame.moves)
            self._out.send_payload(frame.record, payload, frame.size, frame.checked)

    def _frame(self, outgoing: Delivery, first: int, step: int) -> _Unsent:
        """The frame of so many blocks."""
        share, ticket = outgoing.share, outgoing.ticket
        piece = share.part(first, step)
        moves = self.out.moves(piece, ticket.blocks)
        outgoing.runs += sum(len(move.runs) for move in moves)
        size = self.out.size(piece)
        checked = sampled_range(self.verify, size, next(self._turns))
        record = _Data(
            *outgoing.key[:2],
            ticket.attempt,
            ticket.epoch,
            outgoing.part,
            piece.place,
            len(piece.blocks),
            share.layers,
            first + step >= len(share.blocks),
            checked,
        )
        return _Unsent(_encode(record), moves, size, checked)

    # ------------------------------------------------------------------ probes

    async def probe(self, size: Bytes) -> Bytes:
        """Order bytes of the peer, which come as those of a part do."""
        if self.down is not None:
            raise self._error(PathLost, "", "probe", self.down.message)
        if not self.probed:
            raise self._error(
                TransferRefused, "", "probe", "the peer made the path, or its release has no probes"
            )
        number, ended = next(self._probes), self._loop.create_future()
        self._probe = number, ended
        self._post(_encode(_ProbeOrder(number, size)))
        await ended
        return size

    def _on_order(self, order: _ProbeOrder) -> None:
        """Send a probe. Errors: `BulkError` for a peer that orders too much."""
        self._probe_bytes += order.size
        if order.size < 0 or self._probe_bytes > PROBE_BYTES:
            raise BulkError(f"the peer has ordered more than {PROBE_BYTES} bytes of probes")
        self._queue.put(partial(self._send_probe, order))

    def _send_probe(self, order: _ProbeOrder) -> None:
        assert self._out is not None
        zeros = memoryview(bytes(order.size))
        self._out.send(_encode(_Probe(order.number)), [zeros], self._probe_range(order.size))

    def _probe_range(self, size: Bytes) -> Range:
        return (0, size) if self.verify == "all" else (0, 0)

    def _receive_probe(
        self, bulk: BulkSocket, frame: _Probe, size: Bytes
    ) -> Generator[ReadPause, None, None]:
        if size > PROBE_BYTES:
            raise BulkError(f"the peer sent a probe of {size} bytes")
        if size > _INLINE:
            yield ReadPause.LARGE
        if size:
            scratch, guard = memoryview(bytearray(size)), _Unplaced(threading.Lock())
            yield from bulk.receive_payload([[scratch]], guard, self._probe_range(size))
        self._tell(self._on_probe, frame.number)

    def _on_probe(self, number: int) -> None:
        """A probe has come; ignores one that nobody waits for any more."""
        if self._probe is not None and self._probe[0] == number and not self._probe[1].done():
            self._probe[1].set_result(None)

    def _mark(self) -> object:
        return super()._mark(), 0 if self._out is None else self._out.sent

    def _on_applied(self, frame: _Applied) -> None:
        key = DeliveryKey(frame.slot, frame.generation, frame.part)
        self._stopped_keys.discard(key)
        outgoing = self.outgoing.get(key)
        if outgoing is None:
            self._stats.refused += 1
            return
        error = None
        if frame.error:
            transfer, reason = outgoing.ticket.transfer, f"the peer says: {frame.error}"
            error = self._error(TransferWithdrawn, transfer, "deliver", reason)
        self.settle(key, error)

    # ------------------------------------------------------------------ the destination

    def grant(self, order: GrantSpec, sink: GrantSink) -> GrantEntry:
        granted = super().grant(order, sink)
        ticket = granted.ticket
        with self._lock:
            self._open[ticket.slot, ticket.generation] = _OpenGrant(self._lock, granted)
        return granted

    def finish(self, granted: GrantEntry) -> None:
        self._shut(granted)
        super().finish(granted)

    async def _fence(self, granted: GrantEntry, timeout: Seconds) -> None:
        self._shut(granted)
        if not self.pools.waits or not self._threads:
            return
        fenced = self._loop.create_future()
        self._fences.put(partial(self._fence_device, fenced))
        await fenced

    def _fence_device(self, fenced: asyncio.Future[None]) -> None:
        """Wait for the copies to the device; runs in the thread for fences."""
        self.pools.fence()
        self._tell(_settle, fenced)

    def _watch_device(self, before: object | None) -> None:
        """Fail the path if a thread has waited for a device since the last look. Its blocks stay
        in quarantine for as long as the device may still copy."""
        position = self.pools.position()
        if position is not None and position == before:
            reason = f"the device has not ended a copy for {self.transport.progress:g} s"
            self.fail("staging", reason)
        elif self.down is None:
            self._waiting = self._loop.call_later(
                self.transport.progress, self._watch_device, position
            )

    def _shut(self, granted: GrantEntry) -> None:
        """Place no more bytes for a grant. Waits for at most one system call."""
        with self._lock:
            shut = self._open.pop((granted.ticket.slot, granted.ticket.generation), None)
            if shut is not None:
                shut.open = False

    def _watch_socket(self) -> None:
        """Read on the event loop, from here on."""
        assert self._in is not None
        if self.down is None:
            self._reading = True
            self._loop.add_reader(self._in.fileno(), self._read)
            self._read_soon()  # TLS may hold bytes that the socket does not show

    def _unwatch_socket(self) -> None:
        if self._reading:
            assert self._in is not None
            self._reading = False
            self._loop.remove_reader(self._in.fileno())
            if self._turn is not None:
                self._turn.cancel()
                self._turn = None
        if self._stalling is not None:
            self._stalling.cancel()
            self._stalling = None

    def _read_soon(self) -> None:
        """Read after all that the event loop has to do now. Never twice: a peer that is fast would
        get ever more of its time."""
        if self._turn is None:
            self._turn = self._loop.call_soon(self._read_on)

    def _read_on(self) -> None:
        self._turn = None
        self._read()

    def _read(self) -> None:
        """Read what is here; leaves a large payload to the thread."""
        if self._turn is not None:
            return
        frames = 0
        while self._reading and frames < _FRAMES:
            assert self._reader is not None
            try:
                pause = next(self._reader)
            except Exception as error:
                self._unwatch_socket()
                self.fail("connection", self._reason_of(error))
                return
            if pause is ReadPause.LARGE:
                self._unwatch_socket()
                self._large.put(self._read_large)
            elif pause is not ReadPause.FRAME:
                self._expect(pause)
                return
            frames += 1
        if self._reading:
            self._read_soon()

    def _expect(self, pause: ReadPause) -> None:
        """Set the deadline of the next bytes of a frame, or none between frames."""
        if pause is ReadPause.INSIDE and self._stalling is None:
            assert self._in is not None
            self._stalling = self._loop.call_later(
                self.transport.progress, self._stalled, self._in.taken
            )
        elif pause is ReadPause.IDLE and self._stalling is not None:
            self._stalling.cancel()
            self._stalling = None

    def _stalled(self, before: Bytes) -> None:
        self._stalling = None
        assert self._in is not None
        if self._in.taken != before:
            self._expect(ReadPause.INSIDE)
            return
        self._unwatch_socket()
        self.fail("connection", f"no progress for {self.transport.progress:g} s")

    def _read_large(self) -> None:
        """Read to the end of a large part; runs in the thread."""
        assert self._reader is not None
        assert self._in is not None
        for pause in self._reader:
            if pause is ReadPause.IDLE and not self._midway:
                break
            self._in.wait_for(pause)
        self._tell(self._watch_socket)

    def _receiving(self, bulk: BulkSocket) -> Generator[ReadPause, None, None]:
        """Receives frames for ever, on the event loop or in the thread."""
        while True:
            record, size = yield from bulk.receive()
            try:
                frame = _decode(record)
            except msgspec.MsgspecError as error:
                raise BulkError(f"a record cannot be decoded: {error}") from error
            if isinstance(frame, _Data):
                yield from self._place(bulk, frame, size)
            elif isinstance(frame, _Probe):
                yield from self._receive_probe(bulk, frame, size)
            elif size:
                raise BulkError("a record came with a payload that it must not have")
            elif isinstance(frame, _Dropped):
                self._midway = False
                self._conclude(frame, "the source has withdrawn it")
            elif isinstance(frame, _ProbeOrder):
                self._on_order(frame)
            else:
                self._tell(self._on_applied, frame)
            yield ReadPause.FRAME

    def _place(
        self, bulk: BulkSocket, frame: _Data, size: Bytes
    ) -> Generator[ReadPause, None, None]:
        self._midway = not frame.last
        if size > _INLINE or self.pools.waits:
            yield ReadPause.LARGE
        with self._lock:
            grant = self._open.get((frame.slot, frame.generation))
        try:
            moves = self._destination(grant, frame, size)
        except PlanError as error:
            if size:
                yield from bulk.skip_payload(size)
            reason = str(error)
        else:
            guard = _guard_of(grant)
            payload = self.pools.destination(moves, guard.allowed)
            good = not size or (yield from bulk.receive_payload(payload, guard, frame.checked))
            reason = "" if good else "the checksum of the payload differs"
        if grant is None:
            if frame.last:
                self._applied(frame, reason)
            return
        if reason:
            grant.failed.setdefault(frame.part, reason)
        grant.sizes[frame.part] = grant.sizes.get(frame.part, 0) + size
        if frame.last:
            grant.ended.add(frame.part)
            self.pools.place()
            self._conclude(frame, grant.failed.pop(frame.part, ""), grant.sizes.pop(frame.part))

    def _destination(
        self, grant: _OpenGrant | None, frame: _Data, size: Bytes
    ) -> Sequence[RegionCopy]:
        """The place of the payload, by this node's own plan. Errors: `PlanError`."""
        if grant is None:
            raise PlanError("the attempt is not open")
        ticket = grant.ticket
        if frame.attempt != ticket.attempt or frame.epoch != ticket.epoch:
            raise PlanError(f"attempt {frame.attempt} of epoch {frame.epoch} is not open")
        if frame.part in grant.ended:
            raise PlanError(f"part {frame.part} is here already")
        inside = 0 <= frame.place <= frame.place + frame.count <= len(ticket.blocks)
        if not inside or frame.count > MAX_BLOCKS or frame.count < 0:
            raise PlanError("the frame names blocks beyond the ticket's")
        # Only the order of the source's blocks matters here, not which they are.
        share = BlockMapping(frame.place, tuple(range(frame.count)), b"", frame.layers)
        if size != self.into.size(share):
            raise PlanError(f"the payload has {size} bytes for {frame.count} blocks")
        if not covers(self.verify, size, frame.checked):
            raise PlanError(
                f"the checksum covers {frame.checked}, but verify={self.verify} was agreed"
            )
        return self.into.moves(share, ticket.blocks)

    def _conclude(self, frame: _Data | _Dropped, reason: str, size: Bytes = 0) -> None:
        """A part has ended: the event loop decides what follows, and answers."""
        self._tell(self._ended_part, frame, reason, size)

    def _applied(self, frame: _Data | _Dropped, reason: str) -> None:
        """Tell the source."""
        self._post(_encode(_Applied(frame.slot, frame.generation, frame.part, reason[:500])))

    def _ended_part(self, frame: _Data | _Dropped, reason: str, size: Bytes) -> None:
        granted = self.grants.find(self, frame.slot, frame.generation, exact=True)
        if granted is None or granted.state != "open" or self.down is not None:
            reason = reason or "the attempt is not open"
        elif reason:
            dropped, transfer = isinstance(frame, _Dropped), granted.ticket.transfer
            kind, step = (TransferWithdrawn, "withdraw") if dropped else (TransferCorrupt, "place")
            self.spoiled(granted, self._error(kind, transfer, step, reason))
            self._shut(granted)
        else:
            self.arrived(frame.slot, frame.generation, frame.part, size)
        if reason:
            self._stats.refused += 1
        self._applied(frame, reason)

    # ------------------------------------------------------------------ the end

    async def _destroy(self) -> None:
        self.transport.forget_tokens(self.tokens)
        while self._joined:
            self._joined.popitem()[1].close()
        ends = [bulk for bulk in (self._out, self._in) if bulk is not None]
        if not ends:
            return
        self._unwatch_socket()
        if self._waiting is not None:
            self._waiting.cancel()
        for bulk in ends:
            bulk.end()
        for works in (self._queue, self._large, self._fences):
            works.put(None)
        await asyncio.wait(self._finished)
        for thread in self._threads:
            thread.join()  # has said that it is done
        for bulk in ends:
            bulk.close()
        self._queue = queue.SimpleQueue()  # what is left there holds runs of the pool
        self._reader = None
        self._open.clear()


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _guard_of(grant: _OpenGrant | None) -> WriteGuard:
    assert grant is not None
    return grant


# ------------------------------------------------------------------------------ the transport


class TcpTransport(TransportBase):
    """A node that peers connect to by TCP."""

    name = "tcp"

    def __init__(
        self,
        node: NodeId,
        epoch: Epoch,
        regions: Sequence[Region],
        ask: CallPeer,
        *,
        host: str,
        advertise: str = "",
        progress: Seconds = PROGRESS,
        verify: Verify = "all",
        tls: TlsSource | None = None,
        driver: CudaDriver | None = None,
    ) -> None:
        """Listens on `host`, an address of this machine, at a port chosen by the system; peers dial
        `advertise` instead if it is given. With `tls` all bytes are encrypted, and peers without
        TLS are refused. Every region needs a view, or every one an address: device memory, which is
        staged through `driver` (default: NVIDIA's). Blocks there must be complete before they are
        delivered, as for `cuda_ipc`. Errors: `CudaError` if CUDA cannot be used."""
        in_device = any(region.view is None for region in regions)
        if in_device and not all(region.address for region in regions):
            raise ValueError("tcp needs regions with a view, or device memory with an address")
        super().__init__(node, epoch, regions, ask)
        self._driver = (driver or NvidiaDriver()) if in_device else None
        self.progress = progress
        self.verify: Verify = verify
        self._tls = tls
        self._host = host
        self._advertise = advertise or host
        self._accepting: BoundedAcceptor | None = None
        self._expected: dict[bytes, tuple[TcpPath, int]] = {}
        self._complaints = LogThrottle()

    async def _dial(self, peer: NodeLife, number: int, exchange: HelloExchange) -> TcpPath:
        welcome = await exchange(_encode(_Proposal(self.verify, tls=self._tls is not None)))
        details = msgspec.msgpack.decode(welcome.details, type=_Details)
        self._check_tls(peer, theirs=bool(details.certificate))
        path = self._path(peer, number, welcome.regions)
        path.verify = stricter(self.verify, details.verify)
        path.probed = details.probes
        path.remote = welcome.path
        reached: list[socket.socket] = []
        try:
            for token in details.tokens:
                reached.append(await self._reach(details, token))  # noqa: PERF401
        except BaseException:
            for connection in reached:
                connection.close()
            raise
        for place, connection in enumerate(reached):
            path.join(place, connection, len(reached), dialled=True)
        return path

    async def _reach(self, details: _Details, token: bytes) -> socket.socket:
        """Connect, and prove the secret in both directions."""
        connection = await connect_any(details.host, details.port)
        try:
            set_socket_options(connection)
            if self._tls is not None:
                connection = sealed = wrap_tls(connection, self._tls.current(), listening=False)
                await tls_handshake(sealed)
                if peer_fingerprint(sealed) != details.certificate:
                    raise PlanError("the TLS certificate of the answering side is not the peer's")
            await send_all(connection, token)
            if await receive_exactly(connection, TOKEN_BYTES) != proof(token):
                raise PlanError("the answering side does not know the path's secret")
        except BaseException:
            connection.close()
            raise
        return connection

    async def _accept(self, peer: NodeLife, number: int, hello: PathHello) -> tuple[TcpPath, bytes]:
        proposal = _proposal_of(hello)
        self._check_tls(peer, theirs=proposal.tls)
        path = self._path(peer, number, hello.regions)
        path.verify = stricter(self.verify, proposal.verify)
        port = self._listen()
        count, certificate = (1, b"") if self._tls is None else (2, self._tls.current().fingerprint)
        path.tokens = tuple(secrets.token_bytes(TOKEN_BYTES) for _ in range(count))
        self._expected.update((token, (path, n)) for n, token in enumerate(path.tokens))
        details = _Details(
            self._advertise, port, path.tokens, path.verify, certificate, probes=True
        )
        return path, _encode(details)

    def _check_tls(self, peer: NodeLife, *, theirs: bool) -> None:
        """Refuse to send KV unencrypted if links are encrypted."""
        if theirs != (self._tls is not None):
            one, other = ("this worker", "the peer") if self._tls else ("the peer", "this worker")
            self._refuse(
                peer,
                "connect",
                f"{one} encrypts what it sends (--tls-cert), {other} does not: all nodes of a "
                "cluster must, or none",
            )

    def _path(self, peer: NodeLife, number: int, theirs: Sequence[RegionCard]) -> TcpPath:
        path = TcpPath(
            peer,
            number,
            ours=self.cards,
            theirs=theirs,
            grants=self.grants,
            forget=self.forget,
        )
        path.transport = self
        path.patience = 2 * self.progress
        path.pools = (
            HostPools(self.regions)
            if self._driver is None
            else StagedPools(self.regions, self._driver)
        )
        return path

    def forget_tokens(self, tokens: Sequence[bytes]) -> None:
        """Refuse connections with these secrets from now on."""
        for token in tokens:
            self._expected.pop(token, None)

    # ------------------------------------------------------------------ who connects

    def _listen(self) -> int:
        """Listen; returns the port."""
        if self._accepting is None:
            sockets = bind_all(resolve_now(self._host, 0), _BACKLOG)
            self._accepting = BoundedAcceptor(sockets, _STRANGERS, self._welcome_stranger)
        return self._accepting.port

    async def _welcome_stranger(self, connection: socket.socket, host: str) -> None:
        """Find the path of a connection by its secret; one that does not send it in time is
        closed."""
        expected = None
        try:
            set_socket_options(connection)
            async with asyncio.timeout(_GREETING):
                if self._tls is not None:
                    connection = sealed = wrap_tls(connection, self._tls.current(), listening=True)
                    await tls_handshake(sealed)
                token = await receive_exactly(connection, TOKEN_BYTES)
                expected = self._expected.pop(token, None)
                if expected is not None:
                    await send_all(connection, proof(token))
        except (OSError, PlanError, TimeoutError) as error:
            self._complain(host, error)
            expected = None
        except BaseException:
            expected = None
            raise
        finally:
            if expected is None:
                connection.close()
        if expected is not None and expected[0].down is None:
            path, place = expected
            path.join(place, connection, len(path.tokens), dialled=False)
        elif expected is not None:
            connection.close()

    def _complain(self, host: str, error: Exception) -> None:
        suppressed = self._complaints.admit("stranger", asyncio.get_running_loop().time())
        if suppressed is not None:
            more = f" ({suppressed} more like it were not logged)" if suppressed else ""
            words = str(error) or "it was silent for too long"
            _log.info(
                "tcp: a connection from %s failed before its path was up: %s%s", host, words, more
            )

    async def close(self) -> None:
        if self._accepting is not None:
            await self._accepting.close()
            self._accepting = None
        await super().close()


def _proposal_of(hello: PathHello) -> _Proposal:
    try:
        return msgspec.msgpack.decode(hello.details, type=_Proposal)
    except msgspec.MsgspecError as error:
        raise PlanError(f"the hello cannot be decoded: {error}") from error

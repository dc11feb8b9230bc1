"""Anywhere: the source sends, and the destination's own thread places what it may place.

A path has a connection of its own, beside the link over which it was agreed: blocks then delay no
tokens, and threads that wait for the kernel, not the loop, move the bytes. Who connects must know
the secret that went over the authenticated link. The bytes are not encrypted: where links are, no
path comes about (`encrypted_links`).

Nothing of what a frame says is an address. It names slot, generation, attempt and epoch, and a
range of the ticket's blocks; the receiver computes where that is, by its own plan, and places bytes
only while the grant is open, asked before every system call. So a fence is a lock of this node's
own.

Payloads have a CRC-32, of all, some or none of their bytes (`verify`): both ends say what they want
and the stricter holds. A delivery is done when the receiver says that it has been placed and
checked.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import queue
import secrets
import socket
import threading
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec

from pdserve.errors import TransferCorrupt, TransferWithdrawn
from pdserve.messages.transfer import MAX_BLOCKS
from pdserve.transfer.bulk import BulkError, BulkSocket, Guard
from pdserve.transfer.host import TransportCore
from pdserve.transfer.path import Key, PathCore
from pdserve.transfer.plan import PlanError
from pdserve.transfer.route import Share
from pdserve.transfer.verify import Verify, covers, sampled_range, stricter

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdserve.ids import Bytes, Epoch, NodeId, Seconds
    from pdserve.messages.transfer import Hello, RegionCard
    from pdserve.transfer.base import Ask, Order, PeerKey, Region, Sink
    from pdserve.transfer.grants import Granted
    from pdserve.transfer.host import Exchange
    from pdserve.transfer.path import Outgoing
    from pdserve.transfer.route import Move

__all__ = ["PROGRESS", "TcpTransport"]

_log = logging.getLogger(__name__)

PROGRESS: Final[Seconds] = 10.0
"""How long a step inside a frame may take before the path is given up."""
_FRAME: Final[Bytes] = 4 << 20
"""About the payload of one frame: between two, a sender looks whether it is still wanted."""
_GREETING: Final[Seconds] = 10.0
_STRANGERS: Final = 64
"""Connections that have not shown their secret; one more is closed."""
_TOKEN: Final[Bytes] = 32


class _Data(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """A range of a part's blocks; its payload is their bytes, pair of ranks by pair of ranks."""

    slot: int
    generation: int
    attempt: int
    epoch: int
    part: int
    place: int
    """Of the first block, in the ticket."""
    count: int
    layers: tuple[int, int]
    last: bool
    """The part is complete with this one."""
    checked: tuple[int, int]
    """The range of the payload that its checksum is of."""


class _Dropped(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """The rest of a part will not come."""

    slot: int
    generation: int
    part: int


class _Applied(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """All of a part has been placed and checked; `error`: it has not been."""

    slot: int
    generation: int
    part: int
    error: str = ""


_Frame = _Data | _Dropped | _Applied
_decode = msgspec.msgpack.Decoder(_Frame).decode
_encode = msgspec.msgpack.Encoder().encode


class _Wish(msgspec.Struct, frozen=True, array_like=True):
    """Of Hello: what has to be checked at least."""

    verify: Verify


class _Details(msgspec.Struct, frozen=True, array_like=True):
    """Of Welcome: where to connect, and with what; what is checked."""

    host: str
    port: int
    token: bytes
    verify: Verify


class _OpenGrant(Guard):
    """One grant, as the receiving thread sees it."""

    def __init__(self, lock: threading.Lock, granted: Granted) -> None:
        super().__init__(lock)
        self.ticket = granted.ticket
        self.open = True
        self.failed: dict[int, str] = {}
        """Parts of which something is missing. The receiving thread's own."""
        self.sizes: dict[int, Bytes] = {}

    def allowed(self) -> bool:
        return self.open


class TcpPath(PathCore):
    """See above."""

    backend = "tcp"
    transport: TcpTransport

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.token = b""
        self.verify: Verify = "all"
        """What both ends have agreed on."""
        self._turn = 0  # the sending thread's own
        self._loop = asyncio.get_running_loop()
        self._bulk: BulkSocket | None = None
        self._threads: list[threading.Thread] = []
        self._finished: list[asyncio.Future[None]] = []
        self._lock = threading.Lock()
        self._open: dict[tuple[int, int], _OpenGrant] = {}  # under the lock
        self._stopped_keys: set[Key] = set()  # added to by the loop, read by the sender
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()

    def attach(self, connection: socket.socket) -> None:
        """The peer has shown its secret: start."""
        self._bulk = BulkSocket(connection, self.transport.progress)
        for name, work in (("send", self._sending), ("receive", self._receiving)):
            finished = self._loop.create_future()
            self._finished.append(finished)
            thread = threading.Thread(
                target=self._thread, args=(work, finished), name=f"pdserve-tcp-{name}", daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def _thread(self, work: Callable[[BulkSocket], None], finished: asyncio.Future[None]) -> None:
        assert self._bulk is not None
        reason = "closed here"
        try:
            work(self._bulk)
        except BulkError as error:
            reason = str(error)
        except Exception as error:
            _log.exception("%r", self)
            reason = repr(error)
        self._tell(self.fail, "connection", reason)
        self._tell(finished.set_result, None)

    def _tell(self, call: Callable[..., object], *args: object) -> None:
        """From a thread to the loop; the path's end waits for the threads, so the loop is there."""
        self._loop.call_soon_threadsafe(call, *args)

    # ------------------------------------------------------------------ the source

    def _begin(self, outgoing: Outgoing) -> None:
        self.out.check(outgoing.share, outgoing.ticket.blocks)
        self._queue.put(partial(self._send_part, outgoing))

    def _abandon(self, key: Key) -> None:
        self._stopped_keys.add(key)

    def _sending(self, bulk: BulkSocket) -> None:
        """The thread that sends."""
        while (work := self._queue.get()) is not None:
            work()

    def _send_part(self, outgoing: Outgoing) -> None:
        """In the thread."""
        assert self._bulk is not None
        share, ticket = outgoing.share, outgoing.ticket
        count = len(share.blocks)
        step = max(1, _FRAME * count // max(1, outgoing.size))
        for first in range(0, max(1, count), step):
            if outgoing.key in self._stopped_keys:
                self._bulk.send(_encode(_Dropped(*outgoing.key)))
                return
            blocks = share.blocks[first : first + step]
            piece = Share(share.place + first, blocks, b"", share.layers)
            moves = self.out.moves(piece, ticket.blocks)
            outgoing.runs += sum(len(move.runs) for move in moves)
            self._turn += 1
            checked = sampled_range(self.verify, self.out.size(piece), self._turn)
            record = _Data(
                *outgoing.key[:2],
                ticket.attempt,
                ticket.epoch,
                outgoing.part,
                piece.place,
                len(blocks),
                share.layers,
                first + step >= count,
                checked,
            )
            self._bulk.send(_encode(record), self._views(moves, source=True), checked)

    def _views(self, moves: Sequence[Move], *, source: bool) -> list[memoryview]:
        """The runs of one end, in the order in which they travel."""
        views = []
        for move in moves:
            memory = self.transport.regions[move.source if source else move.destination].view
            assert memory is not None
            offsets = move.runs.source if source else move.runs.destination
            pairs = zip(offsets, move.runs.length, strict=True)
            views += [memory[at : at + length] for at, length in pairs]
        return views

    def _mark(self) -> object:
        return super()._mark(), 0 if self._bulk is None else self._bulk.sent

    def _on_applied(self, frame: _Applied) -> None:
        key = Key(frame.slot, frame.generation, frame.part)
        self._stopped_keys.discard(key)
        outgoing = self.outgoing.get(key)
        if outgoing is None:
            self.stats.refused += 1
            return
        error = None
        if frame.error:
            transfer, reason = outgoing.ticket.transfer, f"the peer says: {frame.error}"
            error = self._error(TransferWithdrawn, transfer, "deliver", reason)
        self.settle(key, error)

    # ------------------------------------------------------------------ the destination

    def grant(self, order: Order, sink: Sink) -> Granted:
        granted = super().grant(order, sink)
        ticket = granted.ticket
        with self._lock:
            self._open[ticket.slot, ticket.generation] = _OpenGrant(self._lock, granted)
        return granted

    def finish(self, granted: Granted) -> None:
        self._shut(granted)
        super().finish(granted)

    async def _fence(self, granted: Granted, timeout: Seconds) -> None:
        self._shut(granted)

    def _shut(self, granted: Granted) -> None:
        """No byte is placed for it any more. Waits for one system call at most."""
        with self._lock:
            shut = self._open.pop((granted.ticket.slot, granted.ticket.generation), None)
            if shut is not None:
                shut.open = False

    def _receiving(self, bulk: BulkSocket) -> None:
        """The thread that receives."""
        while True:
            record, size = bulk.receive()
            try:
                frame = _decode(record)
            except msgspec.MsgspecError as error:
                raise BulkError(f"a record that nobody can read: {error}") from error
            if isinstance(frame, _Data):
                self._place(bulk, frame, size)
            elif size:
                raise BulkError("payload where none belongs")
            elif isinstance(frame, _Dropped):
                self._conclude(frame, "the source has withdrawn it")
            else:
                self._tell(self._on_applied, frame)

    def _place(self, bulk: BulkSocket, frame: _Data, size: Bytes) -> None:
        with self._lock:
            grant = self._open.get((frame.slot, frame.generation))
        try:
            views = self._destination(grant, frame, size)
        except PlanError as error:
            if size:
                bulk.skip_payload(size)
            reason = str(error)
        else:
            good = not size or bulk.receive_payload(views, _guard_of(grant), frame.checked)
            reason = "" if good else "the checksum of the payload differs"
        if grant is None:
            if frame.last:
                self._applied(frame, reason)
            return
        if reason:
            grant.failed.setdefault(frame.part, reason)
        grant.sizes[frame.part] = grant.sizes.get(frame.part, 0) + size
        if frame.last:
            self._conclude(frame, grant.failed.pop(frame.part, ""), grant.sizes.pop(frame.part))

    def _destination(self, grant: _OpenGrant | None, frame: _Data, size: Bytes) -> list[memoryview]:
        """Where the payload belongs, by this node's own plan. Raises `PlanError`."""
        if grant is None:
            raise PlanError("the attempt is not current")
        ticket = grant.ticket
        if frame.attempt != ticket.attempt or frame.epoch != ticket.epoch:
            raise PlanError(f"attempt {frame.attempt} of epoch {frame.epoch} is not current")
        inside = 0 <= frame.place <= frame.place + frame.count <= len(ticket.blocks)
        if not inside or frame.count > MAX_BLOCKS or frame.count < 0:
            raise PlanError("a range beyond the ticket's blocks")
        # Only the order of the source's blocks matters here, not which they are.
        share = Share(frame.place, tuple(range(frame.count)), b"", frame.layers)
        if size != self.into.size(share):
            raise PlanError(f"{size} bytes for {frame.count} blocks")
        if not covers(self.verify, size, frame.checked):
            raise PlanError(f"a checksum of {frame.checked} where {self.verify} was agreed")
        return self._views(self.into.moves(share, ticket.blocks), source=False)

    def _conclude(self, frame: _Data | _Dropped, reason: str, size: Bytes = 0) -> None:
        """A part has ended: the loop decides what that means, and answers."""
        self._tell(self._ended_part, frame, reason, size)

    def _applied(self, frame: _Data | _Dropped, reason: str) -> None:
        """Tell the source; the sending thread does."""
        answer = _encode(_Applied(frame.slot, frame.generation, frame.part, reason[:500]))
        bulk = self._bulk
        assert bulk is not None
        self._queue.put(lambda: bulk.send(answer))

    def _ended_part(self, frame: _Data | _Dropped, reason: str, size: Bytes) -> None:
        granted = self.grants.find(self, frame.slot, frame.generation, exact=True)
        if granted is None or granted.state != "open" or self.down is not None:
            reason = reason or "the attempt is not current"
        elif reason:
            transfer = granted.ticket.transfer
            self.spoiled(granted, self._error(TransferCorrupt, transfer, "place", reason))
            self._shut(granted)
        else:
            self.arrived(frame.slot, frame.generation, frame.part, size)
        if reason:
            self.stats.refused += 1
        self._applied(frame, reason)

    # ------------------------------------------------------------------ the end

    async def _destroy(self) -> None:
        self.transport.forget_token(self.token)
        if self._bulk is None:
            return
        self._bulk.end()
        self._queue.put(None)
        await asyncio.wait(self._finished)
        for thread in self._threads:
            thread.join()  # has said that it is done
        self._bulk.close()
        self._open.clear()


def _guard_of(grant: _OpenGrant | None) -> Guard:
    assert grant is not None
    return grant


# ------------------------------------------------------------------------------ the transport


class TcpTransport(TransportCore):
    """A node that others can connect to."""

    name = "tcp"

    def __init__(
        self,
        node: NodeId,
        epoch: Epoch,
        regions: Sequence[Region],
        ask: Ask,
        *,
        host: str,
        advertise: str = "",
        progress: Seconds = PROGRESS,
        verify: Verify = "all",
        encrypted_links: bool = False,
    ) -> None:
        """Listens on `host`, an address of this machine, on a port of the system's choice;
        `advertise` is what peers dial instead. Every region must have a view. With
        `encrypted_links` every path is refused: bulk connections would carry KV in the clear."""
        if any(region.view is None for region in regions):
            raise ValueError("tcp needs regions with a view")
        super().__init__(node, epoch, regions, ask)
        self.progress = progress
        self.verify: Verify = verify
        self._encrypted_links = encrypted_links
        self._host = host
        self._advertise = advertise or host
        self._listening: socket.socket | None = None
        self._expected: dict[bytes, TcpPath] = {}
        self._strangers: set[asyncio.Task[None]] = set()

    async def _dial(self, peer: PeerKey, number: int, exchange: Exchange) -> TcpPath:
        self._check_plain(peer)
        welcome = await exchange(_encode(_Wish(self.verify)))
        details = msgspec.msgpack.decode(welcome.details, type=_Details)
        path = self._path(peer, number, welcome.regions)
        path.verify = stricter(self.verify, details.verify)
        path.remote = welcome.path
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(details.host, details.port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = found[0]
        connection = socket.socket(family, kind, protocol)
        try:
            _tune(connection)
            await loop.sock_connect(connection, address)
            await loop.sock_sendall(connection, details.token)
            if await _exactly(connection, _TOKEN) != _proof(details.token):
                raise PlanError("who answered does not know the secret")
        except BaseException:
            connection.close()
            raise
        path.attach(connection)
        return path

    async def _accept(self, peer: PeerKey, number: int, hello: Hello) -> tuple[TcpPath, bytes]:
        self._check_plain(peer)
        wish = _wish_of(hello)
        path = self._path(peer, number, hello.regions)
        path.verify = stricter(self.verify, wish.verify)
        port = self._listen()
        path.token = secrets.token_bytes(_TOKEN)
        self._expected[path.token] = path
        return path, _encode(_Details(self._advertise, port, path.token, path.verify))

    def _check_plain(self, peer: PeerKey) -> None:
        """KV is not sent in the clear where everything else is encrypted."""
        if self._encrypted_links:
            self._refuse(
                peer,
                "connect",
                "the cluster's links are encrypted (--tls-cert) and bulk connections are not: have "
                "the two workers on one host (shm, cuda_ipc) or on a fabric of their own (rdma), "
                "or run the cluster without TLS on a network that you trust",
            )

    def _path(self, peer: PeerKey, number: int, theirs: Sequence[RegionCard]) -> TcpPath:
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
        return path

    def forget_token(self, token: bytes) -> None:
        """Nobody may connect by it any more."""
        self._expected.pop(token, None)

    # ------------------------------------------------------------------ who connects

    def _listen(self) -> int:
        """The port."""
        if self._listening is None:
            family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
            listening = socket.socket(family, socket.SOCK_STREAM)
            try:
                listening.setblocking(False)
                listening.bind((self._host, 0))
                listening.listen(_STRANGERS)
            except BaseException:
                listening.close()
                raise
            asyncio.get_running_loop().add_reader(listening, self._on_connection)
            self._listening = listening
        port: int = self._listening.getsockname()[1]
        return port

    def _on_connection(self) -> None:
        assert self._listening is not None
        try:
            connection, _ = self._listening.accept()
        except OSError:
            return
        if len(self._strangers) >= _STRANGERS:
            connection.close()
            return
        task = asyncio.get_running_loop().create_task(self._welcome_stranger(connection))
        self._strangers.add(task)
        task.add_done_callback(self._strangers.discard)

    async def _welcome_stranger(self, connection: socket.socket) -> None:
        """Whose path is it? One that does not say in time is sent away."""
        path = None
        try:
            _tune(connection)
            async with asyncio.timeout(_GREETING):
                token = await _exactly(connection, _TOKEN)
                path = self._expected.pop(token, None)
                if path is not None:
                    await asyncio.get_running_loop().sock_sendall(connection, _proof(token))
        except (OSError, PlanError, TimeoutError) as error:
            _log.info("tcp: a connection that came to nothing: %s", error)
            path = None
        except BaseException:
            path = None
            raise
        finally:
            if path is None:
                connection.close()
        if path is not None and path.down is None:
            path.attach(connection)
        elif path is not None:
            connection.close()

    async def close(self) -> None:
        if self._listening is not None:
            asyncio.get_running_loop().remove_reader(self._listening)
            self._listening.close()
            self._listening = None
        for task in list(self._strangers):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        await super().close()


def _wish_of(hello: Hello) -> _Wish:
    try:
        return msgspec.msgpack.decode(hello.details, type=_Wish)
    except msgspec.MsgspecError as error:
        raise PlanError(f"a Hello that nobody can read: {error}") from error


def _tune(connection: socket.socket) -> None:
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


async def _exactly(connection: socket.socket, size: Bytes) -> bytes:
    """So many bytes. Raises `PlanError` when the connection ends before."""
    loop = asyncio.get_running_loop()
    found = b""
    while len(found) < size:
        piece = await loop.sock_recv(connection, size - len(found))
        if not piece:
            raise PlanError("the connection ended before it had shown its secret")
        found += piece
    return found


def _proof(token: bytes) -> bytes:
    """Shows that one knows the secret too, without showing it back."""
    return hashlib.blake2b(token, digest_size=_TOKEN, person=b"pdserve-tcp").digest()

"""The receiver places only what it has granted, whatever a peer sends, and waits for nobody for
ever."""

from __future__ import annotations

import asyncio
import socket
import threading
import zlib
from collections import Counter
from typing import TYPE_CHECKING

import msgspec
import pytest

from pdserve.errors import PathLost, TransferCorrupt, TransferError, TransferRefused
from pdserve.messages.transfer import PathHello, PathReady, PathWelcome
from pdserve.testing.kv_oracle import expected_block, layouts
from pdserve.testing.transfer_support import RecordingTransferSink, deliver, order, transfer_pair
from pdserve.transfer.base import KvPart, Region
from pdserve.transfer.path_probe import PROBE_BYTES
from pdserve.transfer.tcp import framing, transport
from pdserve.transfer.tcp.framing import BulkError, BulkSocket, Sent, WriteGuard
from pdserve.transfer.tcp.handshake import proof
from pdserve.transfer.tcp.transport import TcpTransport

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.ids import NodeLife
    from pdserve.transfer.base import CallPeer, KvTransport
    from pdserve.transfer.verify import Verify


def making(**settings):
    def make(key: NodeLife, regions: Sequence[Region], ask: CallPeer) -> KvTransport:
        return TcpTransport(key.node, key.epoch, regions, ask, host="127.0.0.1", **settings)

    return make


def world(**settings):
    return transfer_pair(making(**settings), layouts(2, 1), layouts(2, 1), blocks=8)


class Raw:
    """A peer that says what it likes, once it has come in by the rules."""

    def __init__(self, two) -> None:
        self.two = two

    async def __aenter__(self) -> Raw:
        destination, key = self.two.destination.transport, self.two.source.key
        cards = self.two.source.transport.cards
        wish = msgspec.msgpack.encode(transport._Proposal("off"))
        hello = PathHello(backend="tcp", epoch=key.epoch, path=1, regions=cards, details=wish)
        welcome = await destination.answer(key, hello)
        assert isinstance(welcome, PathWelcome)
        details = msgspec.msgpack.decode(welcome.details, type=transport._Details)
        self.loop = asyncio.get_running_loop()
        self.socket = socket.create_connection((details.host, details.port))
        self.socket.setblocking(False)
        (token,) = details.tokens
        await self.send(token)
        assert await self.loop.sock_recv(self.socket, 32) == proof(token)
        await destination.answer(key, PathReady(welcome.path))
        self.path = destination.path(key)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.socket.close()

    async def send(self, data: bytes) -> None:
        await self.loop.sock_sendall(self.socket, data)

    async def answer(self) -> transport._Applied:
        head = await self.exactly(framing._HEADER.size)
        record = await self.exactly(framing._HEADER.unpack(head)[1])
        answer = transport._decode(record)
        assert isinstance(answer, transport._Applied)
        return answer

    async def exactly(self, size: int) -> bytes:
        found = b""
        while len(found) < size:
            piece = await self.loop.sock_recv(self.socket, size - len(found))
            assert piece, "closed"
            found += piece
        return found

    async def closed(self) -> None:
        while await self.loop.sock_recv(self.socket, 1000):
            pass


def frame(record: object, payload: bytes = b"", *, flip: bool = False) -> bytes:
    packed = msgspec.msgpack.encode(record)
    head = framing._HEADER.pack(framing._MAGIC, len(packed), zlib.crc32(packed), len(payload))
    trailer = framing._TRAILER.pack(zlib.crc32(payload) ^ flip) if payload else b""
    return head + packed + payload + trailer


def data(ticket, **changes: object) -> transport._Data:
    record = transport._Data(
        ticket.slot,
        ticket.generation,
        ticket.attempt,
        ticket.epoch,
        0,
        0,
        1,
        (0, 3),
        True,
        (0, len(BLOCK)),
    )
    return msgspec.structs.replace(record, **changes)


BLOCK = expected_block(layouts(2, 1)[0], 7)


async def test_a_probe_comes_as_parts_do() -> None:
    async with world() as two:
        ours, theirs = await two.connect()
        assert await ours.probe(3 << 20) == 3 << 20
        with pytest.raises(TransferRefused, match="the peer made the path"):
            await theirs.probe(1)


async def test_a_peer_of_the_release_before_is_not_asked_for_probes(monkeypatch) -> None:
    class Before(msgspec.Struct, frozen=True, array_like=True):
        host: str
        port: int
        tokens: tuple[bytes, ...]
        verify: str
        certificate: bytes = b""

    async with world() as two:
        accepts = two.destination.transport._accept
        read = transport._Details

        async def accept(peer, number, hello):
            path, details = await accepts(peer, number, hello)
            whole = msgspec.msgpack.decode(details, type=read)
            # The release before reads what this one writes, and writes one field less.
            assert msgspec.msgpack.decode(details, type=Before).port == whole.port
            old = Before(*msgspec.structs.astuple(whole)[:-1])
            return path, msgspec.msgpack.encode(old)

        monkeypatch.setattr(two.destination.transport, "_accept", accept)
        ours, _ = await two.connect()
        with pytest.raises(TransferRefused, match="release has no probes"):
            await ours.probe(1)
        assert ours.down is None


async def test_a_peer_that_orders_too_many_probes_is_left() -> None:
    async with world() as two, Raw(two) as raw:
        for number in range(3):
            await raw.send(frame(transport._ProbeOrder(number, PROBE_BYTES // 2)))
        await raw.closed()
        assert "probes" in raw.path.down.message


async def test_a_probe_that_is_late_ends_no_other() -> None:
    async with world() as two, Raw(two) as raw:
        raw.path.probed = True
        first = asyncio.ensure_future(raw.path.probe(1))
        await asyncio.sleep(0)
        first.cancel()
        second = asyncio.ensure_future(raw.path.probe(1))
        await raw.send(frame(transport._Probe(1), b"x"))
        await raw.send(frame(transport._Probe(2), b"x"))
        assert await second == 1


async def test_a_frame_by_the_rules_is_placed() -> None:
    async with world() as two, Raw(two) as raw:
        sink = RecordingTransferSink()
        grant = raw.path.grant(order([3, 5], 8), sink)
        await raw.send(frame(data(grant.ticket, place=1), BLOCK))
        assert (await raw.answer()).error == ""
        assert sink.parts == [0]
        assert two.destination.holds({5: 7}, range(3))
        grant.finish()


@pytest.mark.parametrize(
    "changes",
    [
        {"attempt": 2},
        {"epoch": 1},
        {"generation": 99},
        {"slot": 7},
        {"place": 2},
        {"place": -1},
        {"count": 2},
        {"count": -1},
        {"layers": (0, 2)},
        {"checked": (0, 0)},
        {"checked": (1, 1 << 40)},
        {"checked": (-1, 1 << 20)},
    ],
)
async def test_a_frame_against_the_rules_is_read_and_not_placed(changes) -> None:
    async with world() as two, Raw(two) as raw:
        sink = RecordingTransferSink()
        grant = raw.path.grant(order([3, 5], 8), sink)
        await raw.send(frame(data(grant.ticket, **changes), BLOCK))
        assert (await raw.answer()).error
        assert sink.parts == []
        assert two.destination.holds({}, range(3))
        assert raw.path.down is None
        await grant.revoke(timeout=5)


async def test_a_wrong_checksum_fails_the_grant() -> None:
    async with world() as two, Raw(two) as raw:
        sink = RecordingTransferSink()
        grant = raw.path.grant(order([3], 4), sink)
        await raw.send(frame(data(grant.ticket), BLOCK, flip=True))
        assert "checksum" in (await raw.answer()).error
        assert isinstance(sink.failed[0], TransferCorrupt)
        assert "transfer r-1/0 with p/1 over tcp, place" in sink.failed[0].message
        assert sink.parts == []
        await grant.revoke(timeout=5)


@pytest.mark.parametrize("verify", ["off", "sample"])
async def test_what_was_not_agreed_to_be_checked_is_not(verify: Verify) -> None:
    some = {"off": (0, 0), "sample": (0, -(-len(BLOCK) // 16))}[verify]
    async with world(verify=verify) as two, Raw(two) as raw:
        sink = RecordingTransferSink()
        grant = raw.path.grant(order([3, 5], 8), sink)
        partly = zlib.crc32(BLOCK[: some[1]])
        for part, flip in enumerate((False, True)):
            record = data(grant.ticket, part=part, place=part, checked=some)
            await raw.send(frame(record, BLOCK)[:-4] + framing._TRAILER.pack(partly ^ flip))
            assert bool((await raw.answer()).error) == flip
        assert sink.parts == [0]
        await grant.revoke(timeout=5)


@pytest.mark.parametrize(
    ("ours", "theirs", "agreed"),
    [("off", "off", "off"), ("off", "sample", "sample"), ("all", "off", "all")],
)
async def test_the_stricter_of_two_ends_wins(ours: Verify, theirs: Verify, agreed: Verify) -> None:
    def make(key: NodeLife, regions: Sequence[Region], ask: CallPeer) -> KvTransport:
        return making(verify=ours if key.node == "p" else theirs)(key, regions, ask)

    async with transfer_pair(make, layouts(2, 1), layouts(2, 2), blocks=8) as two:
        here, there = await two.connect()
        assert (here.verify, there.verify) == (agreed, agreed)  # type: ignore[attr-defined]
        two.source.fill({1: 7, 2: 8})
        grant = there.grant(order([3, 5], 8), RecordingTransferSink())
        waiters = [deliver(here, grant.ticket, KvPart(0, 0, [1, 2], (0, 3)))]
        assert [await waiter.wait() for waiter in waiters] == [None]
        grant.finish()
        assert two.destination.holds({3: 7, 5: 8}, range(3))


@pytest.mark.parametrize(
    ("host", "advertise"),
    [("0.0.0.0", "127.0.0.2"), ("127.0.0.3", ""), ("::", "::1"), ("::1", ""), ("localhost", "")],
)
async def test_peers_dial_what_is_advertised(host: str, advertise: str, monkeypatch) -> None:
    if ":" in host and not _has_ipv6():
        pytest.skip("this machine has no IPv6")
    dialled = []
    connect = asyncio.get_running_loop().sock_connect

    async def note(connection, address):
        dialled.append(address[0])
        await connect(connection, address)

    def make(key: NodeLife, regions: Sequence[Region], ask: CallPeer) -> KvTransport:
        return TcpTransport(key.node, key.epoch, regions, ask, host=host, advertise=advertise)

    monkeypatch.setattr(asyncio.get_running_loop(), "sock_connect", note)
    async with transfer_pair(make, layouts(2, 1), layouts(2, 1), blocks=8) as two:
        here, there = await two.connect()
        two.source.fill({1: 7})
        grant = there.grant(order([3], 4), RecordingTransferSink())
        assert await deliver(here, grant.ticket, KvPart(0, 0, [1], (0, 3))).wait() is None
        grant.finish()
        wanted = advertise or host
        assert dialled == [wanted] or wanted == "localhost"


def _has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


async def test_a_hello_that_nobody_can_read_is_refused() -> None:
    async with world() as two:
        key = two.source.key
        cards = two.source.transport.cards
        hello = PathHello(backend="tcp", epoch=key.epoch, path=1, regions=cards, details=b"x")
        with pytest.raises(TransferRefused, match="cannot be decoded"):
            await two.destination.transport.answer(key, hello)


async def test_a_fence_holds_in_the_middle_of_a_frame() -> None:
    async with world() as two, Raw(two) as raw:
        sink = RecordingTransferSink()
        grant = raw.path.grant(order([3], 4), sink)
        whole = frame(data(grant.ticket), BLOCK)
        cut = len(whole) - len(BLOCK)
        await raw.send(whole[:cut])
        memory = two.destination.memories[0]
        while memory.view(3)[0] != BLOCK[0]:  # noqa: ASYNC110 - a thread writes it
            await asyncio.sleep(0.001)
        await grant.revoke(timeout=5)
        two.destination.poison([3])
        await raw.send(whole[cut:])
        assert (await raw.answer()).error
        assert two.destination.holds({}, range(3))
        assert not sink.parts
        assert not sink.failed
        other = raw.path.grant(order([3], 4), sink)  # the connection is still in step
        await raw.send(frame(data(other.ticket), BLOCK))
        assert (await raw.answer()).error == ""
        other.finish()


@pytest.mark.parametrize(
    "wrong",
    [
        b"x" * 100,
        frame(["no", "record"]),
        frame(transport._Applied(1, 2, 3), b"payload"),
        frame(transport._Applied(1, 2, 3))[:-1] + b"\xff",
        framing._HEADER.pack(framing._MAGIC, 1 << 30, 0, 0),
    ],
)
async def test_what_is_no_frame_ends_the_path(wrong: bytes) -> None:
    async with world() as two, Raw(two) as raw:
        sink = RecordingTransferSink()
        grant = raw.path.grant(order([3], 4), sink)
        await raw.send(wrong)
        await raw.closed()
        await sink.until(lambda s: bool(s.failed))
        assert isinstance(sink.failed[0], PathLost)
        await grant.revoke(timeout=5)
        assert grant.closed


async def test_a_peer_that_stops_in_a_frame_is_given_up() -> None:
    async with world(progress=0.05) as two, Raw(two) as raw:
        sink = RecordingTransferSink()
        grant = raw.path.grant(order([3], 4), sink)
        await raw.send(frame(data(grant.ticket), BLOCK)[:-10])
        await sink.until(lambda s: bool(s.failed))
        assert "no progress" in sink.failed[0].message
        await grant.revoke(timeout=5)


async def test_a_peer_that_never_answers_is_given_up() -> None:
    async with world(progress=0.05) as two, Raw(two) as raw:
        grant = raw.path.grant(order([3], 4), RecordingTransferSink())
        foreign = msgspec.structs.replace(grant.ticket, epoch=two.source.key.epoch)
        error = await deliver(raw.path, foreign, KvPart(0, 0, [1], (0, 3))).wait()
        assert isinstance(error, PathLost)
        assert "received nothing" in error.message


async def test_small_parts_change_no_threads(monkeypatch) -> None:
    class Refuses:
        def put(self, work: object) -> None:
            raise AssertionError(f"{work} goes to a thread")

    async with world() as two:
        ours, theirs = await two.connect()
        two.source.fill({1: 7})
        with monkeypatch.context() as patch:
            for path in (ours, theirs):
                patch.setattr(path, "_queue", Refuses())
                patch.setattr(path, "_large", Refuses())
            for number in range(3):
                sink = RecordingTransferSink()
                grant = theirs.grant(order([3], 4), sink)
                part = KvPart(number, 0, [1], (0, 3))
                assert await deliver(ours, grant.ticket, part).wait() is None
                assert sink.parts == [number]
                grant.finish()
        assert two.destination.holds({3: 7}, range(3))


@pytest.mark.parametrize("inline", [-1, 1 << 20])
async def test_parts_of_many_frames_arrive_both_ways_at_once(inline: int, monkeypatch) -> None:
    """Frames of one block, so that a part takes many; reading goes back and forth."""
    monkeypatch.setattr(transport, "_INLINE", inline)
    monkeypatch.setattr(transport, "_FRAME", 1)
    monkeypatch.setattr(transport, "_FRAMES", 2)
    one = layouts(1, 1)
    async with transfer_pair(making(), one, one, blocks=64) as two:
        ours, theirs = await two.connect()
        for node in (two.source, two.destination):
            node.fill({block: block for block in range(32)})
        waiters, sinks, grants = [], [], []
        for here, there in ((ours, theirs), (theirs, ours)):
            for first in range(32, 64, 8):
                sinks.append(RecordingTransferSink())
                grants.append(there.grant(order(range(first, first + 8), 32), sinks[-1]))
                part = KvPart(0, 0, range(first - 32, first - 24), (0, 3))
                waiters.append(deliver(here, grants[-1].ticket, part))
        assert [await waiter.wait() for waiter in waiters] == [None] * 8
        assert [sink.parts for sink in sinks] == [[0]] * 8
        for node in (two.source, two.destination):
            assert node.holds({block: block % 32 for block in range(64)}, range(3))
        for grant in grants:
            grant.finish()


@pytest.mark.parametrize("inline", [-1, 1 << 20])
async def test_a_stall_is_found_whoever_reads(inline: int, monkeypatch) -> None:
    """Bytes that come slowly are progress, bytes that do not come are none."""
    monkeypatch.setattr(transport, "_INLINE", inline)
    async with world(progress=0.2) as two, Raw(two) as raw:
        sink = RecordingTransferSink()
        grant = raw.path.grant(order([3], 4), sink)
        whole = frame(data(grant.ticket), BLOCK)
        for at in range(4):
            await raw.send(whole[at * 20 : at * 20 + 20])
            await asyncio.sleep(0.1)  # the deadline of a step counts from its last byte
        assert raw.path.down is None
        await sink.until(lambda s: bool(s.failed))
        assert "no progress for 0.2 s" in sink.failed[0].message
        await grant.revoke(timeout=5)


async def test_a_fast_peer_gets_no_growing_share_of_the_loop(monkeypatch) -> None:
    """However many frames are here: so many are read in one turn of the event loop."""
    monkeypatch.setattr(transport, "_FRAMES", 2)
    async with world() as two, Raw(two) as raw:
        turns: Counter[int] = Counter()
        turn, loop, ended = 0, asyncio.get_running_loop(), asyncio.Event()

        def next_turn() -> None:
            nonlocal turn
            turn += 1
            if turns.total() < 500:
                loop.call_soon(next_turn)
            else:
                ended.set()

        monkeypatch.setattr(raw.path, "_ended_part", lambda *_: turns.update([turn]))
        await raw.send(frame(transport._Dropped(1, 1, 1)) * 500)
        next_turn()
        await ended.wait()
        assert max(turns.values()) <= 2


async def test_strangers_are_sent_away() -> None:
    async with world() as two:
        await two.connect()
        transport = two.destination.transport
        assert isinstance(transport, TcpTransport)
        loop = asyncio.get_running_loop()
        for said in (b"", b"x" * 32, b"short"):
            with socket.create_connection(("127.0.0.1", transport._listen())) as stranger:
                stranger.setblocking(False)
                await loop.sock_sendall(stranger, said)
                if len(said) < 32:
                    stranger.shutdown(socket.SHUT_WR)
                assert await asyncio.wait_for(loop.sock_recv(stranger, 100), 10) == b""


async def test_a_listener_without_the_secret_gets_no_path(monkeypatch) -> None:
    async with world() as two:
        answers = iter([b"a" * 32, b"b" * 32])
        monkeypatch.setattr(transport, "proof", lambda token: next(answers))
        with pytest.raises(TransferError, match="secret"):
            await two.source.transport.connect(two.destination.key, timeout=5)


class Always(WriteGuard):
    """A grant that stays open."""

    def __init__(self) -> None:
        super().__init__(threading.Lock())

    def allowed(self) -> bool:
        return True


def test_runs_of_any_size_arrive() -> None:
    ours, theirs = socket.socketpair()
    sender, receiver = BulkSocket(ours, 5), BulkSocket(theirs, 5)

    sizes = [1, 3, 0, 2_500_000, 7, *([11] * 600), 1 << 20]
    payload = [bytes([n % 251]) * size for n, size in enumerate(sizes)]
    thread = threading.Thread(
        target=sender.send, args=(b"record", [memoryview(piece) for piece in payload])
    )
    thread.start()
    try:
        record, size = receiver.wait(receiver.receive())
        assert (record, size) == (b"record", sum(sizes))
        places = [bytearray(size) for size in sizes]
        views = [memoryview(place) for place in places]
        assert receiver.wait(receiver.receive_payload([views], Always(), (0, size)))
        assert [bytes(place) for place in places] == payload
        sender.end()
        with pytest.raises(BulkError):
            receiver.wait(receiver.receive())
    finally:
        thread.join()
        sender.close()
        receiver.close()


def test_a_frame_that_does_not_wait_leaves_its_rest_to_flush() -> None:
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    sender, receiver = BulkSocket(ours, 5), BulkSocket(theirs, 5)
    payload = bytes(range(256)) * 4096
    try:
        assert sender.send_now(b"small") is Sent.ALL
        assert sender.send_now(b"large", [memoryview(payload)]) is Sent.REST
        assert sender.send_now(b"later") is Sent.NOTHING
        assert sender.send_now(b"many", [memoryview(b"x")] * 1000) is Sent.NOTHING
        thread = threading.Thread(target=sender.flush)
        thread.start()
        found = bytearray(len(payload))
        assert receiver.wait(receiver.receive()) == (b"small", 0)
        assert receiver.wait(receiver.receive()) == (b"large", len(payload))
        assert receiver.wait(
            receiver.receive_payload([[memoryview(found)]], Always(), (0, len(found)))
        )
        assert found == payload
        thread.join()
        assert sender.send_now(b"later") is Sent.ALL
        assert receiver.wait(receiver.receive()) == (b"later", 0)
        with sender._writing:
            assert sender.send_now(b"now") is Sent.NOTHING
        receiver.close()
        with pytest.raises(BulkError):
            sender.send_now(b"nobody")
    finally:
        sender.end()
        sender.close()
        receiver.close()


def test_a_closed_socket_holds_no_memory_of_what_was_not_sent() -> None:
    ours, theirs = socket.socketpair()
    sender, payload = BulkSocket(ours, 5), bytearray(4 << 20)
    assert sender.send_now(b"large", [memoryview(payload)]) is Sent.REST
    sender.end()
    sender.close()
    theirs.close()
    payload.clear()  # fails while somebody holds it


# ---------------------------------------------------------------------- strangers


async def test_silent_strangers_shut_nobody_out(monkeypatch) -> None:
    """The oldest of them goes, and the next one may still show its secret."""
    monkeypatch.setattr(transport, "_STRANGERS", 4)
    async with world() as two:
        destination = two.destination.transport
        port = destination._listen()
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(6)]
        async with Raw(two) as raw:
            assert raw.path is not None
        for reader, _ in silent[:2]:
            assert await reader.read() == b""
        assert destination._accepting.evicted >= 2
        for _, writer in silent:
            writer.close()

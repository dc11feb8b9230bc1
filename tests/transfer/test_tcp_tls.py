"""Where links are encrypted, so is the KV, and only the peer can be at the other end."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
from typing import TYPE_CHECKING

import pytest

from pdserve.errors import PathLost, TransferError, TransferRefused
from pdserve.testing.kv_oracle import expected_block, layouts
from pdserve.testing.transfer_support import RecordingTransferSink, deliver, order, transfer_pair
from pdserve.transfer.base import KvPart, Region
from pdserve.transfer.tcp.framing import BulkError, WriteGuard
from pdserve.transfer.tcp.tls_socket import TlsSocket, wrap_tls
from pdserve.transfer.tcp.transport import TcpTransport
from tests.net.certificates import tls_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence

    from pdserve.ids import NodeLife
    from pdserve.net.transport.tls import Tls
    from pdserve.transfer.base import CallPeer, KvTransport

P, D = tls_of("p"), tls_of("d")


class Tap:
    """Lies in between: sees, and may change, all that the dialling side sends."""

    def __init__(self, port: int, flip: int = -1) -> None:
        """`flip`: the byte to change, of what the dialling side says on a connection."""
        self.seen = bytearray()
        self._port, self._flip = port, flip
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        self._open: list[socket.socket] = [self._listening]
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listening.accept()
                far = socket.create_connection(("127.0.0.1", self._port))
                self._open += [near, far]
                for ours, theirs, keep in ((near, far, True), (far, near, False)):
                    thread = threading.Thread(target=self._pass, args=(ours, theirs, keep))
                    self._threads.append(thread)
                    thread.start()

    def _pass(self, ours: socket.socket, theirs: socket.socket, keep: bool) -> None:
        count = 0
        with contextlib.suppress(OSError):
            while piece := bytearray(ours.recv(65536)):
                if keep and count <= self._flip < count + len(piece):
                    piece[self._flip - count] ^= 1
                count += len(piece)
                if keep:
                    self.seen += piece
                theirs.sendall(piece)
        with contextlib.suppress(OSError):
            theirs.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for one in self._open:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for one in self._open:
            one.close()


@contextlib.asynccontextmanager
async def world(p: Tls | None, d: Tls | None) -> AsyncIterator:
    def make(key: NodeLife, regions: Sequence[Region], ask: CallPeer) -> KvTransport:
        tls = p if key.node == "p" else d
        return TcpTransport(key.node, key.epoch, regions, ask, host="127.0.0.1", tls=tls)

    async with transfer_pair(make, layouts(2, 1), layouts(2, 2), blocks=8) as two:
        yield two


@contextlib.asynccontextmanager
async def tapped(p: Tls | None, d: Tls | None, flip: int = -1) -> AsyncIterator:
    """The same, with somebody in between."""
    async with world(p, d) as two:
        destination = two.destination.transport
        tap = Tap(destination._listen(), flip)
        destination._listen = lambda: tap.port
        try:
            yield two, tap
        finally:
            await two.source.transport.close()
            await two.destination.transport.close()
            tap.close()


async def move(two) -> tuple[RecordingTransferSink, TransferError | None]:
    """Both blocks, both ways would be alike."""
    ours, theirs = await two.connect()
    two.source.fill({1: 7, 2: 8})
    sink = RecordingTransferSink()
    grant = theirs.grant(order([3, 5], 8), sink)
    error = await deliver(ours, grant.ticket, KvPart(0, 0, [1, 2], (0, 3))).wait()
    await grant.revoke(timeout=5)
    return sink, error


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "tls"])
async def test_who_listens_in_sees_no_kv_under_tls(encrypted: bool) -> None:
    async with tapped(P if encrypted else None, D if encrypted else None) as (two, tap):
        sink, error = await move(two)
        assert (sink.parts, error) == ([0], None)
        assert two.destination.holds({3: 7, 5: 8}, range(3))
        run = expected_block(layouts(2, 1)[0], 7)[:16]
        assert (bytes(run) in tap.seen) is not encrypted


async def test_what_is_changed_on_the_way_ends_the_path_and_is_not_believed() -> None:
    async with tapped(P, D) as (two, tap):
        ours, theirs = await two.connect()
        tap._flip = len(tap.seen) + 200  # not before: greetings are over
        two.source.fill({1: 7})
        sink = RecordingTransferSink()
        grant = theirs.grant(order([3], 4), sink)
        for number in range(8):
            deliver(ours, grant.ticket, KvPart(number, 0, [1], (0, 3)))
        await sink.until(lambda s: bool(s.failed))
        assert isinstance(sink.failed[0], PathLost)
        await grant.revoke(timeout=5)


async def test_another_certificate_than_the_links_is_refused() -> None:
    """Somebody in between with a certificate of the same authority, who passes the secret on."""
    async with world(P, D) as two:
        two.destination.transport._tls = tls_of("mallory")
        true = two.destination.transport._tls.fingerprint
        assert true != D.fingerprint
        object.__setattr__(two.destination.transport._tls, "fingerprint", D.fingerprint)
        try:
            with pytest.raises(TransferError, match="is not the peer's"):
                await two.connect()
        finally:
            object.__setattr__(two.destination.transport._tls, "fingerprint", true)
        assert two.destination.transport.path(two.source.key) is None


async def test_a_foreign_authority_is_refused() -> None:
    async with world(P, tls_of("d", "other-ca", trusts="other-ca")) as two:
        with pytest.raises(TransferError, match=r"(?i)certificate"):
            await two.connect()


@pytest.mark.parametrize(("p", "d"), [(P, None), (None, D)], ids=["p", "d"])
async def test_one_end_alone_cannot_encrypt(p: Tls | None, d: Tls | None) -> None:
    async with world(p, d) as two:
        with pytest.raises(TransferRefused, match=r"encrypts .*--tls-cert.* all nodes"):
            await two.connect()
        assert two.destination.transport.path(two.source.key) is None


async def test_who_begins_no_tls_is_sent_away() -> None:
    async with world(P, D) as two:
        await two.connect()
        loop = asyncio.get_running_loop()
        with socket.create_connection(
            ("127.0.0.1", two.destination.transport._listen())
        ) as stranger:
            stranger.setblocking(False)
            await loop.sock_sendall(stranger, b"x" * 100)
            with contextlib.suppress(ConnectionResetError):
                async with asyncio.timeout(20):
                    while await loop.sock_recv(stranger, 100):
                        pass


async def test_a_half_joined_path_leaves_nothing_open() -> None:
    """The dialling side gets its first connection, and never asks for the second."""
    async with world(P, D) as two:
        source, destination = two.source.transport, two.destination.transport
        reach, calls = source._reach, []

        async def once(details, token):
            calls.append(token)
            if len(calls) > 1:
                raise OSError("no route to host")
            return await reach(details, token)

        source._reach = once
        with pytest.raises(TransferError, match="no route"):
            await two.connect()
        (path,) = destination._paths.values()
        await path.close("the test")
        assert not path._joined
        assert not destination._expected


class Always(WriteGuard):
    """Whatever comes is placed."""

    def allowed(self) -> bool:
        return True


@contextlib.contextmanager
def sealed() -> Iterator[tuple[TlsSocket, TlsSocket]]:
    """Two ends whose handshake is over."""
    ours, theirs = socket.socketpair()
    near, far = wrap_tls(ours, P, listening=False), wrap_tls(theirs, D, listening=True)
    near.setblocking(True)
    far.setblocking(True)
    thread = threading.Thread(target=far.do_handshake)
    thread.start()
    near.do_handshake()
    thread.join()
    sender, receiver = TlsSocket(near, 20), TlsSocket(far, 20)
    try:
        yield sender, receiver
    finally:
        sender.close()
        receiver.close()


def test_runs_of_any_size_arrive_sealed() -> None:
    sizes = [1, 3, 0, 2_500_000, 7, *([11] * 3000), 16384, 16385, 1 << 20]
    payload = [bytes([n % 251]) * size for n, size in enumerate(sizes)]
    with sealed() as (sender, receiver):
        thread = threading.Thread(
            target=sender.send, args=(b"record", [memoryview(piece) for piece in payload])
        )
        thread.start()
        try:
            record, size = receiver.wait(receiver.receive())
            assert (record, size) == (b"record", sum(sizes))
            places = [bytearray(size) for size in sizes]
            views = [memoryview(place) for place in places]
            assert receiver.wait(
                receiver.receive_payload([views], Always(threading.Lock()), (0, size))
            )
            assert [bytes(place) for place in places] == payload
        finally:
            thread.join()


def test_keys_are_not_used_for_ever(monkeypatch) -> None:
    with sealed() as (sender, _):
        sender.send(b"record", [memoryview(bytes(1000))])
        monkeypatch.setattr("pdserve.transfer.tcp.tls_socket.MAX_SESSION_BYTES", 1000)
        with pytest.raises(BulkError, match="byte limit"):
            sender.send(b"record")


def test_the_end_lets_no_ciphertext_through() -> None:
    """Bytes that came before the end are no plain text: nobody may take them for it."""
    with sealed() as (sender, receiver):
        sender.send(b"record", [memoryview(bytes(50_000))])
        receiver.end()
        with pytest.raises(BulkError):
            receiver.wait(receiver.receive())
        assert isinstance(receiver._socket, ssl.SSLSocket)
        assert receiver._socket.version() == "TLSv1.3"

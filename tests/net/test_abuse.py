"""Strangers and broken peers over real sockets: nobody gets in, memory stays flat, others go on."""

from __future__ import annotations

import asyncio
import gc
import logging
import resource
import socket
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from pdserve.ids import NodeId
from pdserve.net.connection_driver import ConnectionDriver
from pdserve.net.link import PeerLink
from pdserve.net.link_stream import LinkStream
from pdserve.net.settings import NetSettings
from pdserve.net.transport.tcp import TcpNetwork
from pdserve.wire.codec import encode
from pdserve.wire.handshake import DialerHandshake, Identity, Versions
from pdserve.wire.header import HEADER, HEADER_BYTES, FrameKind
from pdserve.wire.limits import Limits
from pdserve.wire.protocol import Connection, ConnectionState
from tests.net.certificates import tls_of
from tests.support.net_support import ECHO, HANG, KEY, Echo, RecordingHandler, node
from tests.wire.test_codec import BOMBS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from pdserve.net.transport.tls import Tls

SETTINGS = NetSettings(handshake_timeout=2.0)
PATIENT = NetSettings(handshake_timeout=3600.0)
STRANGERS = 1000
PATIENCE = 30.0
"""Seconds after which a test has failed; a machine may be slow, so none measures anything less."""


class Server:
    """A node under attack, and an honest peer that goes on working."""

    def __init__(self, tls: Tls | None = None, settings: NetSettings = SETTINGS) -> None:
        self.handler = RecordingHandler()
        self.b = node("b", TcpNetwork(settings, tls), self.handler, settings=settings)
        self.a = node("a", TcpNetwork(settings, tls), RecordingHandler(), settings=settings)
        self.address = ""
        self.guests = {"a"}
        """Who has the key, and may be there."""

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    async def undisturbed(self) -> None:
        """Ask something."""
        link = await self.a.dial(self.address, expect=NodeId("b"))
        assert (await link.request(ECHO, Echo(b"x"), timeout=PATIENCE)).payload == b"x"

    def nobody_got_in(self) -> None:
        assert set(self.b.links) <= self.guests
        assert {link.peer.node for link in self.handler.ups} <= self.guests
        assert not self.handler.tells
        assert not self.handler.calls


@asynccontextmanager
async def server(tls: Tls | None = None, settings: NetSettings = SETTINGS) -> AsyncIterator[Server]:
    under_attack = Server(tls, settings)
    under_attack.address = await under_attack.b.listen("127.0.0.1:0")
    try:
        await under_attack.undisturbed()
        yield under_attack
        await under_attack.undisturbed()
        under_attack.nobody_got_in()
    finally:
        await under_attack.a.close()
        await under_attack.b.close()


async def say(port: int, *words: bytes) -> bytes:
    """Send, and read until the other side hangs up."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for word in words:
            writer.write(word)
            await asyncio.sleep(0.01)
        async with asyncio.timeout(PATIENCE):
            return await reader.read()
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


def frame(kind: int, body: bytes) -> bytes:
    return HEADER.pack(len(body), kind, 0, 0, 0, 0) + body


def resident() -> int:
    """Bytes of memory this process occupies."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


@pytest.fixture
def many_files():
    """Room for a thousand sockets at both ends."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 3 * STRANGERS:
        pytest.skip(f"only {hard} open files are allowed here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 3 * STRANGERS), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# ---------------------------------------------------------------------- without the key


@pytest.mark.parametrize("kind", sorted(set(FrameKind) - {FrameKind.HELLO}))
async def test_without_a_handshake_no_frame_has_any_effect(kind) -> None:
    async with server() as s:
        answer = await say(s.port, HEADER.pack(1, kind, 0, 1, 1, 60_000) + b"\x90")
        assert answer[4] == FrameKind.REFUSE
        assert len(answer) < 120


async def test_a_recorded_handshake_gets_nobody_in() -> None:
    """Everything an honest dialler sent, heard on the way, and sent again."""
    heard: list[bytes] = []

    async def listen_in(reader, writer) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", s.port)
        try:
            while data := await reader.read(65536):
                heard.append(data)
                back.write(data)
                writer.write(await there.read(65536))
        finally:
            for one in (back, writer):
                one.close()

    async with server() as s:
        relay = await asyncio.start_server(listen_in, "127.0.0.1", 0)
        victim = node("a", TcpNetwork(SETTINGS), RecordingHandler(), settings=SETTINGS)
        await victim.dial(f"127.0.0.1:{relay.sockets[0].getsockname()[1]}")
        assert len(heard) >= 2
        answer = await say(s.port, *heard[:2])
        kinds = []
        while answer:
            kinds.append(answer[4])
            answer = answer[HEADER_BYTES + HEADER.unpack_from(answer)[0] :]
        assert kinds == [FrameKind.CHALLENGE, FrameKind.REFUSE]
        assert s.b.refused["WrongClusterKey"] == 1
        await victim.close()
        relay.close()
        await relay.wait_closed()


@pytest.mark.parametrize(
    "words",
    [
        b"\xff" * 16,
        HEADER.pack(0xFFFF_FFFF, FrameKind.HELLO, 0, 0, 0, 0),
        HEADER.pack(1025, FrameKind.HELLO, 0, 0, 0, 0),
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\x00" + bytes(600),
        bytes(1 << 16),
        *(frame(FrameKind.HELLO, bomb[:1024]) for bomb in BOMBS.values()),
        *(frame(FrameKind.HELLO, b"\x91" * size) for size in (10, 1024)),
    ],
)
async def test_nonsense_is_turned_away_at_once_and_tersely(words) -> None:
    async with server(settings=PATIENT) as s:  # no deadline will end what the words do not
        answer = await say(s.port, words)
        assert len(answer) < 120


async def test_a_stranger_that_trickles_is_cut_off_at_the_deadline() -> None:
    async with server() as s:
        loop = asyncio.get_running_loop()
        started = loop.time()
        _, writer = await asyncio.open_connection("127.0.0.1", s.port)
        hello = frame(FrameKind.HELLO, encode(["pdserve", 1, 1, 0, bytes(32)]))
        sent = 0
        try:
            for byte in hello:  # at this pace it would be complete long after the deadline
                writer.write(bytes([byte]))
                sent += 1
                await asyncio.sleep(0.1)
                if sent > 1 and s.b.unauthenticated == 0:
                    break
        except ConnectionError:
            pass
        assert loop.time() - started >= SETTINGS.handshake_timeout, "not before its deadline"
        assert sent < len(hello), "not after it"
        await eventually(lambda: s.b.connections == 1)
        writer.close()


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "tls"])
async def test_a_thousand_idle_strangers_change_nothing(many_files, encrypted) -> None:
    async with server(tls_of("b") if encrypted else None) as s:
        strangers: list[socket.socket] = []
        gc.collect()
        before = resident()
        try:
            for number in range(STRANGERS):
                stranger = socket.socket()
                stranger.setblocking(False)
                stranger.connect_ex(("127.0.0.1", s.port))
                strangers.append(stranger)
                if number % 50 == 49:
                    await s.undisturbed()
                    assert s.b.unauthenticated <= SETTINGS.pending_handshakes
            await eventually(lambda: s.b.connections <= SETTINGS.pending_handshakes + 2)
            s.guests.add("c")
            newcomer = node("c", s.a._network, RecordingHandler(), settings=SETTINGS)
            link = await newcomer.dial(s.address)
            assert (await link.request(ECHO, Echo(b"new"), timeout=PATIENCE)).payload == b"new"
            await newcomer.close()
            assert resident() - before < 64 << 20
            await eventually(lambda: s.b.unauthenticated == 0 and s.b.connections == 1)
        finally:
            for stranger in strangers:
                stranger.close()


async def test_strangers_that_come_and_go_leave_nothing() -> None:
    async with server() as s:
        hello = frame(FrameKind.HELLO, encode(["pdserve", 1, 1, 0, bytes(32)]))
        for _ in range(10):
            await asyncio.gather(*(_visit(s.port, hello) for _ in range(30)))
        gc.collect()
        before = resident()
        for _ in range(20):
            await asyncio.gather(*(_visit(s.port, hello) for _ in range(30)))
        await eventually(lambda: s.b.connections == 1)
        gc.collect()
        assert resident() - before < 8 << 20


def alive(*kinds: type) -> set[int]:
    """What is still held of these kinds."""
    gc.collect()
    return {id(each) for each in gc.get_objects() if type(each) in kinds}


async def test_of_peers_that_broke_the_rules_nothing_is_left(caplog) -> None:
    """Neither of strangers that talk nonsense nor of authenticated ones."""
    caplog.set_level(logging.CRITICAL, "pdserve")  # records are kept to be shown, links in them
    async with server() as s:
        s.guests.add("rogue")
        before = alive(Connection, ConnectionDriver, PeerLink, LinkStream)
        for words in (b"\xff" * 16, frame(FrameKind.HELLO, b"\x91"), frame(FrameKind.PING, b"")):
            await say(s.port, words)
        for words in (HEADER.pack(0, 99, 0, 0, 0, 0), HEADER.pack(0, FrameKind.DATA, 0, 0, 77, 0)):
            rogue = await Rogue.connect(s.address)
            rogue.writer.write(HEADER.pack(0, FrameKind.OPEN, 0, 1, 1, 1000) + words)
            await rogue.ended()
            del rogue
        await eventually(lambda: s.b.connections == 1)
        s.handler.ups.clear()
        s.handler.downs.clear()
        s.handler.streams.clear()
        # Timers that were meant for them end within `close_timeout`.
        await eventually(
            lambda: not alive(Connection, ConnectionDriver, PeerLink, LinkStream) - before
        )


async def eventually(met: Callable[[], bool]) -> None:
    """Wait for something that nothing announces."""
    async with asyncio.timeout(PATIENCE):
        while not met():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def _visit(port: int, words: bytes) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(words)
    await asyncio.sleep(0.005)
    writer.close()


# ---------------------------------------------------------------------- with the key, but broken


class Rogue:
    """An authenticated peer that sends what it likes."""

    def __init__(self, reader, writer) -> None:
        self.reader, self.writer = reader, writer

    @staticmethod
    async def connect(address: str) -> Rogue:
        claim = Identity("test", NodeId("rogue"), 1).claim()
        connection = Connection(
            DialerHandshake(claim, (KEY,), b"n" * 32, versions=Versions()), Limits()
        )
        reader, writer = await asyncio.open_connection("127.0.0.1", address.rpartition(":")[2])
        while connection.state is not ConnectionState.OPEN:
            writer.writelines(connection.data_to_send())
            connection.receive_data(await reader.read(65536))
        return Rogue(reader, writer)

    async def until(self, kind: FrameKind) -> None:
        """Read frames up to the first of a kind."""
        async with asyncio.timeout(PATIENCE):
            while True:
                length, found, *_ = HEADER.unpack(await self.reader.readexactly(HEADER_BYTES))
                await self.reader.readexactly(length)
                if found == kind:
                    return

    async def ended(self) -> bytes:
        """Read until the node hangs up."""
        async with asyncio.timeout(PATIENCE):
            try:
                return await self.reader.read()
            except ConnectionResetError:
                return b""
            finally:
                self.writer.close()


@pytest.mark.parametrize(
    "words",
    [
        HEADER.pack(0xFFFF_FFFF, FrameKind.TELL, 0, 0, 0, 0),
        HEADER.pack(Limits().body + 1, FrameKind.REQUEST, 0, 1, 1, 1000),
        HEADER.pack(0, FrameKind.RESPONSE, 0, 0, 77, 0),
        HEADER.pack(0, FrameKind.DATA, 0, 0, 77, 0),
        HEADER.pack(0, 99, 0, 0, 0, 0),
        frame(FrameKind.GOAWAY, b"\x91" * 4000),
    ],
)
async def test_an_authenticated_peer_that_breaks_the_rules_loses_its_link(words) -> None:
    async with server() as s:
        s.guests.add("rogue")
        rogue = await Rogue.connect(s.address)
        rogue.writer.write(words)
        assert FrameKind.GOAWAY in (await rogue.ended())[4:5]
        await s.handler.until(lambda handler: bool(handler.downs))
        assert s.handler.downs[0][1].cause == "violation"


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS.keys())
async def test_bombs_of_an_authenticated_peer_fail_their_request_quickly(bomb) -> None:
    async with server() as s:
        s.guests.add("rogue")
        rogue = await Rogue.connect(s.address)
        request = HEADER.pack(len(bomb), FrameKind.REQUEST, 0, ECHO.id, 1, 5000) + bomb
        rogue.writer.write(request)
        await s.undisturbed()
        answer = await rogue.reader.readexactly(HEADER_BYTES)
        assert answer[4] == FrameKind.ERROR
        rogue.writer.close()
        await s.handler.until(lambda handler: bool(handler.downs))


async def test_a_flood_of_requests_is_answered_or_refused_within_bounds() -> None:
    settings = NetSettings(limits=Limits(incoming=100, streams=100, unsent_hard=1 << 20))
    handler = RecordingHandler()
    flooded = node("b", TcpNetwork(settings), handler, settings=settings)
    rogue = await Rogue.connect(await flooded.listen("127.0.0.1:0"))
    for number in range(1, 5000):
        rogue.writer.write(
            HEADER.pack(2, FrameKind.REQUEST, 0, HANG.id, number, 60_000) + b"\x91\xc4"
        )
    rogue.writer.write(HEADER.pack(0, FrameKind.PING, 0, 0, 0, 1))
    await rogue.until(FrameKind.PONG)  # all before it has been looked at
    assert len(handler.calls) == 100
    assert sum(link.stats().serving for link in flooded.links.values()) <= 100
    rogue.writer.close()
    await handler.until(lambda handler: bool(handler.downs))
    assert handler.cancelled == 100
    await flooded.close()


async def test_a_peer_that_asks_and_never_reads_is_cut_off() -> None:
    settings = NetSettings(limits=Limits(unsent=1 << 20, unsent_hard=4 << 20))
    handler = RecordingHandler()
    b = node("b", TcpNetwork(settings), handler, settings=settings)
    rogue = await Rogue.connect(await b.listen("127.0.0.1:0"))
    body = encode(Echo(bytes(100_000)))
    for number in range(1, 200):
        head = HEADER.pack(len(body), FrameKind.REQUEST, 0, ECHO.id, number, 60_000)
        rogue.writer.writelines((head, body))
        await asyncio.sleep(0)
    await handler.until(lambda handler: bool(handler.downs))
    assert "unread" in handler.downs[0][1].message
    rogue.writer.transport.abort()
    await b.close()

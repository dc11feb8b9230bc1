"""Tests that a network keeps to its interface: two suites to inherit.

    class TestBytes(ByteConformance):        # a `ByteNetwork` alone
    class TestLinks(LinkConformance):        # nodes over it

        def network(self, host: str) -> ByteNetwork: ...
        def address(self, host: str) -> str: ...

Tests are coroutines without arguments, so that they also run outside pytest, on any event loop:
`asyncio.run(TestLinks().test_...())`.
"""

from __future__ import annotations

import asyncio
import random
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import pytest

from pdserve.errors import (
    Cancelled,
    DeadlineExceeded,
    DialFailed,
    DialRefused,
    InvalidRequest,
    LinkLost,
    NoWorker,
    Overloaded,
    OwnAddress,
    PayloadTooLarge,
    PdserveError,
    ProtocolError,
    WrongClusterKey,
    WrongPeer,
)
from pdserve.ids import NodeId
from pdserve.net.settings import NetSettings
from pdserve.wire.codec import encode
from pdserve.wire.limits import Limits
from tests.support.net_support import (
    ECHO,
    HANG,
    REFUSE,
    Echo,
    RecordingHandler,
    RecordingStreamSink,
    node,
    send_item,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from pdserve.ids import Seconds
    from pdserve.net.base import ByteNetwork, IncomingStream, ItemStream
    from pdserve.net.endpoint import Endpoint
    from pdserve.net.link import PeerLink

__all__ = ["ByteConformance", "LinkConformance"]

PATIENCE: Seconds = 20.0
"""Seconds after which a waiting test has failed; generous, because machines are shared."""


class _Place:
    """Where a suite runs."""

    def network(self, host: str) -> ByteNetwork:
        """The network as seen from `host`, which is `a` or `b`; the same world each time."""
        raise NotImplementedError

    def address(self, host: str) -> str:
        """The address on which `host` listens; port 0 for any."""
        raise NotImplementedError


# ---------------------------------------------------------------------- bytes


class _Wire(asyncio.Protocol):
    """Collects what it is told."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.eofs = 0
        self.lost: list[BaseException | None] = []
        self.made = 0
        self.pauses = 0
        self.paused = False
        self.keep_open = False
        self._changed = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.made += 1
        self._changed.set()

    def data_received(self, data: bytes) -> None:
        self.data += data
        self._changed.set()

    def eof_received(self) -> bool:
        self.eofs += 1
        self._changed.set()
        return self.keep_open

    def connection_lost(self, exc: BaseException | None) -> None:
        self.lost.append(exc)
        self._changed.set()

    def pause_writing(self) -> None:
        self.pauses += 1
        self.paused = True

    def resume_writing(self) -> None:
        self.paused = False
        self._changed.set()

    async def until(self, met: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE):
            while not met():
                self._changed.clear()
                await self._changed.wait()


class ByteConformance(_Place):
    """Tests of a `ByteNetwork` alone."""

    @asynccontextmanager
    async def wires(self) -> AsyncIterator[tuple[_Wire, _Wire]]:
        """Both ends of one connection that `a` dialled to `b`."""
        accepted: asyncio.Queue[_Wire] = asyncio.Queue(1)

        def accept() -> _Wire:
            wire = _Wire()
            accepted.put_nowait(wire)
            return wire

        listener = await self.network("b").listen(self.address("b"), accept)
        ours = _Wire()
        try:
            await self.network("a").connect(listener.address, lambda: ours, timeout=PATIENCE)
            theirs = await accepted.get()
            await theirs.until(lambda: theirs.made == 1)
            yield ours, theirs
            for wire in (ours, theirs):
                wire.transport.abort()
            for wire in (ours, theirs):
                await wire.until(lambda wire=wire: bool(wire.lost))  # type: ignore[misc]
                assert len(wire.lost) == 1
        finally:
            await listener.close()

    async def test_bytes_arrive_complete_and_in_order(self) -> None:
        numbers = random.Random(1)
        sent = numbers.randbytes(1 << 20)
        async with self.wires() as (ours, theirs):
            position = 0
            while position < len(sent):
                size = numbers.choice((1, 7, 1000, 65536, 200_000))
                ours.transport.writelines((sent[position : position + size], b""))
                position += size
            await theirs.until(lambda: len(theirs.data) >= len(sent))
            assert theirs.data == sent

    async def test_a_half_closed_connection_still_answers(self) -> None:
        async with self.wires() as (ours, theirs):
            theirs.keep_open = True
            ours.transport.write(b"question")
            ours.transport.write_eof()
            await theirs.until(lambda: theirs.eofs == 1)
            assert theirs.data == b"question"
            theirs.transport.write(b"answer")
            theirs.transport.close()
            await ours.until(lambda: ours.eofs == 1)
            assert ours.data == b"answer"

    async def test_close_sends_what_was_written(self) -> None:
        sent = random.Random(2).randbytes(3 << 20)
        async with self.wires() as (ours, theirs):
            ours.transport.write(sent)
            ours.transport.close()
            await theirs.until(lambda: theirs.eofs == 1)
            assert theirs.data == sent
            await ours.until(lambda: bool(ours.lost))
            assert ours.lost == [None]

    async def test_abort_ends_both_sides(self) -> None:
        async with self.wires() as (ours, theirs):
            ours.transport.abort()
            await theirs.until(lambda: bool(theirs.lost))
            await ours.until(lambda: bool(ours.lost))

    async def test_a_reader_that_stops_stops_the_writer(self) -> None:
        size = 16 << 20
        async with self.wires() as (ours, theirs):
            ours.transport.set_write_buffer_limits(high=1 << 16, low=1 << 12)
            theirs.transport.pause_reading()
            ours.transport.write(memoryview(bytearray(size)))
            assert ours.paused
            assert ours.transport.get_write_buffer_size() > 1 << 16
            for _ in range(10):
                await asyncio.sleep(0.001)
            # At most what was read before the pause took hold.
            assert len(theirs.data) < size // 2
            theirs.transport.resume_reading()
            await theirs.until(lambda: len(theirs.data) == size)
            await ours.until(lambda: not ours.paused)
            assert ours.pauses == 1
            assert ours.transport.get_write_buffer_size() == 0

    async def test_memory_is_free_once_the_buffer_is_drained(self) -> None:
        memory = bytearray(random.Random(3).randbytes(8 << 20))
        sent = bytes(memory)
        async with self.wires() as (ours, theirs):
            ours.transport.set_write_buffer_limits(high=1, low=0)
            ours.transport.write(memoryview(memory))
            await ours.until(lambda: not ours.transport.get_write_buffer_size())
            memory[:] = bytes(len(memory))
            await theirs.until(lambda: len(theirs.data) == len(sent))
            assert theirs.data == sent

    async def test_both_ends_know_the_addresses(self) -> None:
        async with self.wires() as (ours, theirs):
            ours_info, theirs_info = ours.transport.get_extra_info, theirs.transport.get_extra_info
            assert ours_info("peername")[:2] == theirs_info("sockname")[:2]
            assert ours_info("sockname")[:2] == theirs_info("peername")[:2]

    async def test_nobody_listening_is_a_refusal(self) -> None:
        listener = await self.network("b").listen(self.address("b"), _Wire)
        await listener.close()
        with pytest.raises(DialRefused, match="nothing listens") as caught:
            await self.network("a").connect(listener.address, _Wire, timeout=PATIENCE)
        assert caught.value.sent is False


# ---------------------------------------------------------------------- links


@dataclass
class _Pair:
    """Two nodes; `a` has dialled `b`."""

    a: Endpoint
    b: Endpoint
    handler_a: RecordingHandler
    handler_b: RecordingHandler
    link: PeerLink
    """The link at a, to b."""
    back: PeerLink
    """The link at b, to a."""
    address: str


class LinkConformance(_Place):
    """Tests of nodes over a `ByteNetwork`."""

    @asynccontextmanager
    async def pair(self, **limits: int) -> AsyncIterator[_Pair]:
        """Two connected nodes, closed afterwards; asserts that nothing is left."""
        settings = NetSettings(limits=Limits(**limits))
        handlers = RecordingHandler(), RecordingHandler()
        a = node("a", self.network("a"), handlers[0], settings=settings)
        b = node("b", self.network("b"), handlers[1], settings=settings)
        try:
            address = await b.listen(self.address("b"))
            link = await a.dial(address)
            await handlers[1].until(lambda handler: bool(handler.ups))
            back = b.link(NodeId("a"))
            assert back is not None
            yield _Pair(a, b, *handlers, link, back, address)
        finally:
            await a.close()
            await b.close()
        for endpoint, handler in ((a, handlers[0]), (b, handlers[1])):
            assert endpoint.connections == 0
            assert not endpoint.links
            assert [link for link, _ in handler.downs] == handler.ups, "every link went down once"

    # ------------------------------------------------------------------ who is there

    async def test_both_sides_know_each_other(self) -> None:
        async with self.pair() as pair:
            assert (pair.link.peer.node, pair.link.peer.epoch) == ("b", 1)
            assert (pair.back.peer.node, pair.back.peer.epoch) == ("a", 1)
            assert pair.link.peer.version == pair.back.peer.version == 1
            assert pair.a.link(NodeId("b")) is pair.link
            assert pair.link.down is None

    async def test_a_wrong_key_is_named_on_both_sides_and_gets_nothing(self) -> None:
        handler = RecordingHandler()
        keys = (b"another key of thirty-two bytes or more",)
        async with self.pair() as pair:
            stranger = node("c", self.network("a"), handler, keys=keys)
            with pytest.raises(WrongClusterKey, match="does not accept this node's cluster key"):
                await stranger.dial(pair.address)
            assert not handler.ups
            assert list(pair.b.links) == ["a"]
            assert pair.b.refused == {"WrongClusterKey": 1}
            await stranger.close()

    async def test_a_node_does_not_link_to_itself(self) -> None:
        async with self.pair() as pair:
            with pytest.raises(OwnAddress):
                await pair.b.dial(pair.address)
            assert list(pair.b.links) == ["a"]

    async def test_dialling_twice_gives_the_same_link(self) -> None:
        async with self.pair() as pair:
            assert await pair.a.dial(pair.address, expect=NodeId("b")) is pair.link
            with pytest.raises(WrongPeer, match="not nobody"):
                await pair.a.dial(pair.address, expect=NodeId("nobody"))

    async def test_many_dials_at_once_share_one_connection(self) -> None:
        handlers = RecordingHandler(), RecordingHandler()
        a, b = node("a", self.network("a"), handlers[0]), node("b", self.network("b"), handlers[1])
        address = await b.listen(self.address("b"))
        links = await asyncio.gather(*(a.dial(address) for _ in range(20)))
        assert len(set(links)) == 1
        assert a.connections == 1
        await a.close()
        await b.close()

    async def test_simultaneous_dials_leave_one_link_that_both_agree_on(self) -> None:
        handlers = RecordingHandler(), RecordingHandler()
        a, b = node("a", self.network("a"), handlers[0]), node("b", self.network("b"), handlers[1])
        addresses = await a.listen(self.address("a")), await b.listen(self.address("b"))
        links = await asyncio.gather(a.dial(addresses[1]), b.dial(addresses[0]))
        answers = await asyncio.gather(
            *(
                link.request(ECHO, Echo(b"%d" % i), timeout=PATIENCE)
                for i, link in enumerate(links)
            ),
            return_exceptions=True,
        )
        # A link that yields may have been given to the caller; then it says that nothing was sent.
        assert all(isinstance(x, Echo) or (isinstance(x, LinkLost) and not x.sent) for x in answers)
        await _eventually(lambda: a.connections == b.connections == 1)
        ours, theirs = a.link(NodeId("b")), b.link(NodeId("a"))
        assert ours is not None
        assert theirs is not None
        assert ours.dialled, "the smaller node's own dial stays"
        assert not theirs.dialled
        assert (await ours.request(ECHO, Echo(b"x"), timeout=PATIENCE)).payload == b"x"
        assert (await theirs.request(ECHO, Echo(b"y"), timeout=PATIENCE)).payload == b"y"
        await a.close()
        await b.close()

    async def test_a_later_life_replaces_an_earlier_one(self) -> None:
        async with self.pair() as pair:
            waiting = asyncio.ensure_future(pair.back.request(HANG, Echo(), timeout=PATIENCE))
            await pair.handler_a.until(lambda handler: bool(handler.calls))
            reborn = node("a", self.network("a"), RecordingHandler(), epoch=2)
            link = await reborn.dial(pair.address)
            await pair.handler_b.until(lambda handler: len(handler.ups) == 2)
            with pytest.raises(LinkLost) as caught:
                await waiting
            assert caught.value.sent
            assert [down.cause for _, down in pair.handler_b.downs] == ["replaced"]
            current = pair.b.link(NodeId("a"))
            assert current is not None
            assert current.peer.epoch == 2
            assert (await link.request(ECHO, Echo(b"2"), timeout=PATIENCE)).payload == b"2"
            await pair.handler_a.until(lambda handler: bool(handler.downs))
            with pytest.raises(WrongPeer, match="later life"):
                await pair.a.dial(pair.address)
            await reborn.close()

    # ------------------------------------------------------------------ requests

    async def test_every_request_gets_its_own_answer(self) -> None:
        numbers = random.Random(4)
        payloads = [numbers.randbytes(numbers.choice((0, 3, 500, 40_000))) for _ in range(300)]
        async with self.pair() as pair:
            answers = await asyncio.gather(
                *(pair.link.request(ECHO, Echo(x), timeout=PATIENCE) for x in payloads[:200]),
                *(pair.back.request(ECHO, Echo(x), timeout=PATIENCE) for x in payloads[200:]),
            )
            assert [answer.payload for answer in answers] == payloads
            assert pair.link.stats().pending == 0
            assert pair.back.stats().serving == 0

    async def test_errors_keep_their_class(self) -> None:
        async with self.pair() as pair:
            pair.handler_b.refusal = NoWorker("nobody serves it", retry_after=2.5)
            with pytest.raises(NoWorker, match="nobody serves it") as caught:
                await pair.link.request(REFUSE, Echo(), timeout=PATIENCE)
            assert caught.value.retry_after == 2.5
            pair.handler_b.refusal = InvalidRequest("no", param="temperature")
            with pytest.raises(InvalidRequest) as invalid:
                await pair.link.request(REFUSE, Echo(), timeout=PATIENCE)
            assert invalid.value.param == "temperature"
            pair.handler_b.refusal = ValueError("a bug")
            with pytest.raises(PdserveError, match="failed inside") as foreign:
                await pair.link.request(REFUSE, Echo(), timeout=PATIENCE)
            assert "a bug" not in foreign.value.message, "a foreign exception's text stays at home"

    async def test_a_deadline_ends_both_sides_of_a_request(self) -> None:
        async with self.pair() as pair:
            with pytest.raises(DeadlineExceeded):
                await pair.link.request(HANG, Echo(), timeout=0.05)
            await pair.handler_b.until(lambda handler: handler.cancelled == 1)
            pair.handler_b.calls[0].reply(Echo(b"too late"))
            assert (await pair.link.request(ECHO, Echo(b"x"), timeout=PATIENCE)).payload == b"x"
            assert pair.link.stats().pending == 0
            assert pair.back.stats().serving == 0

    async def test_what_is_left_of_a_deadline_travels(self) -> None:
        async with self.pair() as pair:
            now = asyncio.get_running_loop().time
            waiting = asyncio.ensure_future(pair.link.request(HANG, Echo(), timeout=7.0))
            await pair.handler_b.until(lambda handler: bool(handler.calls))
            left = pair.handler_b.calls[0].deadline - now()
            assert 0.0 < left <= 7.0
            pair.handler_b.calls[0].reply(Echo(b"done"))
            assert (await waiting).payload == b"done"

    async def test_cancelling_the_caller_tells_the_peer(self) -> None:
        async with self.pair() as pair:
            waiting = asyncio.ensure_future(pair.link.request(HANG, Echo(), timeout=PATIENCE))
            await pair.handler_b.until(lambda handler: bool(handler.calls))
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            await pair.handler_b.until(lambda handler: handler.cancelled == 1)
            assert pair.handler_b.calls[0].done
            assert (await pair.link.request(ECHO, Echo(b"x"), timeout=PATIENCE)).payload == b"x"
            assert pair.link.stats().pending == 0

    async def test_one_request_too_many_is_overload(self) -> None:
        async with self.pair(pending=3) as pair:
            waiting = [
                asyncio.ensure_future(pair.link.request(HANG, Echo(), timeout=PATIENCE))
                for _ in range(3)
            ]
            await pair.handler_b.until(lambda handler: len(handler.calls) == 3)
            with pytest.raises(Overloaded):
                await pair.link.request(ECHO, Echo(), timeout=PATIENCE)
            for call in pair.handler_b.calls:
                call.reply(Echo())
            await asyncio.gather(*waiting)
            await pair.link.request(ECHO, Echo(), timeout=PATIENCE)

    async def test_a_peer_with_too_many_requests_is_told_so(self) -> None:
        async with self.pair(incoming=2, streams=1) as pair:
            waiting = [
                asyncio.ensure_future(pair.link.request(HANG, Echo(), timeout=PATIENCE))
                for _ in range(3)
            ]
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            assert [type(task.exception()) for task in done] == [Overloaded]
            for call in pair.handler_b.calls:
                call.reply(Echo())
            await asyncio.wait(waiting)

    async def test_a_message_over_the_limit_is_refused_before_it_is_sent(self) -> None:
        async with self.pair(body=1 << 16) as pair:
            with pytest.raises(PayloadTooLarge):
                await pair.link.request(ECHO, Echo(bytes(1 << 16)), timeout=PATIENCE)
            with pytest.raises(PayloadTooLarge):
                pair.link.tell(1, bytes((1 << 16) + 1))
            assert (await pair.link.request(ECHO, Echo(b"x"), timeout=PATIENCE)).payload == b"x"

    async def test_undecodable_bodies_fail_their_request_then_the_link(self) -> None:
        async with self.pair() as pair:
            raw = type(ECHO)(ECHO.id, "not an echo", Wrong, Wrong)
            for _ in range(2):
                with pytest.raises(ProtocolError, match="not a Echo"):
                    await pair.link.request(raw, Wrong(), timeout=PATIENCE)
                await pair.link.request(ECHO, Echo(), timeout=PATIENCE)
            with pytest.raises((ProtocolError, LinkLost)):
                await pair.link.request(raw, Wrong(), timeout=PATIENCE)
            await pair.handler_b.until(lambda handler: bool(handler.downs))
            await pair.handler_a.until(lambda handler: bool(handler.downs))
            assert pair.handler_b.downs[0][1].cause == "violation"
            assert pair.handler_a.downs[0][1].cause == "violation"

    async def test_tells_arrive_in_order(self) -> None:
        async with self.pair() as pair:
            for number in range(500):
                pair.link.tell(number, encode(number))
            await pair.handler_b.until(lambda handler: len(handler.tells) == 500)
            assert pair.handler_b.tells == [(number, encode(number)) for number in range(500)]

    # ------------------------------------------------------------------ the end of a link

    async def test_a_lost_link_says_what_may_have_run(self) -> None:
        async with self.pair() as pair:
            waiting = asyncio.ensure_future(pair.link.request(HANG, Echo(), timeout=PATIENCE))
            await pair.handler_b.until(lambda handler: bool(handler.calls))
            pair.back.abort("test")
            with pytest.raises(LinkLost, match="may have been received") as lost:
                await waiting
            assert lost.value.sent
            await pair.handler_b.until(lambda handler: handler.cancelled == 1)
            with pytest.raises(LinkLost) as closed:
                await pair.link.request(ECHO, Echo(), timeout=PATIENCE)
            assert not closed.value.sent
            with pytest.raises(LinkLost):
                pair.link.tell(1, b"")
            with pytest.raises(LinkLost):
                pair.link.open_stream(1, b"", RecordingStreamSink())
            await pair.handler_a.until(lambda handler: bool(handler.downs))
            assert pair.a.link(NodeId("b")) is None

    async def test_a_request_that_never_left_is_safe_to_retry(self) -> None:
        async with self.pair() as pair:
            waiting = asyncio.ensure_future(pair.link.request(HANG, Echo(), timeout=PATIENCE))
            await asyncio.sleep(0)  # queued, and lost in the same turn of the loop
            pair.link.shell.abort()
            with pytest.raises(LinkLost, match="was not sent") as lost:
                await waiting
            assert not lost.value.sent
            await pair.handler_b.until(lambda handler: bool(handler.downs))
            assert not pair.handler_b.calls

    async def test_close_lets_what_is_under_way_finish(self) -> None:
        async with self.pair() as pair:
            waiting = asyncio.ensure_future(pair.link.request(HANG, Echo(), timeout=PATIENCE))
            await pair.handler_b.until(lambda handler: bool(handler.calls))
            pair.back.close("enough")
            with pytest.raises(LinkLost) as refused:
                await pair.back.request(ECHO, Echo(), timeout=PATIENCE)
            assert not refused.value.sent
            await asyncio.sleep(0.05)
            assert not waiting.done()
            pair.handler_b.calls[0].reply(Echo(b"the last word"))
            assert (await waiting).payload == b"the last word"
            await pair.handler_a.until(lambda handler: bool(handler.downs))
            await pair.handler_b.until(lambda handler: bool(handler.downs))
            assert pair.handler_a.downs[0][1].cause == "shutdown"
            assert pair.handler_a.downs[0][1].message == "enough"

    async def test_a_closing_node_refuses_newcomers(self) -> None:
        async with self.pair() as pair:
            await pair.b.close()
            with pytest.raises(DialFailed):
                await pair.a.dial(pair.address)
            with pytest.raises(DialFailed, match="shutting down"):
                await pair.b.dial(pair.address)

    # ------------------------------------------------------------------ streams

    async def test_items_arrive_in_order_in_both_directions(self) -> None:
        async with self.pair() as pair:
            sink = RecordingStreamSink()
            stream = pair.link.open_stream(5, b"", sink)
            await pair.handler_b.until(lambda handler: bool(handler.streams))
            other, other_sink = pair.handler_b.streams[0]

            async def send(sender: ItemStream, count: int) -> None:
                for number in range(count):
                    await send_item(sender, encode(number), timeout=PATIENCE)
                sender.end()

            await asyncio.gather(send(stream, 3000), send(other, 2000))
            assert await sink.end(PATIENCE) is None
            assert await other_sink.end(PATIENCE) is None
            assert other_sink.items == [encode(number) for number in range(3000)]
            assert sink.items == [encode(number) for number in range(2000)]
            assert sink.ends == other_sink.ends == [None]
            with pytest.raises(LinkLost):
                stream.try_send(b"after the end")
            assert pair.link.stats().streams == pair.back.stats().streams == 0
            assert pair.link.stats().granted == pair.back.stats().granted == 0

    async def test_a_slow_reader_stops_its_sender_and_nobody_else(self) -> None:
        async with self.pair() as pair:
            waiting: list[IncomingStream] = []
            pair.handler_b.on_stream_hook = lambda stream, *_: waiting.append(stream)
            slow = pair.link.open_stream(5, b"", RecordingStreamSink(), window=0)
            await _eventually(lambda: bool(waiting))
            assert not slow.sendable
            assert not slow.try_send(b"")
            with pytest.raises(DeadlineExceeded):
                await send_item(slow, b"no credit", timeout=0.1)
            assert (await pair.link.request(ECHO, Echo(b"x"), timeout=PATIENCE)).payload == b"x"
            sink = RecordingStreamSink()
            waiting[0].accept(sink, window=8192)
            await send_item(slow, b"now", timeout=PATIENCE, last=True)
            await sink.end(PATIENCE)
            assert sink.items == [b"now"]

    async def test_without_credit_left_for_the_peer_a_stream_is_refused(self) -> None:
        async with self.pair(budget=10_000, window=8192, least_window=4096) as pair:
            first = pair.link.open_stream(5, b"", RecordingStreamSink())
            with pytest.raises(Overloaded):
                pair.link.open_stream(5, b"", RecordingStreamSink())
            first.abort(Cancelled("make room"))
            await pair.handler_b.until(lambda handler: bool(handler.streams))
            await pair.handler_b.streams[0][1].end(PATIENCE)
            await pair.link.request(ECHO, Echo(), timeout=PATIENCE)
            pair.link.open_stream(5, b"", RecordingStreamSink())

    async def test_either_side_can_abort_a_stream(self) -> None:
        async with self.pair() as pair:
            ours = RecordingStreamSink()
            stream = pair.link.open_stream(5, b"", ours)
            await pair.handler_b.until(lambda handler: bool(handler.streams))
            stream.abort(NoWorker("ours"))
            error = await pair.handler_b.streams[0][1].end(PATIENCE)
            assert isinstance(error, NoWorker)
            assert ours.ends == [], "who aborts hears nothing more"

            ours = RecordingStreamSink()
            stream = pair.link.open_stream(5, b"", ours, last=True)
            await pair.handler_b.until(lambda handler: len(handler.streams) == 2)
            other, other_sink = pair.handler_b.streams[1]
            assert await other_sink.end(PATIENCE) is None
            other.abort(NoWorker("theirs"))
            assert isinstance(await ours.end(PATIENCE), NoWorker)

            ours = RecordingStreamSink()
            stream = pair.link.open_stream(5, b"", ours, last=True)
            await pair.handler_b.until(lambda handler: len(handler.streams) == 3)
            stream.abort(Cancelled("enough"))  # our half has ended: the peer's is asked to
            other = pair.handler_b.streams[2][0]
            await _eventually(lambda: not other.sendable and not pair.link.stats().streams)
            with pytest.raises(LinkLost):
                other.try_send(b"x")

    async def test_a_handler_that_fails_refuses_the_stream(self) -> None:
        async with self.pair() as pair:

            def refuse(*_: object) -> None:
                raise NoWorker("not here")

            pair.handler_b.on_stream_hook = refuse
            sink = RecordingStreamSink()
            pair.link.open_stream(5, b"", sink)
            assert isinstance(await sink.end(PATIENCE), NoWorker)
            assert pair.link.down is None

    async def test_streams_end_with_their_link(self) -> None:
        async with self.pair() as pair:
            sink = RecordingStreamSink()
            stream = pair.link.open_stream(5, b"", sink)
            await pair.handler_b.until(lambda handler: bool(handler.streams))
            pair.back.abort("test")
            assert isinstance(await sink.end(PATIENCE), LinkLost)
            assert isinstance(await pair.handler_b.streams[0][1].end(PATIENCE), LinkLost)
            with pytest.raises(LinkLost):
                await send_item(stream, b"", timeout=PATIENCE)

    # ------------------------------------------------------------------ bulk

    async def test_both_sides_can_open_bulk_streams(self) -> None:
        async with self.pair() as pair:
            assert not pair.link.stats().bulk
            streams = await asyncio.gather(
                pair.link.open_bulk_stream(5, b"", RecordingStreamSink(), timeout=PATIENCE),
                pair.back.open_bulk_stream(6, b"", RecordingStreamSink(), timeout=PATIENCE),
            )
            assert pair.link.stats().bulk
            assert pair.back.stats().bulk
            assert pair.a.connections == 2
            for stream in streams:
                await send_item(stream, bytes(200_000), timeout=PATIENCE, last=True)
            for handler in (pair.handler_a, pair.handler_b):
                await handler.until(lambda handler: bool(handler.streams))
                await handler.streams[0][1].end(PATIENCE)
                assert handler.streams[0][1].items == [bytes(200_000)]

    async def test_requests_do_not_wait_for_bulk(self) -> None:
        async with self.pair() as pair:
            pair.handler_b.window = 64 << 20
            stream = await pair.link.open_bulk_stream(
                5, b"", RecordingStreamSink(), timeout=PATIENCE
            )
            await _eventually(lambda: stream.sendable)
            assert pair.back.bulk is not None
            pair.back.bulk.transport.pause_reading()
            reused = bytes(1 << 20)
            while stream.sendable:
                stream.try_send(reused)
            await _eventually(lambda: pair.link.bulk is not None and pair.link.bulk.full)
            answer = await pair.link.request(ECHO, Echo(b"x"), timeout=PATIENCE)
            assert answer.payload == b"x"
            stream.abort(Cancelled("enough"))


async def _eventually(met: Callable[[], bool]) -> None:
    """Wait for something that nothing announces."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + PATIENCE
    while not met() and loop.time() < deadline:  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    assert met()


class Wrong(Echo, frozen=True, array_like=True, tag=7):
    """A record that `ECHO` cannot decode."""

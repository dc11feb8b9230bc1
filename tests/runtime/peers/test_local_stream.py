"""Streams are alike on a link and on a local link; and what local ones alone do."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from pdserve.errors import Cancelled, LinkLost, NoMethod, NoWorker, Overloaded, PdserveError
from pdserve.ids import NodeId
from pdserve.runtime.peers import local_link, local_stream
from pdserve.runtime.peers.handlers import accepts
from pdserve.runtime.peers.local_stream import LocalLane
from tests.net.world import virtually
from tests.runtime.cluster import Cluster, cluster
from tests.support.net_support import RecordingStreamSink

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from pdserve.net.base import IncomingStream, StreamOpener
    from pdserve.runtime.node import Node
    from pdserve.wire.parser import Buffer

B = NodeId("b")
READ, LATER, REFUSED = 0x7101, 0x7102, 0x7103
both_ways = pytest.mark.parametrize("together", [False, True], ids=["link", "local link"])


class Reader:
    """Accepts streams, some of them later, some never."""

    def __init__(self, node: Node) -> None:
        self.streams: list[IncomingStream] = []
        self.sinks: list[RecordingStreamSink] = []
        self.opened_with: list[bytes] = []
        node.host(self)

    @accepts(READ)
    def _read(self, stream: IncomingStream, body: Buffer) -> None:
        self.opened_with.append(bytes(body))
        sink = RecordingStreamSink()
        self.streams.append(stream)
        self.sinks.append(sink)
        stream.accept(sink, window=1 << 16)

    @accepts(LATER)
    def _later(self, stream: IncomingStream, body: Buffer) -> None:
        self.streams.append(stream)

    @accepts(REFUSED)
    def _refused(self, stream: IncomingStream, body: Buffer) -> None:
        raise NoWorker("none here")


class World:
    def __init__(self, nodes: Cluster, a: Node, b: Node, link: StreamOpener) -> None:
        self.nodes, self.a, self.b, self.link = nodes, a, b, link
        self.reader = Reader(b)

    async def rest(self) -> None:
        await asyncio.sleep(0.2)


@asynccontextmanager
async def world(*, together: bool = True) -> AsyncIterator[World]:
    async with cluster(together=together) as nodes:
        a, b = await nodes.add("a"), await nodes.add("b")
        await nodes.until(nodes.converged)
        link: Any = await a.link(B, timeout=1.0)
        if together:
            link = a.local_link(B)
        assert link.local is together
        yield World(nodes, a, b, link)


# ---------------------------------------------------------------- alike


@both_ways
@virtually
async def test_items_go_both_ways_in_their_order_and_each_half_ends_by_itself(
    together: bool,
) -> None:
    async with world(together=together) as w:
        ours = RecordingStreamSink()
        stream = w.link.open_stream(READ, b"hello", ours)
        assert not w.reader.streams, "not before the opener has run"
        assert not stream.try_send(b"no credit yet")
        await w.rest()
        (back,), (theirs,) = w.reader.streams, w.reader.sinks
        assert back.link.peer.node == "a"
        assert w.reader.opened_with == [b"hello"]
        assert ours.unblocked >= 1
        for number in range(100):
            assert stream.try_send(b"%d" % number)
            assert back.try_send(b"-%d" % number)
        assert theirs.items == []
        stream.end()
        stream.end()
        await w.rest()
        assert theirs.items == [b"%d" % n for n in range(100)]
        assert ours.items == [b"-%d" % n for n in range(100)]
        assert (theirs.ends, ours.ends) == ([None], [])
        with pytest.raises(LinkLost) as lost:
            stream.try_send(b"late")
        assert not lost.value.sent
        assert back.try_send(b"last", last=True)
        await w.rest()
        assert (ours.items[-1], ours.ends) == (b"last", [None])
        assert not back.sendable


@both_ways
@virtually
async def test_an_abort_ends_both_halves_behind_what_was_sent(together: bool) -> None:
    async with world(together=together) as w:
        ours = RecordingStreamSink()
        stream = w.link.open_stream(READ, b"", ours)
        await w.rest()
        (back,), (theirs,) = w.reader.streams, w.reader.sinks
        stream.try_send(b"before")
        back.try_send(b"crosses the abort")
        error = Overloaded("enough", retry_after=2.0)
        stream.abort(error)
        await w.rest()
        assert theirs.items == [b"before"]
        (found,) = theirs.ends
        assert isinstance(found, Overloaded)
        assert (found.message, found.retry_after) == ("enough", 2.0)
        assert found is not error
        assert (ours.items, ours.ends) == ([], []), "who aborts hears nothing more"
        for end in (stream, back):
            with pytest.raises(LinkLost):
                end.try_send(b"late")


@both_ways
@virtually
async def test_an_abort_behind_the_end_of_the_own_half_ends_the_other(together: bool) -> None:
    async with world(together=together) as w:
        stream = w.link.open_stream(READ, b"", RecordingStreamSink())
        await w.rest()
        (back,) = w.reader.streams
        stream.end()
        await w.rest()
        assert back.sendable
        stream.abort(Cancelled("no reader"))
        await w.rest()
        assert w.reader.sinks[0].ends == [None]
        with pytest.raises(LinkLost):
            back.try_send(b"nobody reads it")


@both_ways
@pytest.mark.parametrize(("number", "kind"), [(REFUSED, NoWorker), (0x7199, NoMethod)])
@virtually
async def test_a_stream_that_is_refused_ends_with_the_reason(
    together: bool, number: int, kind: type[PdserveError]
) -> None:
    async with world(together=together) as w:
        ours = RecordingStreamSink()
        w.link.open_stream(number, b"", ours)
        await w.rest()
        assert [type(error) for error in ours.ends] == [kind]


@both_ways
@virtually
async def test_a_stream_may_be_accepted_later_or_when_it_has_ended(together: bool) -> None:
    async with world(together=together) as w:
        ours = RecordingStreamSink()
        stream = w.link.open_stream(LATER, b"", ours)
        aborted = w.link.open_stream(LATER, b"", RecordingStreamSink())
        await w.rest()
        assert not stream.try_send(b"no credit")
        sink = RecordingStreamSink()
        w.reader.streams[0].accept(sink, window=1000)
        await w.rest()
        assert ours.unblocked == 1
        assert stream.try_send(b"now")
        with pytest.raises(RuntimeError):
            w.reader.streams[0].accept(sink, window=1000)
        aborted.abort(NoWorker("none"))
        await w.rest()
        late = RecordingStreamSink()
        w.reader.streams[1].accept(late, window=1000)
        assert [type(error) for error in late.ends] == [NoWorker]
        assert sink.items == [b"now"]


@both_ways
@virtually
async def test_without_a_window_the_peer_sends_nothing(together: bool) -> None:
    async with world(together=together) as w:
        w.link.open_stream(READ, b"", RecordingStreamSink(), window=0)
        await w.rest()
        assert not w.reader.streams[0].sendable
        assert not w.reader.streams[0].try_send(b"x")


@both_ways
@virtually
async def test_a_sink_that_fails_ends_its_stream_alone(
    together: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with world(together=together) as w:
        ours, other = RecordingStreamSink(), RecordingStreamSink()
        stream, sound = (w.link.open_stream(READ, b"", sink) for sink in (ours, other))
        await w.rest()

        def broken(body: object) -> None:
            raise ValueError("a bug")

        w.reader.sinks[0].on_data = broken  # type: ignore[method-assign]
        stream.try_send(b"x")
        sound.try_send(b"y")
        await w.rest()
        (error,) = ours.ends
        assert isinstance(error, PdserveError)
        assert w.reader.sinks[1].items == [b"y"]
        assert "a bug" in caplog.text


@both_ways
@pytest.mark.parametrize("dies", ["a", "b"])
@virtually
async def test_streams_end_with_the_life_of_either_node(together: bool, dies: str) -> None:
    async with world(together=together) as w:
        ours = RecordingStreamSink()
        stream = w.link.open_stream(READ, b"", ours)
        await w.rest()
        stream.try_send(b"sent before")
        await (w.a if dies == "a" else w.b).close(grace=0.5)
        await asyncio.sleep(1.0)
        (theirs,) = w.reader.sinks
        assert theirs.items == [b"sent before"]
        assert [type(error) for error in ours.ends + theirs.ends] == [LinkLost, LinkLost]
        with pytest.raises(LinkLost):
            stream.try_send(b"late")
        with pytest.raises(LinkLost) as lost:
            w.link.open_stream(READ, b"", ours)
        assert not lost.value.sent


# ---------------------------------------------------------------- local ones


@virtually
async def test_items_arrive_as_they_are() -> None:
    async with world() as w:
        stream = w.link.open_stream(READ, b"", RecordingStreamSink())
        await w.rest()
        got: list[object] = []
        w.reader.sinks[0].on_data = got.append  # type: ignore[method-assign, assignment]
        item = [1, 2]
        stream.try_send(item)
        await w.rest()
        assert got[0] is item


@virtually
async def test_a_half_is_bounded_and_goes_on_when_half_was_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(local_stream, "_WINDOW", 8)
    async with world() as w:
        ours = RecordingStreamSink()
        stream = w.link.open_stream(READ, b"", ours)
        await w.rest()
        before = ours.unblocked
        sent = 0
        while stream.try_send(b"%d" % sent):
            sent += 1
        assert sent == 8
        assert not stream.sendable
        await w.rest()
        assert ours.unblocked == before + 1
        assert stream.sendable
        assert w.reader.sinks[0].items == [b"%d" % n for n in range(8)]


@virtually
async def test_too_many_streams_are_refused_and_ended_ones_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(local_link, "_MOST_STREAMS", 2)
    async with world() as w:
        streams = [w.link.open_stream(READ, b"", RecordingStreamSink()) for _ in range(2)]
        with pytest.raises(Overloaded):
            w.link.open_stream(READ, b"", RecordingStreamSink())
        await w.rest()
        streams[0].abort(Cancelled("enough"))
        streams[1].end()
        w.reader.streams[1].end()
        await w.rest()
        link = w.a.local_link(B)
        assert link is not None
        assert not link.streams


class Turns:
    """An event loop that a test turns, and a clock that work moves on."""

    def __init__(self) -> None:
        self.due: list[Callable[[], None]] = []
        self.time = 0.0

    def lane(self) -> LocalLane:
        return LocalLane(lambda callback: self.due.append(callback), lambda: self.time)

    def turn(self) -> None:
        due, self.due = self.due, []
        for callback in due:
            callback()


def test_what_takes_long_is_spread_over_turns() -> None:
    turns, came = Turns(), []
    lane = turns.lane()

    def arrive(number: int) -> None:
        came.append(number)
        turns.time += 0.002

    for number in range(10):
        lane.put(lambda number=number: arrive(number))  # type: ignore[misc]
    counts = []
    while turns.due:
        turns.turn()
        counts.append(len(came))
    assert came == list(range(10))
    assert counts == [3, 6, 9, 10], "5 ms in a turn, and the item that exceeds them"


def test_an_arrival_that_raises_holds_up_no_others() -> None:
    turns, came = Turns(), []
    lane = turns.lane()

    def broken() -> None:
        raise ValueError("a bug")

    lane.put(broken)
    lane.put(lambda: came.append(1))
    with pytest.raises(ValueError, match="a bug"):
        turns.turn()
    turns.turn()
    assert came == [1]
    assert not turns.due


def test_what_an_arrival_sends_comes_in_the_next_turn() -> None:
    turns, came = Turns(), []
    lane = turns.lane()
    lane.put(lambda: lane.put(lambda: came.append("second")))
    turns.turn()
    assert (came, len(lane)) == ([], 1)
    assert len(turns.due) == 1, "scheduled once"
    turns.turn()
    assert came == ["second"]


@pytest.mark.parametrize("whole", [True, False])
def test_what_arrives_may_drain_the_lane_itself(whole: bool) -> None:
    turns: list[Callable[[], None]] = []
    lane = LocalLane(turns.append, lambda: 0.0)
    arrived: list[int] = []
    lane.put(lane.drain)
    for number in range(3):
        lane.put(partial(arrived.append, number))
    if whole:
        lane.drain()
    turns.pop()()
    assert arrived == [0, 1, 2]
    assert (len(lane), turns) == (0, [])

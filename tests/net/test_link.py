"""What a link does when things go wrong: silence, full transports, lost bulk, bad readers."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgpack
import pytest

from pdserve.errors import (
    Cancelled,
    DeadlineExceeded,
    DialTimeout,
    LinkLost,
    NoMethod,
    NoWorker,
    Overloaded,
    ProtocolError,
)
from pdserve.ids import NodeId
from pdserve.messages.request import GenerateRequest, SamplingParams
from pdserve.net.settings import NetSettings
from pdserve.token_ids import token_ids
from pdserve.wire.codec import PACKED_IDS, Method
from pdserve.wire.handshake import Versions
from pdserve.wire.header import FrameKind
from pdserve.wire.limits import Limits
from tests.net.world import Two, two, virtually
from tests.support.net_support import (
    ECHO,
    HANG,
    REFUSE,
    Echo,
    RecordingHandler,
    RecordingStreamSink,
    send_item,
)

if TYPE_CHECKING:
    from pdserve.net.base import IncomingCall
from pdserve.net.link_call import LinkCall

now = asyncio.get_running_loop


# ---------------------------------------------------------------------- sent or not


@virtually
async def test_requests_behind_a_full_transport_are_known_not_to_have_left() -> None:
    async with two() as t:
        t.world.set_conditions("a", "b", bandwidth=1.0, capacity=1000)
        t.link.tell(1, bytes(2 << 20))  # fills the transport
        await asyncio.sleep(0.01)
        assert t.link.shell.full
        waiting = [
            asyncio.ensure_future(t.link.request(HANG, Echo(), timeout=100.0)) for _ in range(5)
        ]
        await asyncio.sleep(1.0)
        t.world.reset("a", "b")
        done, _ = await asyncio.wait(waiting)
        errors = [task.exception() for task in done]
        assert all(isinstance(error, LinkLost) and not error.sent for error in errors)
        assert not t.at_b.calls


@virtually
async def test_a_request_on_its_way_may_have_arrived() -> None:
    async with two() as t:
        t.world.partition("a", "b")
        waiting = asyncio.ensure_future(t.link.request(HANG, Echo(), timeout=100.0))
        await asyncio.sleep(1.0)
        t.world.reset("a", "b")
        with pytest.raises(LinkLost) as lost:
            await waiting
        assert lost.value.sent, "nobody can know"


@virtually
async def test_each_request_ends_once_whichever_end_comes_first() -> None:
    """Deadline, cancellation, answer and loss at the same moment."""
    async with two() as t:
        t.world.set_conditions("b", "a", bandwidth=1000.0, segment=60, capacity=60)
        tasks = [
            asyncio.ensure_future(t.link.request(ECHO, Echo(b"%02d" % i), timeout=0.6 - i / 80))
            for i in range(40)
        ]
        await asyncio.sleep(0.15)
        for task in tasks[::3]:
            task.cancel()
        await asyncio.sleep(0.15)
        t.world.reset("a", "b")
        await asyncio.wait(tasks)
        kinds = {task.cancelled() or type(task.exception()) for task in tasks}
        assert kinds == {True, type(None), DeadlineExceeded, LinkLost}


# ---------------------------------------------------------------------- keepalive


@virtually
async def test_a_silent_peer_is_given_up_in_time_and_an_idle_one_is_not() -> None:
    settings = NetSettings(ping_after=1.0, silent_after=3.0)
    async with two(settings) as t:
        await asyncio.sleep(60.0)
        assert t.link.down is None
        assert t.back.down is None
        t.world.partition("a", "b")
        start = now().time()
        await t.at_a.until(lambda handler: bool(handler.downs))
        assert 2.0 <= now().time() - start <= 5.0
        await t.at_b.until(lambda handler: bool(handler.downs))
        for handler in (t.at_a, t.at_b):
            assert handler.downs[0][1].cause == "silent"


@virtually
async def test_a_one_way_partition_is_noticed_by_both_sides() -> None:
    async with two(NetSettings(ping_after=1.0, silent_after=3.0)) as t:
        t.world.partition("a", "b", one_way=True)
        await t.at_b.until(lambda handler: bool(handler.downs), timeout=30.0)
        await t.at_a.until(lambda handler: bool(handler.downs), timeout=30.0)


@virtually
async def test_a_process_that_stands_still_for_a_while_keeps_its_links() -> None:
    async with two(NetSettings(ping_after=1.0, silent_after=5.0)) as t:
        waiting = asyncio.ensure_future(t.link.request(ECHO, Echo(b"x"), timeout=10.0))
        t.world.pause("b")
        await asyncio.sleep(3.0)
        assert not waiting.done()
        t.world.resume("b")
        assert (await waiting).payload == b"x"
        assert t.link.down is None


# ---------------------------------------------------------------------- deadlines


@virtually
async def test_deadlines_hold_without_any_help_from_the_peer() -> None:
    async with two() as t:
        t.world.partition("a", "b")
        start = now().time()
        tasks = [
            asyncio.ensure_future(t.link.request(ECHO, Echo(), timeout=timeout))
            for timeout in (3.0, 0.5, 1.0, 0.0)
        ]
        ended = []
        for task in tasks:
            task.add_done_callback(lambda _: ended.append(now().time() - start))
        await asyncio.wait(tasks)
        assert all(isinstance(task.exception(), DeadlineExceeded) for task in tasks)
        for at, due in zip(ended, (0.0, 0.5, 1.0, 3.0), strict=True):
            assert due <= at + 1e-6 <= due + 0.03


@virtually
async def test_expired_requests_free_their_slots_once_the_peer_confirms() -> None:
    async with two(NetSettings(limits=Limits(pending=4))) as t:
        t.world.partition("a", "b")
        for _ in range(4):
            with pytest.raises(DeadlineExceeded):
                await t.link.request(ECHO, Echo(), timeout=0.1)
        with pytest.raises(Overloaded):
            await t.link.request(ECHO, Echo(), timeout=0.1)
        t.world.heal()
        await asyncio.sleep(0.1)
        assert (await t.link.request(ECHO, Echo(b"x"), timeout=1.0)).payload == b"x"
        assert t.link.stats().pending == 0


@virtually
async def test_the_server_stops_work_at_the_deadline_even_if_nobody_tells_it() -> None:
    async with two() as t:
        waiting = asyncio.ensure_future(t.link.request(HANG, Echo(), timeout=1.0))
        await t.at_b.until(lambda handler: bool(handler.calls))
        t.world.partition("a", "b", one_way=True)  # the cancellation will not arrive
        start = now().time()
        await t.at_b.until(lambda handler: handler.cancelled == 1)
        assert now().time() - start <= 1.03
        assert t.back.stats().serving == 0
        with pytest.raises(DeadlineExceeded):
            await waiting


@virtually
async def test_sending_waits_no_longer_than_it_may() -> None:
    async with two() as t:
        t.at_b.window = 4096
        stream = t.link.open_stream(1, b"", RecordingStreamSink(), window=0)
        await asyncio.sleep(0.1)
        t.world.partition("a", "b")
        while stream.try_send(bytes(500)):
            pass
        with pytest.raises(DeadlineExceeded):
            await send_item(stream, bytes(500), timeout=0.5)
        bulk = t.link.open_bulk_stream(1, b"", RecordingStreamSink(), timeout=0.5)
        with pytest.raises(DeadlineExceeded):
            await bulk


@virtually
async def test_what_was_reported_as_not_sent_does_not_leave_afterwards() -> None:
    async with two() as t:
        t.world.partition("a", "b")
        t.link.tell(1, bytes(3 << 20))
        await asyncio.sleep(0.1)
        assert t.link.shell.full
        waiting = asyncio.ensure_future(t.link.request(HANG, Echo(), timeout=9.0))
        await asyncio.sleep(0.1)
        t.link.abort("enough")
        t.world.heal()  # the transport takes more now, while the link's last words may still leave
        with pytest.raises(LinkLost) as lost:
            await waiting
        assert lost.value.sent is False
        await t.at_b.until(lambda handler: bool(handler.downs))
        assert len(t.at_b.tells) == 1, "what the transport had is not taken back"
        assert not t.at_b.calls


@virtually
async def test_on_a_link_that_was_reset_nothing_can_be_started() -> None:
    """No last word came: the connection does not know by itself that it is over."""
    async with two() as t:
        bulk = await t.link.open_bulk_stream(1, b"", RecordingStreamSink(), timeout=1.0)
        t.world.reset("a", "b")
        await asyncio.sleep(0.1)
        assert t.link.down is not None
        assert t.link.down.cause == "reset"
        start = now().time()
        for begin in (
            lambda: t.link.request(ECHO, Echo(), timeout=9.0),
            lambda: t.link.open_bulk_stream(1, b"", RecordingStreamSink(), timeout=9.0),
            lambda: send_item(bulk, b"", timeout=9.0),
        ):
            with pytest.raises(LinkLost) as lost:
                await begin()
            assert lost.value.sent is False
        for verb in (
            lambda: t.link.tell(1, b""),
            lambda: t.link.open_stream(1, b"", RecordingStreamSink()),
        ):
            with pytest.raises(LinkLost) as lost:
                verb()
            assert lost.value.sent is False
        assert now().time() == start, "at once"


@virtually
async def test_a_peer_that_does_not_read_is_overload_for_new_work() -> None:
    async with two(NetSettings(limits=Limits(unsent=1 << 20))) as t:
        t.world.set_conditions("a", "b", bandwidth=1.0, capacity=1000)
        t.link.tell(1, bytes(3 << 20))
        await asyncio.sleep(0.1)
        t.link.tell(1, bytes(1 << 20))
        with pytest.raises(Overloaded, match="reads slowly"):
            t.link.tell(1, b"")
        with pytest.raises(Overloaded):
            await t.link.request(ECHO, Echo(), timeout=1.0)
        assert t.link.stats().unsent_bytes < 2 << 20


# ---------------------------------------------------------------------- bulk


@virtually
async def test_a_lost_bulk_connection_ends_its_streams_only_and_is_dialled_again() -> None:
    async with two() as t:
        ours, plain = RecordingStreamSink(), RecordingStreamSink()
        bulk = await t.link.open_bulk_stream(1, b"", ours, timeout=1.0)
        t.link.open_stream(1, b"", plain)
        await t.at_b.until(lambda handler: len(handler.streams) == 2)
        assert t.link.bulk is not None
        t.link.bulk.abort()
        assert isinstance(await ours.end(), LinkLost)
        assert isinstance(await t.at_b.streams[0][1].end(), LinkLost)
        with pytest.raises(LinkLost):
            bulk.try_send(b"")
        assert plain.ends == []
        assert t.link.down is None
        assert not t.back.stats().bulk
        for link in (t.back, t.link):
            again = await link.open_bulk_stream(1, b"", RecordingStreamSink(), timeout=1.0)
            again.end()
        assert t.a.connections == 2


@virtually
async def test_many_bulk_streams_at_once_share_one_dial() -> None:
    async with two() as t:
        sinks = [RecordingStreamSink() for _ in range(10)]
        opening = [
            link.open_bulk_stream(1, b"", sink, timeout=1.0, window=0)
            for link in (t.link, t.back)
            for sink in sinks[:5]
        ]
        await asyncio.gather(*opening)
        assert t.a.connections == t.b.connections == 2


@virtually
async def test_a_bulk_dial_that_fails_says_why() -> None:
    async with two() as t:
        t.world.partition("a", "b", one_way=True)
        opening = asyncio.ensure_future(
            t.link.open_bulk_stream(1, b"", RecordingStreamSink(), timeout=60.0)
        )
        with pytest.raises(DialTimeout, match="did not answer"):
            await opening


@virtually
async def test_bulk_ends_with_its_link() -> None:
    async with two() as t:
        sink = RecordingStreamSink()
        await t.link.open_bulk_stream(1, b"", sink, timeout=1.0)
        t.back.abort("test")
        assert isinstance(await sink.end(), LinkLost)
        await t.at_a.until(lambda handler: bool(handler.downs))
        with pytest.raises(LinkLost):
            await t.link.open_bulk_stream(1, b"", RecordingStreamSink(), timeout=1.0)
        await asyncio.sleep(2.0)
        assert t.world.connections == 0


@virtually
async def test_requests_on_a_bulk_connection_end_it() -> None:
    async with two() as t:
        await t.link.open_bulk_stream(1, b"", RecordingStreamSink(), timeout=1.0)
        assert t.link.bulk is not None
        t.link.bulk.connection.send_tell(1, b"")
        t.link.bulk.wake()
        await asyncio.sleep(0.1)
        assert t.link.bulk is None
        assert t.link.down is None
        assert not t.at_b.tells


# ---------------------------------------------------------------------- readers and handlers


@virtually
async def test_a_reader_that_fails_ends_its_own_stream() -> None:
    class Fails(RecordingStreamSink):
        def on_data(self, body) -> None:
            raise ZeroDivisionError("a bug")

    async with two() as t:
        t.at_b.on_stream_hook = lambda stream, *_: stream.accept(Fails(), window=4096)
        sink = RecordingStreamSink()
        stream = t.link.open_stream(1, b"", sink)
        await send_item(stream, b"x", timeout=1.0)
        error = await sink.end()
        assert "failed inside" in str(error)
        assert t.link.down is None


@virtually
async def test_a_stream_can_be_accepted_later_or_after_it_has_ended() -> None:
    async with two() as t:
        offered = []
        t.at_b.on_stream_hook = lambda stream, *_: offered.append(stream)
        ours = RecordingStreamSink()
        stream = t.link.open_stream(1, b"", ours)
        await asyncio.sleep(0.1)
        assert not stream.sendable
        late = RecordingStreamSink()
        offered[0].accept(late, window=4096)
        with pytest.raises(RuntimeError):
            offered[0].accept(late)
        await send_item(stream, b"x", timeout=1.0, last=True)
        await late.end()
        assert late.items == [b"x"]

        t.link.open_stream(1, b"", RecordingStreamSink()).abort(NoWorker("gone"))
        await asyncio.sleep(0.1)
        too_late = RecordingStreamSink()
        offered[1].accept(too_late, window=4096)
        assert isinstance(await too_late.end(), NoWorker)


@virtually
async def test_accepting_without_credit_left_is_overload_and_can_be_tried_again() -> None:
    async with two(NetSettings(limits=Limits(budget=6000, least_window=4096, window=4096))) as t:
        offered = []
        t.at_b.on_stream_hook = lambda stream, *_: offered.append(stream)
        for _ in range(2):
            t.link.open_stream(1, b"", RecordingStreamSink(), window=0)
        await asyncio.sleep(0.1)
        offered[0].accept(RecordingStreamSink(), window=4096)
        sink = RecordingStreamSink()
        with pytest.raises(Overloaded):
            offered[1].accept(sink, window=4096)
        offered[0].abort(Cancelled("make room"))
        await asyncio.sleep(0.1)
        offered[1].accept(sink, window=4096)


@virtually
async def test_events_behind_the_end_of_a_link_go_nowhere() -> None:
    """The handler ends the link during a read that holds more requests: they are not started."""
    async with two() as t:

        def stop(call: IncomingCall) -> None:
            t.at_b.calls.append(call)
            call.on_cancel = lambda: cancelled.append(call)
            assert isinstance(call, LinkCall)
            call.link.abort("stop")

        cancelled: list[IncomingCall] = []
        t.at_b.on_request = stop  # type: ignore[method-assign]
        tasks = [asyncio.ensure_future(t.link.request(HANG, Echo(), timeout=5.0)) for _ in range(5)]
        await asyncio.wait(tasks)
        assert len(t.at_b.calls) == 1
        assert cancelled == t.at_b.calls
        assert all(isinstance(task.exception(), LinkLost) for task in tasks)


# ---------------------------------------------------------------------- goodbye


@virtually
async def test_a_closing_link_gives_up_on_work_that_does_not_end() -> None:
    async with two(NetSettings(retire_after=2.0)) as t:
        waiting = asyncio.ensure_future(t.link.request(HANG, Echo(), timeout=100.0))
        await t.at_b.until(lambda handler: bool(handler.calls))
        start = now().time()
        t.link.close("enough")
        with pytest.raises(LinkLost):
            await waiting
        assert 1.9 <= now().time() - start <= 2.2


@virtually
async def test_a_replaced_connection_finishes_its_work() -> None:
    """The dialler dials again (it lost its link object, say): the old one ends when it is idle."""
    async with two() as t:
        waiting = asyncio.ensure_future(t.link.request(HANG, Echo(), timeout=100.0))
        await t.at_b.until(lambda handler: bool(handler.calls))
        newer = await t.a.dial(t.address)
        assert newer is not t.link
        assert t.a.link(NodeId("b")) is newer
        await t.at_b.until(lambda handler: len(handler.ups) == 2)
        with pytest.raises(LinkLost) as lost:
            await t.link.request(ECHO, Echo(), timeout=1.0)
        assert not lost.value.sent
        t.at_b.calls[0].reply(Echo(b"old work"))
        assert (await waiting).payload == b"old work"
        await t.at_a.until(lambda handler: bool(handler.downs))
        assert t.at_a.downs[0][1].cause == "duplicate"
        assert (await newer.request(ECHO, Echo(b"x"), timeout=1.0)).payload == b"x"
        assert t.a.connections == 1


async def test_a_link_shows_who_it_leads_to() -> None:
    t = Two(None, 0)
    await t.connect()
    assert repr(t.link) == "<link to b>"
    t.link.abort()
    assert repr(t.link) == "<link to b, closed>"
    await t.a.close()
    await t.b.close()
    assert isinstance(t.at_a, RecordingHandler)


@virtually
async def test_an_answer_that_crosses_the_end_of_the_wait_is_not_lost() -> None:
    """However a cancellation or a deadline and the answer meet: what was answered is heard of."""
    heard = crossed = 0
    for step in range(40):
        async with two() as t:
            given: list[IncomingCall] = []
            late: list[Echo] = []

            def answer(call: IncomingCall, given: list[IncomingCall] = given) -> None:
                if not call.done:
                    given.append(call)
                    call.reply(Echo(b"yes"))

            def later(call: IncomingCall, answer: Any = answer) -> None:
                asyncio.get_running_loop().call_later(0.05, answer, call)

            t.at_b.on_request = later  # type: ignore[method-assign]
            t.world.set_conditions("a", "b", delay_min=0.02, delay_max=0.02)
            t.world.set_conditions("b", "a", delay_min=0.02, delay_max=0.02)
            moment = 0.005 * step
            timeout = moment if step % 2 else 5.0
            asking = asyncio.ensure_future(
                t.link.request(ECHO, Echo(), timeout=timeout, late=late.append)
            )
            await asyncio.sleep(moment)
            asking.cancel()
            await asyncio.wait({asking})
            await asyncio.sleep(0.5)
            got = not asking.cancelled() and asking.exception() is None
            assert len(given) == got + len(late)
            assert t.link.stats().pending == 0
            heard += got
            crossed += len(late)
    assert heard
    assert crossed


# ---------------------------------------------------------------------- strikes


async def refused(t: Two, error: Exception, times: int, kind: type[Exception]) -> None:
    """So many questions that the peer answers by `error`, and that end here as `kind`."""
    t.at_b.refusal = error
    for _ in range(times):
        with pytest.raises(kind):
            await t.link.request(REFUSE, Echo(), timeout=1.0)


@virtually
async def test_a_strike_is_forgotten_after_a_while() -> None:
    async with two() as t:
        garbage = ProtocolError("not a Thing")
        await refused(t, garbage, 2, ProtocolError)
        await asyncio.sleep(NetSettings().strike_window)
        await refused(t, garbage, 2, ProtocolError)
        assert t.link.down is None
        await refused(t, garbage, 1, LinkLost)
        assert t.link.down is not None
        assert t.link.down.cause == "violation"


@virtually
async def test_what_was_read_together_with_the_last_strike_still_counts() -> None:
    async with two() as t:
        t.at_a.refusal = ProtocolError("not a Thing")
        asked = [asyncio.create_task(t.link.request(HANG, Echo(), timeout=60.0)) for _ in range(3)]
        sinks = [RecordingStreamSink() for _ in range(3)]
        for sink in sinks:
            t.link.open_stream(1, b"", sink, last=True)
        await t.at_b.until(lambda handler: len(handler.calls) == len(handler.streams) == 3)
        for _ in range(3):
            striking = t.back.request(REFUSE, Echo(), timeout=60.0)
            asyncio.create_task(striking).add_done_callback(asyncio.Task.exception)
        await asyncio.sleep(0)
        # These leave in the same write.
        t.at_b.calls[0].reply(Echo(b"kept"))
        t.at_b.calls[1].fail(NoWorker("there is none"))
        whole, cut, reset = (stream for stream, _ in t.at_b.streams)
        whole.end()
        assert cut.try_send(b"an item", last=True)
        reset.abort(NoWorker("there is none"))
        async with asyncio.timeout(10.0):
            results = await asyncio.gather(*asked, return_exceptions=True)
            ends = [await sink.end() for sink in sinks]
        assert t.at_a.downs[0][1].cause == "violation"
        assert results[0] == Echo(b"kept")
        assert [type(result) for result in results[1:]] == [NoWorker, LinkLost]
        assert [type(end) for end in ends] == [type(None), LinkLost, NoWorker]


@virtually
async def test_an_error_that_does_not_decode_ends_its_request_with_the_link() -> None:
    async with two() as t:
        asking = asyncio.create_task(t.link.request(HANG, Echo(), timeout=60.0))
        await t.at_b.until(lambda handler: bool(handler.calls))
        call = t.at_b.calls[0]
        assert isinstance(call, LinkCall)
        t.back.connection._put(FrameKind.ERROR, stream=call.id, body=b"\xc1")
        t.back.wake()
        async with asyncio.timeout(10.0):
            with pytest.raises(LinkLost):
                await asking
        assert t.at_a.downs[0][1].cause == "violation"


@virtually
async def test_who_waits_for_credit_learns_of_the_end_although_the_peer_has_ended_its_half() -> (
    None
):
    async with two() as t:
        t.at_b.window = 4096
        sink = RecordingStreamSink()
        stream = t.link.open_stream(1, b"", sink)
        await t.at_b.until(lambda handler: bool(handler.streams))
        t.at_b.streams[0][0].end()
        assert await sink.end() is None
        t.world.partition("a", "b")
        while stream.try_send(bytes(1000)):
            pass
        sending = asyncio.create_task(send_item(stream, bytes(1000), timeout=60.0))
        await asyncio.sleep(0.1)
        t.world.reset("a", "b")
        async with asyncio.timeout(10.0):
            with pytest.raises(LinkLost):
                await sending


@virtually
async def test_questions_of_an_unknown_method_are_no_strikes() -> None:
    async with two() as t:
        await refused(t, NoMethod("method 3 is not served by router nodes"), 10, NoMethod)
        assert t.link.down is None


@virtually
async def test_a_peer_of_an_earlier_release_is_asked_an_unknown_method_once() -> None:
    """It answers `ProtocolError`, and ends the link at the third."""
    async with two() as t:
        words = f"method {REFUSE.id} is not served by router nodes"
        await refused(t, ProtocolError(words), 5, NoMethod)
        assert t.link.down is None


@pytest.mark.parametrize("features", [0, PACKED_IDS])
def test_calls_and_answers_carry_prompts_in_that_form_too(features: int) -> None:
    kind = Method(0x7001, "a request and back", GenerateRequest, GenerateRequest)
    forms: list[object] = []
    asked = GenerateRequest(
        request_id="r",
        model="m",
        prompt=token_ids([7] * 3),
        sampling=SamplingParams(max_tokens=1),
    )

    def answer(call: IncomingCall) -> None:
        assert isinstance(call, LinkCall)
        forms.append(msgpack.unpackb(call.body)[2])
        call.reply(kind.decode_request(call.body))

    @virtually
    async def check() -> None:
        async with two(NetSettings(versions=Versions(features=features))) as nodes:
            nodes.at_b.on_request = answer  # type: ignore[method-assign]
            assert await nodes.link.request(kind, asked, timeout=1.0) == asked

    check()
    assert forms == [token_ids([7] * 3).tobytes() if features else [7] * 3]

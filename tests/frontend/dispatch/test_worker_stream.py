from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import msgpack
import pytest
from msgspec.structs import replace

from pdserve.errors import (
    Draining,
    EngineDied,
    LinkLost,
    Overloaded,
    PayloadTooLarge,
    PdserveError,
    ProtocolError,
    WorkerLost,
)
from pdserve.frontend.dispatch import worker_stream as module
from pdserve.frontend.dispatch.worker_stream import WorkerStream
from pdserve.messages.engine_errors import rejected_event
from pdserve.messages.request import Finish, GenerateRequest, SamplingParams, TokenDelta
from pdserve.messages.worker_stream import (
    WORKER_STREAM,
    AbortRequest,
    Fragment,
    FragmentAssembler,
    OpenRequest,
    OutputBatch,
    WorkerMigrationHint,
    split_message,
)
from pdserve.net.link_stream import LinkStream
from pdserve.net.settings import NetSettings
from pdserve.token_ids import token_ids
from pdserve.wire.codec import PACKED_IDS, decoder, encode
from pdserve.wire.handshake import Versions
from tests.net.world import two, virtually
from tests.support.net_support import RecordingStreamSink, send_item

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from pdserve.frontend.dispatch.worker_stream import RemoteSequence
    from pdserve.net.base import IncomingStream
    from pdserve.wire.parser import Buffer
    from tests.net.world import Two

_decode: Any = decoder(OpenRequest | AbortRequest | Fragment)  # type: ignore[arg-type]


def request(n: int = 1, prompt: int = 3) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=8)
    return GenerateRequest(
        request_id="r", model="m", prompt=token_ids([7] * prompt), sampling=sampling, n=n
    )


def delta(handle: int, *tokens: int, end: bool = False, choice: int = 0) -> TokenDelta:
    finish = Finish(reason="stop") if end else None
    return TokenDelta(handle=handle, choice=choice, tokens=list(tokens), finish=finish)


class Sink:
    """What reached one request, and how it ended."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.errors: list[PdserveError] = []
        self.outcomes: list[str] = []
        self.fault: Exception | None = None

    def on_delta(self, delta: TokenDelta) -> None:
        if self.fault is not None:
            raise self.fault
        self.tokens += delta.tokens

    def on_error(self, error: PdserveError) -> None:
        self.errors.append(error)
        if self.fault is not None:
            raise self.fault


class World:
    """A channel at `a`, and a worker at `b` that is played by hand."""

    def __init__(self, nodes: Two) -> None:
        self.nodes = nodes
        self.stream: LinkStream
        self.reader = RecordingStreamSink()
        self.window = 64 * 1024
        nodes.at_b.on_stream_hook = self._opened
        self.overs = 0
        self.channel = WorkerStream(nodes.link, nodes.a.timers)
        self.channel.on_over = self._over

    def _opened(self, stream: IncomingStream, method: int, body: Buffer) -> None:
        assert method == WORKER_STREAM
        assert isinstance(stream, LinkStream)
        self.stream = stream
        stream.accept(self.reader, window=self.window)

    def _over(self) -> None:
        self.overs += 1

    @property
    def heard(self) -> list[OpenRequest | AbortRequest]:
        """What the worker was told."""
        found: list[OpenRequest | AbortRequest] = []
        assembler = FragmentAssembler()
        for item in self.reader.items:
            message = _decode(item)
            if isinstance(message, Fragment):
                whole = assembler.take(message)
                if whole is None:
                    continue
                message = _decode(whole)
            found.append(message)
        return found

    @property
    def aborts(self) -> list[int]:
        return [message.number for message in self.heard if isinstance(message, AbortRequest)]

    def start(
        self, sink: Sink, *, timeout: float = 5.0, booking: int = 9, **details: int
    ) -> asyncio.Task[RemoteSequence]:
        opening = self.channel.open(
            request(**details), booking, sink, sink.outcomes.append, timeout=timeout
        )
        return asyncio.ensure_future(opening)

    async def open(self, sink: Sink, handle: int, **details: int) -> RemoteSequence:
        """A request that the worker takes at once."""
        task = self.start(sink, **details)
        await asyncio.sleep(0.01)
        number = max(m.number for m in self.heard if isinstance(m, OpenRequest))
        await self.say(accepted=[(number, handle)])
        return await task

    async def say(self, *deltas: TokenDelta, **fields: Any) -> None:
        for frame in split_message(encode(OutputBatch(list(deltas), **fields))):
            await send_item(self.stream, frame, timeout=5.0)
        await asyncio.sleep(0.01)


@asynccontextmanager
async def world(**fields: Any) -> AsyncIterator[World]:
    """Afterwards the channel holds nothing."""
    async with two() as nodes:
        made = World(nodes)
        for name, value in fields.items():
            setattr(made, name, value)
        await asyncio.sleep(0.01)
        yield made
        made.channel.close(Draining("the test is over"))
        assert made.overs == 1
        assert made.channel.requests == 0
        assert not made.channel._by_handle
        assert not made.channel._frames
        assert len(nodes.a.timers) < 5  # the links' own


@virtually
async def test_a_request_is_handed_on_and_its_tokens_come_back() -> None:
    async with world() as w:
        sink = Sink()
        await w.open(sink, 100)
        assert w.heard == [OpenRequest(1, 9, request())]
        await w.say(delta(100, 1), delta(100, 2, end=True))
        assert (sink.tokens, sink.outcomes, w.channel.requests) == ([1, 2], ["finished"], 0)


@virtually
async def test_an_answer_may_come_with_the_acceptance() -> None:
    async with world() as w:
        sink = Sink()
        task = w.start(sink)
        await asyncio.sleep(0.01)
        await w.say(delta(100, 1, end=True), accepted=[(1, 100)])
        sequence = await task
        assert (sink.tokens, sink.outcomes) == ([1], ["finished"])
        sequence.cancel()
        assert (sink.outcomes, w.aborts) == (["finished"], [])


@virtually
async def test_a_request_ends_with_its_last_choice() -> None:
    async with world() as w:
        sink = Sink()
        await w.open(sink, 100, n=2)
        await w.say(delta(100, 1, end=True, choice=1))
        assert sink.outcomes == []
        await w.say(delta(100, 2, end=True))
        assert sink.outcomes == ["finished"]


@virtually
async def test_what_the_engine_refuses_is_raised() -> None:
    async with world() as w:
        sink = Sink()
        task = w.start(sink)
        await asyncio.sleep(0.01)
        await w.say(rejected=[rejected_event(1, Overloaded("full", retry_after=3.0))])
        with pytest.raises(Overloaded) as caught:
            await task
        assert caught.value.retry_after == 3.0
        assert (sink.errors, sink.outcomes, w.aborts) == ([], [], [])


@virtually
async def test_a_later_failure_reaches_the_sink() -> None:
    async with world() as w:
        sink = Sink()
        await w.open(sink, 100)
        await w.say(delta(100, 1), rejected=[rejected_event(1, EngineDied("gone"))])
        assert (sink.tokens, [type(e) for e in sink.errors]) == ([1], [EngineDied])
        assert (sink.outcomes, w.channel.requests) == (["failed"], 0)


@virtually
async def test_cancelling_frees_the_worker_and_silences_the_sink() -> None:
    async with world() as w:
        sink = Sink()
        sequence = await w.open(sink, 100)
        sequence.cancel()
        sequence.cancel()
        await w.say(delta(100, 1))
        assert (w.aborts, sink.outcomes, sink.tokens) == ([1], ["cancelled"], [])


@virtually
async def test_a_worker_that_does_not_answer_in_time_is_told_to_forget_it() -> None:
    async with world() as w:
        sink = Sink()
        with pytest.raises(WorkerLost, match="does not answer") as caught:
            await w.start(sink, timeout=1.0)
        assert caught.value.retry_after is not None
        await asyncio.sleep(0.01)
        assert w.aborts == [1]
        await w.say(delta(100, 1, end=True), accepted=[(1, 100)])
        assert (sink.tokens, sink.outcomes, w.channel.requests) == ([], [], 0)


@virtually
async def test_an_acceptance_in_the_turn_of_the_timeout_is_too_late() -> None:
    """The request is placed elsewhere: its sink must not hear two workers."""
    async with world() as w:
        sink = Sink()
        task = w.start(sink, timeout=1.0)
        await asyncio.sleep(0.01)
        (sequence,) = w.channel._by_number.values()
        sequence.expire()
        w.channel.on_data(encode(OutputBatch([delta(100, 1)], [(1, 100)])))
        with pytest.raises(WorkerLost):
            await task
        w.channel.on_data(encode(OutputBatch([delta(100, 2)])))
        await asyncio.sleep(0.01)
        assert (sink.tokens, w.aborts) == ([], [1])


@virtually
async def test_cancelled_while_it_waits_the_worker_is_told() -> None:
    for accepted in (False, True):
        async with world() as w:
            sink = Sink()
            task = w.start(sink)
            await asyncio.sleep(0.01)
            if accepted:
                w.channel.on_data(encode(OutputBatch([], [(1, 100)])))
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await w.say(delta(100, 1))
            assert (w.aborts, sink.tokens, sink.outcomes) == ([1], [], [])


@virtually
async def test_a_lost_worker_ends_every_request_at_once() -> None:
    async with world() as w:
        running, waiting = Sink(), Sink()
        await w.open(running, 100)
        task = w.start(waiting)
        await asyncio.sleep(0.01)
        before = asyncio.get_running_loop().time()
        w.nodes.world.crash("b")
        with pytest.raises(WorkerLost):
            await task
        assert asyncio.get_running_loop().time() - before < 0.1
        assert [type(error) for error in running.errors] == [WorkerLost]
        assert (running.outcomes, waiting.errors, waiting.outcomes) == (["failed"], [], [])
        with pytest.raises(LinkLost) as caught:
            await w.start(Sink())
        assert not caught.value.sent


@virtually
async def test_a_worker_that_goes_away_says_why() -> None:
    async with world() as w:
        running = Sink()
        await w.open(running, 100)
        w.stream.abort(Draining("it goes", retry_after=2.0))
        await asyncio.sleep(0.01)
        assert [(type(e), e.retry_after) for e in running.errors] == [(Draining, 2.0)]


@virtually
async def test_a_channel_that_the_worker_cuts_is_a_worker_lost() -> None:
    """Another one may serve what was on it, whatever was wrong with the channel."""
    for error in (Overloaded("you do not read"), ProtocolError("what is that?")):
        async with world() as w:
            sink = Sink()
            await w.open(sink, 1)
            w.stream.abort(error)
            await asyncio.sleep(0.01)
            assert [type(e) for e in sink.errors] == [WorkerLost]
            assert error.message in sink.errors[0].message


@virtually
async def test_a_worker_may_ask_that_a_request_be_served_elsewhere() -> None:
    async with world() as w:
        heard: list[str] = []
        opening = w.channel.open(
            request(), 9, Sink(), lambda outcome: None, timeout=5.0, on_moving=heard.append
        )
        task = asyncio.ensure_future(opening)
        await asyncio.sleep(0.01)
        await w.say(accepted=[(1, 7)])
        await w.say(moving=[WorkerMigrationHint(1, "kv"), WorkerMigrationHint(2, "drain")])
        assert heard == ["kv"]
        (await task).cancel()
        await w.say(moving=[WorkerMigrationHint(1, "kv")])
        assert heard == ["kv"]


@virtually
async def test_choices_that_ended_before_are_not_waited_for() -> None:
    async with world() as w:
        sink = Sink()
        opening = w.channel.open(
            replace(request(n=3), ended=(0, 2)), 9, sink, sink.outcomes.append, timeout=5.0
        )
        task = asyncio.ensure_future(opening)
        await asyncio.sleep(0.01)
        await w.say(delta(7, 5, end=True, choice=1), accepted=[(1, 7)])
        await task
        assert (sink.outcomes, w.channel.requests) == (["finished"], 0)


@virtually
async def test_an_older_worker_that_goes_on_with_ended_choices_is_not_listened_to() -> None:
    async with world() as w:
        sink = Sink()
        past = replace(request(n=2), output=[[5], [6]], ended=(1,))
        opening = w.channel.open(past, 9, sink, sink.outcomes.append, timeout=5.0)
        task = asyncio.ensure_future(opening)
        await asyncio.sleep(0.01)
        (opened,) = w.heard
        await w.say(accepted=[(opened.number, 4)])
        await task
        await w.say(delta(4, 7, choice=1), delta(4, choice=1, end=True), delta(4, 8))
        assert (sink.tokens, sink.outcomes) == ([8], [])
        await w.say(delta(4, 9, end=True))
        assert (sink.tokens, sink.outcomes) == ([8, 9], ["finished"])
        await asyncio.sleep(0.01)
        assert w.aborts == [opened.number]  # it may still be at the other choice


@virtually
async def test_a_sink_that_raises_ends_its_own_request_alone() -> None:
    async with world() as w:
        bad, good = Sink(), Sink()
        bad.fault = ValueError("a fault")
        await w.open(bad, 100)
        await w.open(good, 101)
        await w.say(delta(100, 1), delta(101, 2))
        assert (bad.outcomes, w.aborts, good.tokens) == (["cancelled"], [1], [2])
        worse = Sink()
        worse.fault = ValueError("a fault")
        await w.open(worse, 102)
        w.nodes.world.crash("b")
        await asyncio.sleep(0.01)
        assert len(worse.errors) == len(good.errors) == 1


@virtually
async def test_what_is_no_message_ends_the_channel() -> None:
    nested = encode(Fragment(encode(Fragment(b"x", last=True)), last=True))
    for body in (b"\xc1", nested):
        async with world() as w:
            sink = Sink()
            await w.open(sink, 100)
            w.stream.try_send(body)
            await asyncio.sleep(0.01)
            assert [type(error) for error in sink.errors] == [WorkerLost]
            assert w.reader.ends


@virtually
async def test_large_requests_wait_for_credit_and_small_ones_keep_their_order() -> None:
    async with world() as w:
        w.nodes.world.pause("b")
        tasks = [w.start(Sink(), prompt=2_000_000), w.start(Sink())]
        await asyncio.sleep(0.01)
        assert w.channel._waiting > 0
        w.nodes.world.resume("b")
        await asyncio.sleep(0.5)
        opens = [m for m in w.heard if isinstance(m, OpenRequest)]
        assert [(m.number, len(m.request.prompt)) for m in opens] == [(1, 2_000_000), (2, 3)]
        assert w.channel._waiting == 0
        await w.say(accepted=[(1, 100), (2, 101)])
        await asyncio.gather(*tasks)


@virtually
async def test_a_worker_that_reads_nothing_is_overloaded_and_nobody_else_suffers() -> None:
    async with world() as w:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "_MOST_WAITING", 3_000_000)
            running = Sink()
            sequence = await w.open(running, 100)
            w.nodes.world.pause("b")
            tasks = [w.start(Sink(), prompt=1_200_000) for _ in range(3)]
            await asyncio.sleep(0.01)
            with pytest.raises(Overloaded) as caught:
                await w.start(Sink(), prompt=1_200_000)
            assert caught.value.retry_after is not None
            sequence.cancel()  # what ends requests always finds room
            assert w.channel.over is None
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            w.nodes.world.resume("b")
            await asyncio.sleep(0.5)
            assert w.channel.over is None
            assert 1 in w.aborts
            assert (w.channel._waiting, w.channel.requests) == (0, 0)


@virtually
async def test_what_waits_is_counted_rightly_while_there_is_always_more() -> None:
    """A bound on what waits must not become one on what was ever sent."""
    async with world() as w:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "_MOST_WAITING", 500_000)
            tasks = []
            for _ in range(30):
                tasks.append(w.start(Sink(), prompt=100_000))
                await asyncio.sleep(0.002)
            await asyncio.sleep(0.5)
            assert not any(task.done() for task in tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


@virtually
async def test_a_request_that_fits_no_message_is_refused() -> None:
    async with world() as w:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("pdserve.messages.worker_stream.MAX_MESSAGE_BYTES", 2_000_000)
            with pytest.raises(PayloadTooLarge):
                await w.start(Sink(), prompt=2_000_001)
        await w.open(Sink(), 100)
        assert w.channel.requests == 1


@virtually
async def test_a_retired_channel_ends_with_its_last_request() -> None:
    async with world() as w:
        sink, other = Sink(), Sink()
        await w.open(sink, 100)
        sequence = await w.open(other, 101)
        w.channel.retire()
        with pytest.raises(LinkLost, match="has replaced"):
            await w.start(Sink())
        await w.say(delta(100, 1))
        assert (sink.tokens, w.overs) == ([1], 0)
        await w.say(delta(100, 2, end=True))
        assert (sink.tokens, sink.outcomes, w.overs) == ([1, 2], ["finished"], 0)
        sequence.cancel()
        await asyncio.sleep(0.01)
        assert (w.overs, w.reader.ends) == (1, [None])


@virtually
async def test_an_idle_channel_retires_at_once() -> None:
    async with world() as w:
        w.channel.retire()
        await asyncio.sleep(0.01)
        assert (w.overs, w.reader.ends) == (1, [None])


@pytest.mark.parametrize("features", [0, PACKED_IDS])
def test_a_worker_gets_the_prompt_in_the_form_that_it_reads(features: int) -> None:
    @virtually
    async def check() -> None:
        async with two(NetSettings(versions=Versions(features=features))) as nodes:
            made = World(nodes)
            await asyncio.sleep(0.01)
            opening = made.start(Sink(), prompt=3)
            await asyncio.sleep(0.01)
            prompt = msgpack.unpackb(made.reader.items[0])[3][2]
            assert prompt == (token_ids([7] * 3).tobytes() if features else [7] * 3)
            made.channel.close(Draining("the test is over"))
            with pytest.raises(Draining):
                await opening

    check()

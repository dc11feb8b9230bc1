from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from pdserve.errors import (
    Draining,
    EngineError,
    Overloaded,
    ProtocolError,
)
from pdserve.messages import worker_stream as messages
from pdserve.messages.request import (
    Finish,
    FirstTokenStats,
    GenerateRequest,
    SamplingParams,
    TokenDelta,
    TokenLogprob,
)
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
from pdserve.token_ids import token_ids
from pdserve.wire.codec import decoder, encode
from pdserve.worker import request_streams as module
from pdserve.worker.request_streams import RequestStreams
from tests.net.world import two, virtually
from tests.support.net_support import RecordingStreamSink, send_item

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from pdserve.engine.port import TokenSink
    from pdserve.net.base import IncomingStream
    from pdserve.wire.parser import Buffer
    from tests.net.world import Two


_decode: Any = decoder(OutputBatch | Fragment)  # type: ignore[arg-type]


def request(
    name: str = "r", *, n: int = 1, prompt: int = 3, suspect: bool = False
) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=8)
    return GenerateRequest(
        request_id=name,
        model="m",
        prompt=token_ids([7] * prompt),
        sampling=sampling,
        n=n,
        suspect=suspect,
    )


class FakeEngine:
    """Does what the test says, when it says so."""

    def __init__(self) -> None:
        self.sinks: dict[int, TokenSink] = {}
        self.requests: dict[int, GenerateRequest] = {}
        self.aborted: list[int] = []
        self.refusal: Exception | None = None
        self.at_once: list[TokenDelta] = []
        """Said before `submit` returns."""

    def submit(self, request: GenerateRequest, sink: TokenSink) -> int:
        if self.refusal is not None:
            raise self.refusal
        handle = 100 + len(self.sinks)
        self.sinks[handle] = sink
        self.requests[handle] = request
        for delta in self.at_once:
            sink.on_delta(delta)
        return handle

    def abort(self, handle: int) -> None:
        self.aborted.append(handle)

    def say(self, handle: int, *tokens: int, end: bool = False, **fields: Any) -> None:
        finish = Finish(reason="stop") if end else None
        fields = {"choice": 0, "tokens": list(tokens), "finish": finish, **fields}
        self.sinks[handle].on_delta(TokenDelta(handle=handle, **fields))


class World:
    """A worker's channels at `b`, and a frontend at `a` that is played by hand."""

    def __init__(self, nodes: Two) -> None:
        self.nodes = nodes
        self.engine = FakeEngine()
        self.begun: list[int] = []
        self.ended: list[int] = []
        self.channels = RequestStreams(
            self.engine, on_begin=self.begun.append, on_end=self.ended.append
        )
        nodes.at_b.on_stream_hook = self._opened
        self.sink = RecordingStreamSink()
        self.stream = nodes.link.open_stream(WORKER_STREAM, b"", self.sink, window=1 << 20)

    def _opened(self, stream: IncomingStream, method: int, body: Buffer) -> None:
        self.channels.opened(stream, body)

    async def open(self, number: int, booking: int = 0, **details: Any) -> None:
        body = encode(OpenRequest(number, booking, request(**details)))
        for frame in split_message(body):
            await send_item(self.stream, frame, timeout=5.0)
        await asyncio.sleep(0.01)

    async def abort(self, number: int) -> None:
        self.stream.try_send(encode(AbortRequest(number)))
        await asyncio.sleep(0.01)

    @property
    def batches(self) -> list[OutputBatch]:
        found: list[OutputBatch] = []
        assembler = FragmentAssembler()
        for item in self.sink.items:
            message = _decode(item)
            if isinstance(message, Fragment):
                whole = assembler.take(message)
                if whole is None:
                    continue
                message = _decode(whole)
            assert isinstance(message, OutputBatch)
            found.append(message)
        return found

    @property
    def said(self) -> list[tuple[int, list[int]]]:
        return [(d.handle, d.tokens) for batch in self.batches for d in batch.deltas]

    @property
    def accepted(self) -> list[tuple[int, int]]:
        return [one for batch in self.batches for one in batch.accepted]

    @property
    def moving(self) -> list[WorkerMigrationHint]:
        return [one for batch in self.batches for one in batch.moving]

    @property
    def rejected(self) -> list[tuple[int, str]]:
        return [(one.handle, one.kind) for batch in self.batches for one in batch.rejected]


@asynccontextmanager
async def world() -> AsyncIterator[World]:
    """Afterwards no request and no booking is left."""
    async with two() as nodes:
        made = World(nodes)
        await asyncio.sleep(0.01)
        yield made
        nodes.link.abort()
        await asyncio.sleep(0.1)
        assert made.channels.requests == made.channels.choices == 0
        assert not made.channels._open
        assert sorted(made.begun) == sorted(made.ended)


@virtually
async def test_a_request_is_accepted_and_its_deltas_follow() -> None:
    async with world() as w:
        await w.open(1, booking=77)
        assert w.accepted == [(1, 100)]
        assert (w.channels.requests, w.channels.choices, w.begun) == (1, 1, [77])
        w.engine.say(100, 5)
        w.engine.say(100, 6, end=True)
        await asyncio.sleep(0.01)
        assert w.said == [(100, [5]), (100, [6])]
        assert len(w.batches) == 2  # one answer, then all of one turn together
        assert (w.channels.requests, w.ended, w.engine.aborted) == (0, [77], [])


@virtually
async def test_a_request_ends_with_its_last_choice() -> None:
    async with world() as w:
        await w.open(1, booking=7, n=2)
        w.engine.say(100, 5, end=True, choice=1)
        assert (w.channels.requests, w.channels.choices, w.ended) == (1, 1, [])
        w.engine.say(100, 5, end=True)
        assert (w.channels.requests, w.ended) == (0, [7])


@virtually
async def test_what_the_engine_refuses_is_rejected_by_number() -> None:
    async with world() as w:
        w.engine.refusal = Draining("going away")
        await w.open(1, booking=7)
        w.engine.refusal = ValueError("a fault")
        await w.open(2, booking=8)
        assert w.rejected == [(1, "Draining"), (2, "EngineError")]
        assert w.begun == []


@virtually
async def test_an_error_does_not_overtake_the_deltas_before_it() -> None:
    async with world() as w:
        await w.open(1, booking=7)
        w.engine.say(100, 5)
        w.engine.sinks[100].on_error(EngineError("broken"))
        await asyncio.sleep(0.01)
        assert (w.said, w.rejected) == ([(100, [5])], [(1, "EngineError")])
        assert w.ended == [7]


@virtually
async def test_an_abort_frees_everything_and_may_come_late() -> None:
    async with world() as w:
        await w.open(1, booking=7)
        await w.abort(1)
        assert (w.engine.aborted, w.ended) == ([100], [7])
        await w.abort(1)
        await w.abort(99)
        assert w.engine.aborted == [100]


@virtually
async def test_a_frontend_that_is_gone_frees_all_it_had() -> None:
    for end in ("link", "abort", "half"):
        async with world() as w:
            await w.open(1, booking=7)
            await w.open(2, booking=8)
            if end == "link":
                w.nodes.link.abort()
            elif end == "abort":
                w.stream.abort(Draining("the frontend goes"))
            else:
                w.stream.end()
            await asyncio.sleep(0.01)
            assert (sorted(w.engine.aborted), sorted(w.ended)) == ([100, 101], [7, 8])
            assert w.channels.requests == 0
            w.engine.say(100, 5)  # too late, and harmless
            await asyncio.sleep(0.01)
            if end == "half":
                assert w.sink.ends == [None]


@virtually
async def test_an_engine_may_answer_before_it_has_returned() -> None:
    async with world() as w:
        w.engine.at_once = [
            TokenDelta(handle=100, choice=0, tokens=[1], finish=Finish(reason="stop"))
        ]
        await w.open(1, booking=7)
        assert (w.accepted, w.said) == ([(1, 100)], [(100, [1])])
        assert (w.channels.requests, w.begun, w.ended) == (0, [7], [7])


@virtually
async def test_large_requests_and_answers_travel_in_pieces() -> None:
    async with world() as w:
        await w.open(1, prompt=3_000_000)
        assert len(w.engine.requests[100].prompt) == 3_000_000
        w.engine.say(100, *([70_000] * 1_000_000))
        await w.open(2)
        await asyncio.sleep(1.0)
        assert len(w.sink.items) > 4
        assert [len(tokens) for _, tokens in w.said] == [1_000_000]
        assert w.accepted == [(1, 100), (2, 101)]


@virtually
async def test_a_frontend_that_does_not_read_is_cut_off() -> None:
    async with world() as w:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "_MOST_WAITING", 100)
            patch.setattr(module, "_BATCH", 10)
            await w.open(1, booking=7)
            w.nodes.world.pause("a")
            for _ in range(50):  # frames first fill what the network holds, then the credit
                w.engine.say(100, *range(10_000))
                await asyncio.sleep(0.01)
                assert w.channels.requests == 1
            for _ in range(200):
                w.engine.say(100, *range(10_000))
            await asyncio.sleep(0.01)
            assert (w.channels.requests, w.engine.aborted, w.ended) == (0, [100], [7])
            w.nodes.world.resume("a")
            assert isinstance(await w.sink.end(), Overloaded)


@virtually
async def test_logprobs_that_nobody_reads_are_bounded_by_what_they_take() -> None:
    logprobs = [TokenLogprob(7, -1.0, 1, [(number, -2.0) for number in range(20)])]
    async with world() as w:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "_MOST_HEAVY", 100 * 21 * 128)
            await w.open(1, booking=7)
            channel = next(iter(w.channels._open))
            w.engine.say(100, 7, logprobs=logprobs)
            await asyncio.sleep(0.01)
            assert (len(w.said), channel.heavy) == (1, 0)
            channel._stream._wire.credit = 0  # type: ignore[attr-defined]
            for _ in range(100):
                w.engine.say(100, 7, logprobs=logprobs)
            await asyncio.sleep(0.01)
            assert w.channels.requests == 1
            w.engine.say(100, 7, prompt_logprobs=logprobs)
            await asyncio.sleep(0.01)
            assert (w.channels.requests, w.engine.aborted, w.ended) == (0, [100], [7])
            assert channel.heavy == 0
            assert isinstance(await w.sink.end(), Overloaded)


@virtually
async def test_refusals_that_nobody_reads_are_bounded_too() -> None:
    async with world() as w:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "_MOST_WAITING", 100)
            w.engine.refusal = Overloaded("full", retry_after=1.0)
            channel = next(iter(w.channels._open))
            channel._stream._wire.credit = 0  # type: ignore[attr-defined]
            for number in range(101):
                await w.open(number)
            assert isinstance(await w.sink.end(), Overloaded)


@virtually
async def test_what_is_no_message_ends_the_channel() -> None:
    for body in (b"\xc1", encode(OpenRequest(1, 0, request()))):
        async with world() as w:
            await w.open(1, booking=7)  # a number is used once
            w.stream.try_send(body)
            await asyncio.sleep(0.01)
            assert isinstance(await w.sink.end(), ProtocolError)
            assert (w.engine.aborted, w.ended) == ([100], [7])


@virtually
async def test_a_fault_in_the_worker_ends_the_channel_and_its_requests() -> None:
    """The link would end the stream alone, and the requests would run on."""
    async with world() as w:
        await w.open(1, booking=7)
        channel = next(iter(w.channels._open))

        def broken(number: int) -> None:
            raise RuntimeError("a fault")

        channel._abort = broken  # type: ignore[method-assign]
        await w.abort(1)
        assert isinstance(await w.sink.end(), EngineError)
        assert (w.engine.aborted, w.ended) == ([100], [7])


@virtually
async def test_a_delta_that_fits_no_message_ends_its_request_alone() -> None:
    async with world() as w:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(messages, "MAX_MESSAGE_BYTES", messages.FRAGMENT_BYTES + 1)
            await w.open(1, booking=7)
            await w.open(2, booking=8)
            w.engine.say(100, 5)
            w.engine.say(101, *([70_000] * 300_000))
            w.engine.say(100, *([70_000] * 150_000))
            w.engine.say(100, *([70_000] * 150_000))
            await asyncio.sleep(0.1)
            assert [len(t) for h, t in w.said if h == 100] == [1, 150_000, 150_000]
            last = [d for batch in w.batches for d in batch.deltas if d.handle == 101]
            assert [d.finish.reason for d in last if d.finish is not None] == ["error"]
            assert (w.engine.aborted, w.ended) == ([101], [8])


@virtually
async def test_closing_tells_every_frontend_why() -> None:
    async with world() as w:
        await w.open(1, booking=7)
        w.channels.close(Draining("the worker goes", retry_after=1.0))
        error = await w.sink.end()
        assert isinstance(error, Draining)
        assert error.retry_after == 1.0
        assert (w.engine.aborted, w.ended) == ([100], [7])


@virtually
async def test_requests_are_asked_to_move_by_handle_or_all_and_go_on_meanwhile() -> None:
    async with world() as w:
        for number in (1, 2, 3):
            await w.open(number, booking=number)
        assert w.channels.ask_to_move({101, 999}, "kv") == 1
        await asyncio.sleep(0.01)
        assert w.moving == [WorkerMigrationHint(2, "kv")]
        w.engine.say(100, 5)
        assert w.channels.ask_to_move(None, "drain") == 3
        await asyncio.sleep(0.01)
        assert w.moving[1:] == [WorkerMigrationHint(number, "drain") for number in (1, 2, 3)]
        assert w.said == [(100, [5])]
        assert w.channels.requests == 3


@virtually
async def test_who_is_asked_in_the_turn_it_came_has_heard_before_that_it_was_accepted() -> None:
    async with world() as w:

        def begin(booking: int) -> None:
            w.begun.append(booking)
            asyncio.get_running_loop().call_soon(w.channels.ask_to_move, None, "drain")

        w.channels._on_begin = begin
        await w.open(1, booking=1)
        heard = [(bool(b.accepted), bool(b.moving)) for b in w.batches]
        assert heard == [(True, False), (False, True)]


@virtually
async def test_idle_is_when_the_last_word_has_been_sent() -> None:
    async with world() as w:
        assert await w.channels.wait_idle(0.0)
        await w.open(1)
        await w.open(2)
        assert not await w.channels.wait_idle(1.0)
        waiting = [asyncio.ensure_future(w.channels.wait_idle(9.0)) for _ in range(2)]
        w.engine.say(100, 5, end=True)
        await asyncio.sleep(0.01)
        await w.abort(2)
        assert await asyncio.gather(*waiting) == [True, True]
        assert w.said == [(100, [5])]


@virtually
async def test_idle_is_when_the_last_frontend_has_gone() -> None:
    async with world() as w:
        await w.open(1)
        waiting = asyncio.ensure_future(w.channels.wait_idle(9.0))
        await asyncio.sleep(0.01)
        w.nodes.link.abort()
        assert await waiting


@virtually
async def test_of_those_that_workers_may_have_died_of_one_at_a_time_is_begun() -> None:
    async with world() as w:
        await w.open(1, suspect=True)
        await w.open(2, suspect=True)
        await w.open(3)
        assert sorted(w.engine.sinks) == [100, 101]
        (refused,) = [record for batch in w.batches for record in batch.rejected]
        assert (refused.handle, refused.kind) == (2, "Overloaded")
        w.engine.say(100, 5, started=FirstTokenStats(0, 0.0, 0.0, 0.0))
        await w.open(4, suspect=True)
        assert sorted(w.engine.sinks) == [100, 101, 102]
        await w.abort(4)
        await w.open(5, suspect=True)
        assert len(w.engine.sinks) == 4

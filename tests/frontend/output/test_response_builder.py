"""What whole answers and streams share: one end, timing, usage, faults that stay inside."""

from typing import Any

import pytest
from msgspec.structs import replace

from pdserve.errors import EngineDied, EngineError
from pdserve.frontend.model_registry import PreparedModel
from pdserve.frontend.output.full_response import FullResponseBuilder
from pdserve.frontend.output.response_memory import ResponseMemory
from pdserve.frontend.placement import Placement
from pdserve.frontend.plan import Prompt, RequestPlan
from pdserve.ids import NodeId
from pdserve.messages.request import (
    Finish,
    FirstTokenStats,
    GenerateRequest,
    SamplingParams,
    TokenDelta,
)
from pdserve.observe.metrics import Metrics
from pdserve.protocols.completion_responses import Served
from pdserve.token_ids import token_ids
from tests.frontend.support import card, tokens

MODEL = PreparedModel.from_card(card())


class Stream:
    def __init__(self):
        self.cancels = 0

        self.ended = []

    def cancel(self):
        self.cancels += 1

    def end_choice(self, choice):
        self.ended.append(choice)


def answer(prompts=1, n=1, **fields: Any):
    request = GenerateRequest(
        request_id="r",
        model="tiny",
        prompt=token_ids([5]),
        sampling=SamplingParams(max_tokens=9),
        n=n,
    )
    plan = RequestPlan(
        chat=True,
        model=MODEL,
        model_name="tiny",
        answer_id="chatcmpl-r",
        created=1,
        prompts=[Prompt(token_ids([5, 6])) for _ in range(prompts)],
        requests=[request] * prompts,
        n=n,
        **fields,
    )
    gathered = ResponseMemory(1 << 20, 1 << 20)
    return FullResponseBuilder(
        plan, Metrics().of_model("m"), 10.0, iter(range(11, 1000)).__next__, gathered
    )


def delta(choice=0, text="a", reason=None, **finish):
    end = Finish(reason=reason, **finish) if reason else None
    return TokenDelta(0, choice, tokens(text), end)


async def test_it_ends_when_every_choice_of_every_prompt_has():
    got = answer(prompts=2, n=2)
    for sink in got.sinks:
        for choice in (1, 0):
            assert not got.finished.done()
            sink.on_delta(delta(choice, reason="stop"))
    assert got.finished.result() is None
    assert got.completion_tokens == 4


async def test_time_to_the_first_token_counts_from_arrival():
    got = answer()
    got.sinks[0].on_delta(delta())
    got.sinks[0].on_delta(delta(text="bc", reason="stop"))
    assert got.metrics.time_to_first_token.sum == 1.0
    assert got.metrics.inter_token_latency.count == len(tokens("bc"))


async def test_cached_tokens_are_summed_over_prompts_once_known():
    got = answer(prompts=2)
    got.sinks[0].on_delta(delta(reason="stop", cached_tokens=2))
    assert got.usage().prompt_tokens_details is None
    got.sinks[1].on_delta(delta(reason="stop", cached_tokens=1))
    details = got.usage().prompt_tokens_details
    assert details is not None
    assert details.cached_tokens == 3
    assert got.usage().prompt_tokens == 4


async def test_usage_and_headers_tell_the_same_of_a_finished_answer():
    got = answer()
    got.sinks[0].on_placed(
        Placement(
            worker=NodeId("a"),
            router=NodeId("r"),
            policy="ttft",
            attempts=1,
            overlap_tokens=32,
            predicted_ttft=0.5,
            held=0.0,
        )
    )
    before = got.served()
    assert before is not None
    assert before.cached_tokens is None
    got.sinks[0].on_delta(delta(reason="stop", cached_tokens=2))
    told = got.usage(last=True).pdserve
    assert isinstance(told, Served)
    assert told.cached_tokens == 2
    assert told is got.served()
    assert b"x-pdserve-cached-tokens: 2\r\n" in got.served_lines()


@pytest.mark.parametrize("early", [False, True])
async def test_a_choice_that_a_stop_string_ended_is_not_wanted_any_more(early):
    """Early: its tokens came before it was known by what to say so."""
    got = answer(n=3, stops=("a",))
    stream = Stream()
    if not early:
        got.sinks[0].opened(stream)
    got.sinks[0].on_delta(delta(choice=1, text="a"))
    got.sinks[0].on_delta(delta(choice=2, text="b", reason="stop"))
    if early:
        got.sinks[0].opened(stream)
    assert (stream.ended, stream.cancels) == ([1], 0)
    got.sinks[0].on_delta(delta(choice=0, text="a"))
    assert (stream.ended, stream.cancels) == ([1], 1)


async def test_what_was_said_of_the_first_token_stays_when_another_worker_goes_on():
    got = answer()
    first = Placement(
        worker=NodeId("a"),
        router=NodeId("r"),
        policy="ttft",
        attempts=1,
        overlap_tokens=32,
        predicted_ttft=0.5,
        held=0.0,
    )
    later = replace(
        first,
        worker=NodeId("b"),
        policy="other",
        attempts=2,
        overlap_tokens=0,
        predicted_ttft=9.0,
        migrations=1,
    )
    (sink,) = got.sinks
    sink.on_placed(first)
    sink.on_delta(TokenDelta(0, 0, tokens("a"), started=FirstTokenStats(2, 0.1, 0.2, 0.2)))
    sink.on_placed(later)
    sink.on_delta(TokenDelta(0, 0, tokens("b"), started=FirstTokenStats(7, 0.7, 0.7, 0.7)))
    sink.on_delta(delta(reason="stop", cached_tokens=9, queue_seconds=9.0, prefill_seconds=9.0))
    told = got.usage(last=True).pdserve
    assert isinstance(told, Served)
    assert (told.worker, told.attempts, told.migrations) == ("b", 2, 1)
    assert (told.policy, told.overlap_tokens, told.predicted_ttft_ms) == ("ttft", 32, 500.0)
    assert (told.cached_tokens, told.queue_ms, told.prefill_ms) == (2, 100.0, 200.0)
    assert got.metrics.request_queue.sum == 0.1
    assert got.metrics.time_to_first_token.count == 1


async def test_a_choice_that_has_ended_hears_nothing_more():
    got = answer(stops=("a",))
    stream = Stream()
    got.sinks[0].opened(stream)
    got.sinks[0].on_delta(delta(text="a"))
    assert got.finished.done()
    assert stream.cancels == 1
    got.sinks[0].on_delta(delta(text="zzz"))
    assert got.completion_tokens == 1


async def test_a_prompt_that_ended_while_it_was_opened_is_freed():
    got = answer(stops=("a",))
    got.sinks[0].on_delta(delta(text="a"))
    stream = Stream()
    got.sinks[0].opened(stream)
    assert stream.cancels == 1


async def test_the_first_error_is_the_outcome():
    got = answer()
    got.sinks[0].on_error(EngineDied("first"))
    got.sinks[0].on_error(EngineDied("second"))
    with pytest.raises(EngineDied, match="first"):
        got.finished.result()


async def test_a_fault_while_answering_does_not_reach_the_engine(caplog):
    got = answer(stops=("x",))
    got.sinks[0].on_delta(TokenDelta(0, 0, ["no token"]))  # type: ignore[list-item]
    assert isinstance(got.finished.exception(), EngineError)
    assert "answering failed [r]" in caplog.text

"""What whole answers and streams share: one end, timing, usage, faults that stay inside."""

from typing import Any

import pytest

from pdserve.errors import EngineDied, EngineError
from pdserve.frontend.gathered import Gathered
from pdserve.frontend.models import ServedModel
from pdserve.frontend.plan import Plan, Prompt
from pdserve.frontend.unary import UnaryAnswer
from pdserve.messages.request import Finish, GenerateRequest, SamplingParams, TokenDelta
from pdserve.observe.metrics import Metrics
from tests.frontend.support import card, tokens

MODEL = ServedModel.from_card(card())


class Stream:
    def __init__(self):
        self.cancels = 0

    def cancel(self):
        self.cancels += 1


def answer(prompts=1, n=1, **fields: Any):
    request = GenerateRequest(
        request_id="r", model="tiny", prompt=[5], sampling=SamplingParams(max_tokens=9), n=n
    )
    plan = Plan(
        chat=True,
        model=MODEL,
        model_name="tiny",
        answer_id="chatcmpl-r",
        created=1,
        prompts=[Prompt([5, 6]) for _ in range(prompts)],
        requests=[request] * prompts,
        n=n,
        **fields,
    )
    gathered = Gathered(1 << 20, 1 << 20)
    return UnaryAnswer(plan, Metrics(), 10.0, iter(range(11, 1000)).__next__, gathered)


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

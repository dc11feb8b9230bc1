"""Requests at the engine: order, ends, failures, cancels and deaths."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest

from pdserve.clock import ManualClock
from pdserve.errors import EngineDied
from pdserve_engines.tensorrt_llm.core import CANCEL_LIMIT
from tests.engines.tensorrt_llm.driver import Driver
from tests.engines.tensorrt_llm.fake_llm import FakeLlm, FakeLlm14, RequestError, RequestOutput

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def core(tmp_path) -> Iterator[Driver]:
    with Driver(tmp_path) as driver:
        yield driver


@pytest.fixture
def core_14(tmp_path) -> Iterator[Driver]:
    with Driver(tmp_path, FakeLlm14, max_sequences=1) as driver:
        yield driver


def test_usage_and_reason_are_those_of_our_rules(core) -> None:
    tokens = core.complete(max_tokens=6)
    finish = core.finishes[1, 0]
    assert (finish.reason, finish.prompt_tokens, finish.completion_tokens) == ("length", 3, 6)
    core.complete(max_tokens=6, output=[tokens[:4]])
    again = core.finishes[2, 0]
    assert (again.prompt_tokens, again.completion_tokens) == (3, 6)
    assert core.tokens[2, 0] == tokens[4:]


def test_the_last_token_may_be_a_stop_token(core) -> None:
    """TensorRT-LLM says `length` then."""
    tokens = core.complete()
    core.complete(max_tokens=3, stop_token_ids=(tokens[2],))
    assert core.finishes[2, 0].stop_reason == tokens[2]


def test_several_tokens_per_answer_end_where_the_rules_say(core, monkeypatch) -> None:
    tokens = core.complete(max_tokens=9)
    monkeypatch.setattr(core.llm, "per_answer", 4, raising=False)
    assert core.complete(max_tokens=9) == tokens
    assert core.complete(max_tokens=7) == tokens[:7]
    assert (
        core.complete(max_tokens=9, stop_token_ids=(tokens[5],))
        == tokens[: tokens.index(tokens[5]) + 1]
    )


def test_until_min_tokens_no_end_token_is_sampled(core) -> None:
    tokens = core.complete()
    ends = tuple(tokens[:4])
    made = core.complete(stop_token_ids=ends, min_tokens=5, max_tokens=12)
    assert not set(made[:5]) & set(ends)
    assert core.tokens[2, 0] == made
    assert len(core.llm.requests) == 3  # one, and two parts
    assert len(made) > 5


def test_other_choices_find_the_firsts_prompt_in_the_cache(core) -> None:
    prompt = [1 + i % 50 for i in range(25)]
    handle = core.submit(core.request(prompt=prompt, n=3, temperature=1.0, seed=4))
    core.until(lambda: len(core.finishes) == 3)
    cached = [core.starts[handle, choice].cached_tokens for choice in range(3)]
    assert cached == [0, 24, 24]
    texts = {tuple(core.tokens[handle, choice]) for choice in range(3)}
    assert len(texts) == 3


def test_higher_priorities_go_first_and_equal_ones_in_order(core_14) -> None:
    core_14.hold()
    running = core_14.submit(core_14.request())
    core_14.wait_for(lambda: core_14.llm.running == 1)
    later = [core_14.submit(core_14.request(priority=p)) for p in (-5, 0, 7, 7, 100)]
    core_14.wait_for(lambda: len(core_14.llm.waiting) == 5)
    core_14.go()
    core_14.until(lambda: len(core_14.finishes) == 6)
    order = [handle for handle, _ in core_14.finishes]
    assert order == [running, later[4], later[2], later[3], later[1], later[0]]


def test_tenants_salts_reach_the_engine(core) -> None:
    core.complete(cache_salt="a")
    core.complete()
    assert [request.salt for request in core.llm.requests] == ["a", None]


def test_a_request_that_fails_ends_alone(core) -> None:
    core.hold()
    core.llm.faults[1, 2, 3] = RequestError("no room")
    bad = core.submit(core.request(prompt=[1, 2, 3]))
    good = core.submit(core.request())
    core.go()
    assert core.failed(bad).kind == "StepFailed"
    assert "no room" in core.errors[bad].message
    core.until(lambda: (good, 0) in core.finishes)


def test_a_choice_that_fails_ends_its_siblings(core) -> None:
    tokens = core.complete(temperature=1.0, seed=1, n=1)
    core.hold()
    handle = core.submit(core.request(n=2, output=[tokens[:2], tokens[:1]], temperature=1.0))
    core.wait_for(lambda: len(core.llm.requests) == 3)
    core.llm.faults[17, 42, 8, tokens[0]] = RequestError("no room")
    core.go()
    core.failed(handle)
    core.wait_for(lambda: core.llm.running == 0)
    assert core.core.waiting == 0
    assert core.core.sequences == 0
    assert any(request.cancelled for request in core.llm.requests)


@pytest.mark.parametrize(
    ("reason", "text"),
    [
        ("timeout", "timeout"),
        ("cancelled", "cancelled the request"),
        ("fresh", "without a known reason"),
        (None, "without a known reason"),
    ],
)
def test_an_end_that_is_none_is_an_error(core, monkeypatch, reason, text) -> None:
    """Whatever else TensorRT-LLM says at the end, the answer is not passed off as complete."""

    def end(result, said) -> None:
        result.finished = True
        result.outputs[0].finish_reason = reason
        result.llm.leave(result)

    monkeypatch.setattr("tests.engines.tensorrt_llm.fake_llm.RequestOutput._end", end)
    rejected = core.failed(
        core.submit(core.request(stop_token_ids=(63,), max_tokens=4, min_tokens=2))
    )
    assert rejected.kind == "StepFailed"
    assert text in rejected.message


def test_a_stop_that_no_rule_knows_does_not_end_the_answer(core, monkeypatch) -> None:
    """Newer releases add the checkpoint's end tokens, which a request may ignore."""
    tokens = core.complete(max_tokens=10)
    plain = RequestOutput._stop

    def eager(result, output, token) -> None:
        if token == tokens[3] and len(output.token_ids) < result.room:
            result._end("stop")
        else:
            plain(result, output, token)

    monkeypatch.setattr("tests.engines.tensorrt_llm.fake_llm.RequestOutput._stop", eager)
    assert core.complete(max_tokens=10) == tokens


def test_a_grammar_that_is_complete_ends_the_answer(core, monkeypatch) -> None:
    monkeypatch.setattr(
        "tests.engines.tensorrt_llm.fake_llm.RequestOutput._stop",
        lambda result, output, token: result._end("stop"),
    )
    assert len(core.complete(grammar="start: /a/")) == 1
    assert core.finishes[1, 0].reason == "stop"
    assert core.llm.requests[0].params.guided_decoding.grammar == "start: /a/"


# -------------------------------------------------------------------- aborts


def test_an_abort_reaches_the_engine_and_leaves_nothing(core) -> None:
    core.hold()
    handle = core.submit(core.request(n=2, temperature=1.0))
    core.wait_for(lambda: core.llm.running == 1)
    core.abort(handle)
    core.wait_for(lambda: core.llm.requests[0].cancelled)
    core.go()
    core.wait_for(lambda: core.llm.running == 0)
    assert len(core.llm.requests) == 1  # the other choice was never submitted
    assert core.core.waiting == 0
    assert core.core._requests._submissions == {}
    core.complete()
    assert (handle, 0) not in core.tokens


def test_an_abort_before_the_engine_heard_of_it_submits_nothing(core) -> None:
    def both() -> None:
        handle = core.submit(core.request())
        core.abort(handle)

    core.in_loop(both)
    core.complete()
    assert len(core.llm.requests) == 1


def test_what_ends_by_our_rules_is_cancelled_there(core, monkeypatch) -> None:
    """A stop token that the engine does not know of."""
    tokens = core.complete()
    monkeypatch.setattr(
        "pdserve_engines.tensorrt_llm.requests.sampling_arguments",
        lambda *given: {"max_tokens": 50, "temperature": 0.0, "end_id": -1},
    )
    assert core.complete(stop_token_ids=(tokens[3],)) == tokens[:4]
    core.wait_for(lambda: core.llm.running == 0)
    assert core.llm.requests[-1].cancelled


def test_an_unhealthy_transfer_ends_the_core(core, monkeypatch) -> None:
    """Should a release answer `abort`: only a new engine helps then."""
    monkeypatch.setattr(RequestOutput, "abort", lambda result: "BackendUnhealthy")
    core.hold()
    handle = core.submit(core.request())
    core.wait_for(lambda: core.llm.running == 1)
    core.abort(handle)
    core.until(lambda: core.failure is not None)
    assert "unhealthy" in core.failure.message


def test_an_engine_that_does_not_end_a_cancelled_request_is_broken(tmp_path) -> None:
    clock = ManualClock()
    with Driver(tmp_path, clock=clock) as core:
        core.hold()
        handle = core.submit(core.request())
        core.wait_for(lambda: core.llm.running == 1)
        woken = threading.Event()
        core.core.wake = woken.set
        core.abort(handle)
        core.wait_for(lambda: core.llm.requests[0].cancelled)
        assert woken.wait(10.0)  # an idle core would sleep past the limit otherwise
        assert core.core.wake_at() == CANCEL_LIMIT
        clock.advance(CANCEL_LIMIT - 1)
        core.step()
        clock.advance(1)
        with pytest.raises(EngineDied, match="cancelled request"):
            core.step()


# -------------------------------------------------------------------- deaths


def test_an_engine_that_breaks_down_ends_the_core_once(core) -> None:
    core.hold()
    for _ in range(3):
        core.submit(core.request())
    core.wait_for(lambda: core.llm.running == 3)
    core.llm.broken = RuntimeError("Executor worker died")
    core.go()
    core.until(lambda: core.failure is not None)
    assert core.failure.kind == "EngineDied"
    assert "Executor worker died" in core.failure.message
    assert core.errors == {}
    assert core.core.waiting == 0


def test_a_shut_down_engine_ends_the_core(core) -> None:
    core.llm.down = True
    core.submit(core.request())
    core.until(lambda: core.failure is not None)
    assert "shutting down" in core.failure.message


def test_refusals_are_by_name_and_inexact_requests_are_counted(core, caplog) -> None:
    handle = core.submit(core.request(presence_penalty=1.0))
    core.until(lambda: handle in core.errors)
    assert core.errors[handle].param == "presence_penalty"
    assert core.core.inexact == {}
    core.complete(presence_penalty=1.0, output=[[5]])
    core.complete(presence_penalty=1.0, output=[[5]])
    assert core.core.inexact == {"presence_penalty": 2}
    assert core.core.stats().inexact_continuations == 2
    assert caplog.text.count("not exact in 'presence_penalty'") == 1


# -------------------------------------------------------------------- statistics and events


def test_statistics_of_the_pool_are_read(core) -> None:
    core.complete()
    core.wait_for(lambda: core.core.stats().blocks_total == FakeLlm.pool_blocks)
    stats = core.core.stats()
    assert (stats.blocks_used, stats.blocks_free) == (0, FakeLlm.pool_blocks)


def test_lost_events_clear_the_pool(core) -> None:
    prompt = [1 + i % 50 for i in range(25)]
    core.complete(prompt=prompt)
    core.until(lambda: len(core.kv_events) >= 3)
    core.in_loop(lambda: setattr(core.llm, "next_event", core.llm.next_event + 1))
    core.complete(prompt=prompt[1:])
    core.until(lambda: any(type(event).__name__ == "PoolCleared" for event in core.kv_events))


def test_the_capabilities_name_what_is_less(tmp_path) -> None:
    class Unknown(FakeLlm):
        release = "1.9.0"

    with Driver(tmp_path, Unknown) as core:
        assert "TensorRT-LLM 1.9.0 is untested" in core.capabilities.untested
    with Driver(tmp_path) as core:
        assert (core.capabilities.reduced, core.capabilities.untested) == ("", "")
        assert core.capabilities.features == ("grammar", "bans")


def test_a_feed_that_fails_is_tried_again_and_the_pool_relearned(core, monkeypatch, caplog) -> None:
    monkeypatch.setattr("pdserve_engines.tensorrt_llm.core._RETRY", 0.01)
    core.complete(prompt=[1 + i % 40 for i in range(25)])
    core.until(lambda: len(core.kv_events) >= 3)
    looks: list[int] = []
    plain = FakeLlm.get_kv_cache_events_async

    def look(llm: FakeLlm, timeout: float = 2) -> Any:
        looks.append(1)
        if len(looks) < 3:
            raise RuntimeError("not now")
        return plain(llm, timeout)

    monkeypatch.setattr(FakeLlm, "get_kv_cache_events_async", look)
    core.until(lambda: any(type(event).__name__ == "PoolCleared" for event in core.kv_events))
    core.kv_events.clear()
    core.complete(prompt=[2 + i % 40 for i in range(25)])
    core.until(lambda: any(type(event).__name__ == "BlockStored" for event in core.kv_events))
    assert caplog.text.count("TensorRT-LLM gives no KV events: not now") == 1
    assert core.failure is None

"""What is counted of a request at its end."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pdserve.errors import DeadlineExceeded, EngineDied, NoWorker, Overloaded
from pdserve.frontend.placement import Placement
from pdserve.ids import NodeId
from tests.frontend.support import HELLO, MODEL, frontend, tokens, until
from tests.support.fake_backend import Script


def finished(client) -> dict[str, float]:
    assert {model for (model, _), _ in client.service.metrics.finished} <= {MODEL}
    return {reason: count.value for (_, reason), count in client.service.metrics.finished}


async def test_each_choice_has_its_finish_reason():
    async with frontend(Script(tokens=tokens("abc"))) as client:
        await client.chat(max_tokens=3, n=2)
        await client.chunks(max_tokens=3)
        await client.chunks(max_tokens=3, logprobs=True, stop="b")
        assert finished(client) == {"length": 3, "stop": 1}


async def test_tokens_that_were_cached_and_the_time_of_decoding_are_told_apart():
    async with frontend(Script(tokens=tokens("abc"), cached_tokens=2)) as client:
        answer = await client.chat(max_tokens=3)
        metrics = client.service.metrics.of_model(MODEL)
        prompt = answer["usage"]["prompt_tokens"]
        assert metrics.request_prompt_tokens.sum == prompt
        assert metrics.request_uncached_tokens.sum == prompt - 2
        assert metrics.request_decode.count == 1
        assert 0 < metrics.request_decode.sum < metrics.e2e_request_latency.sum


# ---------------------------------------------------------------------- objectives


def judged(client) -> dict[tuple[str, ...], float]:
    return {labels: count.value for labels, count in client.service.metrics.slo}


def bounds(family) -> set[float]:
    return {bound for _, histogram in family for bound in histogram.bounds}


async def test_requests_are_judged_by_their_models_objectives():
    limits: Any = {"slo_ttft": {"": 60.0, "another": 1e-9}, "slo_itl": {MODEL: 1e-9}}
    async with frontend(Script(tokens=tokens("abc"), interval=0.001), **limits) as client:
        await client.chat(max_tokens=3)
        await client.chunks(max_tokens=1)
        await client.post("/v1/chat/completions", {"messages": 7})
        assert judged(client) == {
            (MODEL, "ttft", "good", ""): 2,
            (MODEL, "itl", "bad", "decode"): 1,
            (MODEL, "itl", "none", ""): 1,
            (MODEL, "both", "bad", "decode"): 1,
            (MODEL, "both", "good", ""): 1,
            ("", "ttft", "none", ""): 1,
            ("", "both", "none", ""): 1,
        }
        metrics = client.service.metrics
        assert bounds(metrics.time_to_first_token) >= {60.0, 1e-9}
        assert bounds(metrics.inter_token_latency) >= {1e-9}


def placed(**numbers: Any) -> Placement:
    usual: Any = {"attempts": 1, "overlap_tokens": 0, "predicted_ttft": None, "held": 0.0}
    return Placement(worker=NodeId("w"), router=NodeId("r"), policy="ttft", **(usual | numbers))


@pytest.mark.parametrize(
    ("placement", "cause"),
    [
        (None, "frontend"),
        (placed(), "frontend"),
        (placed(held=5.0), "held"),
        (placed(attempts=2), "moved"),
    ],
)
async def test_the_cause_of_a_late_first_token_is_what_took_longest(placement, cause):
    script = Script(tokens=tokens("abc"), placement=placement, hold_open=0.05)
    async with frontend(script, slo_ttft={"": 1e-9}) as client:
        await client.chat(max_tokens=1)
        assert judged(client) == {
            (MODEL, "ttft", "bad", cause): 1,
            (MODEL, "both", "bad", cause): 1,
        }


async def test_the_cause_of_a_slow_stream_is_a_move_if_that_took_longest():
    async with frontend(Script(tokens=tokens("abc")), slo_itl={"": 1e-9}) as client:
        await client.chat(max_tokens=300)
        asked = asyncio.ensure_future(client.chat(max_tokens=300))
        await until(lambda: len(client.backend.streams) == 2)
        client.backend.streams[-1].moved = 60.0
        await asked
        assert judged(client)[MODEL, "itl", "bad", "decode"] == 1
        assert judged(client)[MODEL, "itl", "bad", "moved"] == 1


async def test_what_the_server_refuses_or_fails_is_bad():
    scripts = [Script(refuse=NoWorker("none")), Script(tokens=[5], fail=EngineDied("x"))]
    waiting = iter(scripts)
    async with frontend(lambda request: next(waiting), slo_ttft={"": 60.0}) as client:
        for _ in scripts:
            status, _, _ = await client.post("/v1/chat/completions", HELLO)
            assert status >= 500
        assert judged(client) == {
            (MODEL, "ttft", "bad", "error"): 2,
            (MODEL, "both", "bad", "error"): 2,
        }
        assert finished(client) == {"error": 1}


async def test_what_is_refused_before_its_body_is_read_counts_too():
    async with frontend(slo_ttft={"": 60.0}, max_in_flight=1) as client:
        client.service._active_requests.draining = True
        status, _, _ = await client.post("/v1/chat/completions", HELLO)
        client.service._active_requests.draining = False
        assert status == 503
        ended = {labels: count.value for labels, count in client.service.metrics.requests}
        assert ended == {("", "unavailable"): 1}
        assert judged(client) == {("", "ttft", "bad", "error"): 1, ("", "both", "bad", "error"): 1}


async def test_without_objectives_nothing_is_judged():
    async with frontend(Script(tokens=tokens("abc"))) as client:
        await client.chat(max_tokens=3)
        assert judged(client) == {}


# ---------------------------------------------------------------------- what routers are told


async def test_a_router_is_told_of_each_request_once_with_its_verdicts_and_lengths():
    limits: Any = {"slo_ttft": {"": 60.0}, "slo_itl": {"": 1e-9}}
    script = Script(tokens=tokens("abc"), interval=0.001, cached_tokens=2)
    async with frontend(script, **limits) as client:
        answer = await client.chat(max_tokens=3)
        await client.chunks(max_tokens=1)
        slow, short = client.backend.ended
        assert slow.model == client.backend.requests[0].model
        assert slow.complete
        assert dict(slow.verdicts) == {"ttft": "", "itl": "decode", "both": "decode"}
        assert dict(short.verdicts) == {"ttft": "", "both": ""}
        assert slow.prompt_tokens == answer["usage"]["prompt_tokens"]
        assert (slow.cached_tokens, slow.output_tokens) == (2, 3)
        assert slow.decode > 0
        assert short.decode == 0
        assert client.backend.unplaced == []


async def test_a_stop_string_and_several_choices_end_a_request_once():
    async with frontend(Script(tokens=tokens("abc")), slo_ttft={"": 60.0}) as client:
        await client.chunks(max_tokens=3, logprobs=True, stop="b")
        await client.chat(max_tokens=3, n=2)
        stopped, two = client.backend.ended
        assert stopped.complete
        assert dict(stopped.verdicts) == {"ttft": "", "both": ""}
        assert two.output_tokens == 6


async def test_without_objectives_lengths_are_told_and_nothing_of_failures():
    waiting = iter([Script(tokens=tokens("abc")), Script(refuse=Overloaded("full"))])
    async with frontend(lambda request: next(waiting)) as client:
        await client.chat(max_tokens=3)
        await client.post("/v1/chat/completions", HELLO)
        (told,) = client.backend.ended
        assert (told.output_tokens, told.verdicts) == (3, ())
        assert client.backend.unplaced == []


@pytest.mark.parametrize(
    ("refusal", "cause"),
    [
        (Overloaded("full"), "held"),
        (DeadlineExceeded("too late"), "held"),
        (NoWorker("none"), "error"),
    ],
)
async def test_a_request_without_a_worker_has_missed_its_objectives(refusal, cause):
    async with frontend(Script(refuse=refusal), slo_ttft={"": 60.0}) as client:
        await client.post("/v1/chat/completions", HELLO)
        (told,) = client.backend.unplaced
        assert dict(told.verdicts) == {"ttft": cause, "both": cause}
        assert not told.complete
        assert client.backend.ended == []


async def test_a_request_that_its_worker_fails_has_missed_its_objectives():
    script = Script(tokens=[5], fail=EngineDied("x"))
    async with frontend(script, slo_ttft={"": 60.0}) as client:
        await client.post("/v1/chat/completions", HELLO)
        (told,) = [*client.backend.ended, *client.backend.unplaced]
        assert dict(told.verdicts) == {"ttft": "error", "both": "error"}
        assert not told.complete


async def test_a_request_that_its_client_left_has_no_verdict():
    script = Script(tokens=tokens("abc"), silent_after=1)
    async with frontend(script, slo_ttft={"": 60.0}) as client:
        asked = asyncio.ensure_future(client.chat(max_tokens=3))
        await until(lambda: client.backend.streams and client.backend.streams[0].output(0))
        asked.cancel()
        await until(lambda: bool(client.backend.ended))
        (told,) = client.backend.ended
        assert (told.verdicts, told.complete) == ((), False)
        assert client.backend.unplaced == []


async def test_errors_of_clients_are_not_told():
    async with frontend(slo_ttft={"": 60.0}) as client:
        await client.post("/v1/chat/completions", {"messages": 7})
        assert client.backend.unplaced == []

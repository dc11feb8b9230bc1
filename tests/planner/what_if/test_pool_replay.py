"""Where the model of a pool places requests, and that each one ends."""

from __future__ import annotations

from math import inf
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from pdserve.perf_model.latency_model import LatencyModel
from pdserve.planner.what_if.engine_model import ModelledRequest
from pdserve.planner.what_if.pool_replay import PoolReplay
from pdserve.planner.what_if.records import MODES, CandidatePool, CandidateWorker, Handoffs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.messages.handoff import Disagg

MODEL = LatencyModel(0.002, 25e-6, 1e-10, 0.006, 10e-6, 5e-8, fitted=True)
ALWAYS = Handoffs("always", latency=0.003, token=2e-6)


def worker(mode: str, **fields: Any) -> CandidateWorker:
    return CandidateWorker(mode=mode, **fields)  # type: ignore[arg-type]


def replayed(
    workers: Sequence[CandidateWorker],
    requests: Sequence[ModelledRequest],
    handoffs: Handoffs = ALWAYS,
) -> PoolReplay:
    pool = CandidatePool("test", tuple(workers))
    replay = PoolReplay(pool, MODEL, handoffs, requests, lambda streams: [50] * streams)
    replay.run()
    return replay


def test_requests_spread_over_idle_workers():
    requests = [ModelledRequest(0.0, 4000, 0, 2) for _ in range(3)]
    replayed([worker("aggregated")] * 3, requests)
    assert [one.first for one in requests] == [pytest.approx(requests[0].first)] * 3


def test_held_requests_begin_with_the_shortest():
    requests = [ModelledRequest(0.01 * n, length, 0, 1) for n, length in enumerate((30_000,) * 3)]
    short = ModelledRequest(0.05, 100, 0, 1)
    replayed([worker("aggregated")], [*requests, short])
    assert requests[0].first <= short.first < requests[1].first
    assert requests[1].begun >= requests[0].first - 0.1


def test_a_prompt_is_computed_by_a_prefill_worker_and_moves():
    request = ModelledRequest(0.0, 4000, 0, 3)
    replay = replayed([worker("prefill"), worker("decode")], [request])
    own = MODEL.prefill(4000) + 2 * MODEL.step_sequence
    assert request.computed == pytest.approx(own, rel=0.02)
    assert request.first == pytest.approx(request.computed + 0.003 + 2048 * 2e-6)
    prefill, decode = replay.engines
    assert prefill.computing == pytest.approx(own, rel=0.02)
    assert decode.computing < 0.02


def test_a_slow_link_delays_the_first_token_by_the_whole_prompt():
    request = ModelledRequest(0.0, 8000, 0, 3)
    replayed([worker("prefill"), worker("decode")], [request], Handoffs("always", token=1e-4))
    assert request.first == pytest.approx(8000 * 1e-4, rel=0.02)


def test_links_carry_one_prompt_after_the_other():
    requests = [ModelledRequest(0.0, 1000, 0, 3) for _ in range(4)]
    workers = [worker("prefill") for _ in range(4)]
    replayed([*workers, worker("decode")], requests, Handoffs("always", token=1e-4))
    assert max(one.first for one in requests) > 4 * 1000 * 1e-4


@pytest.mark.parametrize(
    ("disagg", "length", "away"),
    [
        ("always", 100, True),
        ("rule", 100, False),
        ("rule", 4000, True),
        ("never", 4000, False),
        ("predict", 4000, True),
    ],
)
def test_the_rule_says_where_a_prompt_is_computed(disagg: Disagg, length: int, away: bool):
    """Twenty streams run at the decode worker, so a long prompt is sooner elsewhere."""
    request = ModelledRequest(0.05, length, 0, 2)
    decode = worker("decode", streams=20, stream_tokens=4000)
    handoffs = Handoffs(disagg, latency=0.003, token=2e-6)
    replay = replayed([worker("prefill"), decode], [request], handoffs)
    assert (replay.engines[0].computing > 0) == away


def test_a_full_prefill_queue_keeps_prompts_where_they_are():
    requests = [ModelledRequest(0.0, 4000, 0, 2) for _ in range(20)]
    workers = [worker("prefill"), worker("decode"), worker("decode")]
    replay = replayed(workers, requests, Handoffs("rule", max_queue=2))
    assert all(engine.computing > 0.2 for engine in replay.engines)


def test_a_prompt_that_waits_too_long_is_computed_at_home():
    requests = [ModelledRequest(0.0, 30_000, 0, 2) for _ in range(6)]
    replay = replayed([worker("prefill"), worker("decode")], requests, Handoffs("rule"))
    assert all(one.end > 0 for one in requests)
    assert replay.engines[1].computing > MODEL.prefill(30_000)


def test_a_prompt_waits_for_kv_where_it_will_be_decoded():
    requests = [ModelledRequest(0.0, 900, 0, 300), ModelledRequest(0.0, 900, 0, 2)]
    replayed([worker("prefill"), worker("decode", kv_tokens=1500)], requests)
    assert requests[1].asked > 1.0
    assert requests[1].asked - requests[1].placed > requests[1].begun - requests[1].asked


def test_prompts_without_a_reservation_are_on_their_way_too():
    """The KV of each prompt takes 2 s to move, and is kept for two of them at once. Streams make
    the decode worker send prompts away; but as real ones do it counts all that are to come."""
    requests = [ModelledRequest(0.001 * n, 10_000, 0, 2) for n in range(60)]
    busy = worker("decode", kv_tokens=80_000, streams=40, stream_tokens=4000)
    replayed([worker("prefill"), busy], requests, Handoffs("predict", token=2e-4))
    assert any(one.claimed for one in requests)
    assert all(0 < one.first - one.arrived < 60 for one in requests)


def test_a_prompt_does_not_wait_for_ever_for_kv_to_be_kept():
    requests = [ModelledRequest(0.0, 900, 0, 300), ModelledRequest(0.1, 900, 0, 2)]
    replayed([worker("prefill"), worker("decode", kv_tokens=1500)], requests, Handoffs("rule"))
    assert [one.claimed for one in requests] == [True, False]
    assert requests[1].end > 0


def test_both_serves_and_computes_for_others():
    requests = [ModelledRequest(0.02 * n, 2000, 0, 20) for n in range(40)]
    workers = [worker("both", share=0.5), worker("decode"), worker("decode")]
    replay = replayed(workers, requests)
    assert all(one.end > 0 for one in requests)
    assert {one.home for one in requests} - {None} >= {replay.engines[1], replay.engines[2]}


def test_a_worker_that_starts_serves_when_it_is_ready():
    requests = [ModelledRequest(0.04 * n, 2000, 0, 2) for n in range(200)]
    replay = replayed([worker("aggregated"), worker("aggregated", ready=5.0)], requests)
    late = replay.engines[1]
    assert late.computing > 0
    alone = [ModelledRequest(0.04 * n, 2000, 0, 2) for n in range(200)]
    late_only = replayed([worker("aggregated", ready=5.0)], alone)
    assert min(one.begun for one in alone) == 5.0
    assert late_only.engines[0].computing > late.computing


def test_a_worker_that_leaves_finishes_what_it_has():
    requests = [ModelledRequest(0.05 * n, 2000, 0, 40) for n in range(40)]
    replay = replayed([worker("aggregated"), worker("aggregated", leaves=0.5)], requests)
    left = replay.engines[1]
    assert 0 < left.computing < replay.engines[0].computing
    assert all(one.end > 0 for one in requests)


def test_without_a_worker_that_serves_nothing_ends():
    request = ModelledRequest(0.0, 100, 0, 2)
    replayed([worker("prefill")], [request])
    assert request.placed < 0
    assert request.first < 0


def test_what_a_worker_has_comes_first():
    request = ModelledRequest(0.0, 100, 0, 2)
    replayed([worker("aggregated", backlog=10_000)], [request])
    assert request.first > MODEL.prefill(10_000) - 0.11


def test_of_many_workers_all_are_used():
    requests = [ModelledRequest(0.001 * n, 3000, 0, 5) for n in range(400)]
    replay = replayed([worker("aggregated")] * 40, requests)
    assert all(engine.computing > 0 for engine in replay.engines)


@pytest.mark.parametrize("number", range(40))
def test_every_request_ends_and_nothing_is_left(number: int):
    random = Random(f"pool {number}")
    workers = [
        worker(
            random.choice(MODES),
            share=0.4,
            speed=random.choice((1.0, 1.0, 3.0)),
            kv_tokens=random.choice((0, 12_000, 100_000)),
            max_sequences=random.choice((4, 256)),
            streams=(streams := random.choice((0, 0, 7))),
            stream_tokens=streams * 300,
            backlog=random.choice((0, 3000)),
            ready=random.choice((0.0, 0.0, 2.0)),
            leaves=random.choice((inf, inf, 3.0)),
        )
        for _ in range(random.randint(1, 6))
    ]
    workers.append(worker("decode", kv_tokens=20_000))
    at, requests = 0.0, []
    for _ in range(150):
        at += random.expovariate(25.0)
        prompt = random.choice((5, 400, 5_000, 11_000))
        cached = random.choice((0, prompt // 3))
        requests.append(ModelledRequest(at, prompt, cached, random.choice((1, 30, 200))))
    handoffs = Handoffs(random.choice(("rule", "predict", "always", "never")), token=2e-6)
    replay = replayed(workers, requests, handoffs)
    for one in requests:
        assert one.arrived <= one.placed <= one.asked + 1e-9 <= one.begun + 2e-9
        assert one.begun < one.computed <= one.first <= one.end
    for engine in replay.engines:
        assert engine.streams == engine.pending == engine.uncomputed == 0
        assert abs(engine.held) < 1e-6
        assert engine.computing <= replay.now + 1e-9

"""Answers of what-ifs: what they count, that they repeat, and that production code agrees."""

from __future__ import annotations

from itertools import pairwise
from random import Random
from typing import Any

import pytest

from bench.disagg_grid.cells import KINDS, Arm, Scale, World
from bench.disagg_grid.runner import run_one
from bench.planner_what_if import Cell, learnt, predicted
from pdserve.errors import ConfigError
from pdserve.perf_model.latency_model import LatencyModel
from pdserve.planner.recent_arrivals import RecentArrival
from pdserve.planner.what_if.evaluate import ReplayTally, WhatIf
from pdserve.planner.what_if.records import (
    CandidatePool,
    CandidateWorker,
    Handoffs,
    LatencyObjective,
)

MODEL = LatencyModel(0.002, 25e-6, 1e-10, 0.006, 10e-6, 5e-8, fitted=True)
OBJECTIVE = LatencyObjective(ttft=1.0, itl=0.03)


def chats(count: int = 300, rate: float = 8.0, prompt: int = 2000) -> list[RecentArrival]:
    random, at, found = Random("chats"), 0.0, []
    for _ in range(count):
        at += random.expovariate(rate)
        found.append(RecentArrival(at, int(random.gammavariate(4, prompt / 4)) + 16))
    return found


LENGTHS = [(2000, 20 + n) for n in range(100)]


def what_if(**other: Any) -> WhatIf:
    fields: dict[str, Any] = {"recent": chats(), "finished": LENGTHS, "objective": OBJECTIVE}
    fields |= other
    return WhatIf(MODEL, **fields)


def pool(mode: Any = "aggregated", count: int = 1, **fields: Any) -> CandidatePool:
    return CandidatePool(f"{count} {mode}", (CandidateWorker(mode=mode, **fields),) * count)


def test_without_requests_nothing_is_missed():
    outcome = what_if(recent=()).evaluate(pool())
    assert (outcome.requests, outcome.miss, outcome.cause) == (0, 0.0, None)
    assert not what_if(recent=()).hopeless(pool())


def test_the_same_question_has_the_same_answer():
    assert what_if().evaluate(pool(count=2)) == what_if().evaluate(pool(count=2))


def test_a_pool_is_replayed_once():
    question = what_if()
    assert question.evaluate(pool(count=2)) is question.evaluate(pool(count=2))


@pytest.mark.parametrize(
    ("requests", "workers", "replays"),
    [(600, 12, 1), (600, 1, 1), (600, 5, 3), (300, 12, 3), (300, 1, 3)],
)
def test_other_seeds_are_left_out_where_the_answer_is_clear(
    requests, workers, replays, monkeypatch
):
    """None or most of many requests are missed: one replay says it."""
    question = what_if(recent=chats(requests), factor=8.0)
    seeds: list[int] = []
    replay = question.replay

    def counted(pool: CandidatePool, seed: int) -> ReplayTally:
        seeds.append(seed)
        return replay(pool, seed)

    monkeypatch.setattr(question, "replay", counted)
    outcome = question.evaluate(pool(count=workers))
    assert seeds == list(range(replays))
    assert outcome.requests == requests
    assert (outcome.miss == 0, outcome.miss > 0.9) == (workers == 12, workers == 1)


def test_more_workers_miss_less():
    question = what_if(factor=8.0)
    outcomes = [question.evaluate(pool(count=count)) for count in range(1, 9)]
    misses = [outcome.miss for outcome in outcomes]
    assert misses[0] > 0.9
    assert misses[-1] < 0.1
    assert all(later <= earlier + 0.02 for earlier, later in pairwise(misses))
    assert outcomes[0].busy["aggregated"] > 0.9


def test_shares_add_up():
    outcome = what_if(factor=4.0).evaluate(pool(count=2))
    assert sum(outcome.causes.values()) == pytest.approx(outcome.miss)
    assert max(outcome.miss_ttft, outcome.miss_itl) <= outcome.miss + 1e-9
    assert outcome.miss <= outcome.miss_ttft + outcome.miss_itl + 1e-9
    assert 0 <= outcome.spread <= 1


def test_an_overloaded_pool_is_late_by_its_queue():
    outcome = what_if(factor=4.0).evaluate(pool())
    assert outcome.cause == "queue"
    assert what_if(factor=40.0).hopeless(pool())
    assert not what_if(factor=0.2).hopeless(pool())


def test_a_pool_without_room_is_late_by_its_decode_workers():
    """One decode worker has KV for a single request; prefill workers are idle."""
    workers = (
        *[CandidateWorker(mode="prefill")] * 4,
        CandidateWorker(mode="decode", kv_tokens=4000),
    )
    question = what_if(handoffs=Handoffs("always"))
    outcome = question.evaluate(CandidatePool("no room", workers))
    assert outcome.miss > 0.5
    assert outcome.cause == "decode_admission"


def test_a_slow_network_is_called_so():
    workers = (CandidateWorker(mode="prefill"), CandidateWorker(mode="decode"))
    question = what_if(handoffs=Handoffs("always", token=1e-3), factor=0.2)
    assert question.evaluate(CandidatePool("slow", workers)).cause == "handoff"


def test_prompts_that_no_worker_can_serve_in_time_are_left_out():
    recent = [*chats(200), *(RecentArrival(30.0 + n, 60_000) for n in range(10))]
    recent.sort()
    outcome = what_if(recent=recent, factor=0.3).evaluate(pool(count=4))
    assert outcome.unreachable == pytest.approx(10 / 210)
    assert outcome.requests == 210
    assert what_if(recent=recent, factor=0.3).evaluate(pool(count=40)).unreachable == (
        outcome.unreachable
    )


def test_without_limits_nothing_is_missed():
    question = what_if(objective=LatencyObjective(), factor=8.0)
    assert question.evaluate(pool()).miss == 0.0


def test_an_objective_may_grow_with_the_prompt():
    strict = what_if(objective=LatencyObjective(ttft=0.05))
    loose = what_if(objective=LatencyObjective(ttft=0.05, idle_factor=2.0))
    assert strict.evaluate(pool(count=8)).unreachable > 0.3
    assert loose.evaluate(pool(count=8)).unreachable == 0


def test_impossible_objectives_are_refused():
    with pytest.raises(ConfigError):
        what_if(objective=LatencyObjective(ttft=-1.0))


def test_fewer_cached_tokens_are_more_work():
    recent = [one._replace(cached_tokens=one.prompt_tokens // 2) for one in chats()]
    question = what_if(recent=recent, factor=2.0)
    worker = (CandidateWorker(),)
    with_cache = question.evaluate(CandidatePool("kept", worker))
    without = question.evaluate(CandidatePool("lost", worker, cache_kept=0.0))
    assert without.ttft_p95 > 1.5 * with_cache.ttft_p95


def test_requests_that_are_held_come_first():
    question = what_if(factor=0.5)
    calm = question.evaluate(pool())
    held = question.evaluate(CandidatePool("held", (CandidateWorker(),), held=200))
    assert held.requests == calm.requests
    assert held.miss > calm.miss


def test_a_worker_that_is_late_helps_less():
    question = what_if(factor=3.0)
    now, late = (
        question.evaluate(CandidatePool("p", (CandidateWorker(), CandidateWorker(ready=ready))))
        for ready in (0.0, 8.0)
    )
    assert now.miss < late.miss


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arm", "load"), [(Arm(4), 1.0), (Arm(0, 2, 2, "rule"), 1.5), (Arm(0, 1, 3, "always"), 1.0)]
)
def test_production_code_agrees(arm: Arm, load: float):
    """bench/planner_what_if.py has more cells."""
    cell, scale = Cell(KINDS[0], arm, load), Scale(requests=250)
    outcome, _ = predicted(cell, scale, 1)
    result = run_one(scale, (World(cell.kind), arm, 1, cell.rate))
    assert outcome.miss == pytest.approx(1 - result["good"], abs=0.09)


def test_the_benchs_latency_model_is_that_of_an_idle_worker():
    model = learnt("h100-8b")
    assert model.step(1, 300) == pytest.approx(0.0061, rel=0.05)
    assert model.prefill(12_000) == pytest.approx(0.345, rel=0.05)

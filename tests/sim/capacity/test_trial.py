"""One replay of a plan, here and in another process."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdserve.sim.capacity.objective import Objective, SloLimit
from pdserve.sim.capacity.search import PlanCell
from pdserve.sim.capacity.shapes import aggregated
from pdserve.sim.capacity.trial import TrialPlan, run_trial, seeded_trace
from pdserve.sim.replay.cold_ttft import LengthTimes
from pdserve.sim.replay.config import ReplayConfig
from pdserve.sim.replay.loop import ReplayLoop
from pdserve.sim.workloads.generate import Unique
from pdserve.sim.workloads.trace_request import TraceRequest
from pdserve.sim.workloads.transform import TraceTransform


def plan(objective: Objective) -> TrialPlan:
    return TrialPlan(
        ReplayConfig(block_size=64, kv_tokens=64_000),
        Unique(requests=20, rate=20, input=500, output=10),
        TraceTransform(),
        objective,
        LengthTimes((1,), (0.0,)),
    )


EASY = plan(Objective(ttft=SloLimit(10.0)))
HARD = plan(Objective(ttft=SloLimit(0.001)))


def test_a_trial_ends_as_soon_as_the_objective_is_missed() -> None:
    easy = run_trial(EASY, PlanCell(aggregated(2), 0))
    assert (easy.met, easy.ended, easy.kept("ttft")) == (True, 20, 1.0)
    hard = run_trial(HARD, PlanCell(aggregated(2), 0))
    assert (hard.met, hard.ended, hard.total) == (False, 1, 20)
    assert hard.kept("ttft") == pytest.approx(0.95)


def test_a_day_without_requests_costs_no_replay_of_a_day(monkeypatch: pytest.MonkeyPatch) -> None:
    beside = [TraceRequest(number, 86_400.0 * number, ((0, 500),), 10) for number in range(3)]
    lived: list[float] = []
    jump = ReplayLoop.jump

    def watched(loop: ReplayLoop, seconds: float) -> None:
        jump(loop, seconds)
        lived.append(loop.time())

    monkeypatch.setattr(ReplayLoop, "jump", watched)
    result = run_trial(replace(EASY, trace=beside), PlanCell(aggregated(1), 0))
    assert (result.met, result.ended) == (True, 3)
    assert lived[-1] - lived[0] < 300.0


def test_each_seed_has_a_trace_of_its_own() -> None:
    first, again, other = (list(seeded_trace(EASY, seed)) for seed in (0, 0, 1))
    assert first == again != other

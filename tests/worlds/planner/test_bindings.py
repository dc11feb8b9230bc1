"""Each limit that a plan may name can be found out as a lie, by what its planner saw."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pdserve.messages.planner import Change, Kind, ScalingPlan
from pdserve.planner.explain import Binding
from pdserve.planner.outlook import Load, PoolCandidate, Slot
from pdserve.planner.steady_load import Stretch
from pdserve.planner.tick import PlannerInput, PlannerOutput
from tests.planner.support import MODEL, LinearJudge, config, demand, pool, worker
from tests.worlds.planner.bindings import RULES, Bindings

CALM = demand(0.5, peak_300=0.5, seen=400.0, recent=(Stretch(5.0, 1.0, 0.5),), work_300=0.5)
SEEN = PlannerInput(
    wall=0.0,
    workers=tuple(worker(number) for number in range(3)),
    kinds=(Kind(name="gpu", slots=8),),
    demand={MODEL: CALM},
)
"""Three workers with little to do."""
PLAN = ScalingPlan(term=1, number=1, model=MODEL, forecast={"0.9": 0.5})
CONFIG = config(pool(min=1, max=8), budget=9.0)

SMALL: dict[str, Any] = {"workers": 2, "work": 0.5, "load": "peak"}
LIES: dict[str, dict[str, Any]] = {
    "ttft": {**SMALL, "value": 0.9, "limit": 0.8},  # with two it would be less
    "itl": {**SMALL, "value": 0.9, "limit": 0.85},
    "miss": {**SMALL, "value": 0.2, "limit": 0.05},
    "busy": {**SMALL, "value": 0.95, "limit": 0.9},
    "floor": {"floor": 1, "workers": 3},
    "lease": {"reason": "w1 will be ended from outside"},
    "max": {"max": 8, "workers": 8},
    "budget": {"budget": 9.0, "spare": 0.5, "price": 1.0},
    "slots": {"slots": 8, "kind": "gpu"},
    "kind": {"reason": "kind 'gpu' waits 60 s more: its image cannot be pulled"},
    "actuator": {"reason": "no actuator offers a kind for this model"},
    "unreachable": {"share": 0.1, "ttft": 1.0},
    "modes": {"value": 0.3, "workers": 5},
    "blind": {"reason": "no router has reported its demand"},
    "doubt": {"reason": "router-1 is silent"},
    "panic": {"seconds": 200.0, "ratio": 2.0, "since": 950.0},
    "cooldown": {"seconds": 10.0, "limit": 120.0},
    "unseen": {"seconds": 20.0, "limit": 300.0},
    "regret": {"before": 0.5, "work": 0.5, "limit": 0.4, "workers": 3},
    "paired": {"modes": "decode and prefill"},
    "changing": {"action": "stop", "what": "w1"},
    "unwanted": {"action": "start", "what": "gpu"},
    "operator": {"reason": "w1 is pinned"},
    "paused": {"reason": "ada"},
    "pinned": {"reason": "aggregated=2"},
    "waiting": {"value": 0.01},
    "objective": {},
    "enough": {"value": 0.02, "limit": 0.05},  # the plan says that none would miss
    "fast": {},
}


def wrong(
    binding: Binding, seen: PlannerInput = SEEN, plan: ScalingPlan = PLAN, **more: Any
) -> list[str]:
    judge, output = LinearJudge(), PlannerOutput(plans=(plan,), bindings={MODEL: binding})
    return list(Bindings(more.get("config", CONFIG)).wrong("p0", 1000.0, judge, seen, output))


@pytest.mark.parametrize("name", RULES)
def test_a_lie_is_found_out(name: str) -> None:
    (why,) = wrong(Binding(name, LIES[name]))
    assert why.startswith("p0 is bound: ")


def test_the_truth_is_not() -> None:
    assert wrong(Binding("enough", {"value": 0.0, "limit": 1 - 0.95})) == []
    pair = PoolCandidate((Slot("aggregated"),) * 2)
    (two,) = LinearJudge().judge(None, (1.0, None), Load(0.5, cached=2 / 3), [pair])
    limits = {**SMALL, "limit": 0.2, "value": two.wait_p95}
    tight = replace(CONFIG, remove_ttft=0.2)
    assert wrong(Binding("ttft", limits), config=tight) == []
    full = replace(SEEN, workers=tuple(worker(number) for number in range(8)))
    assert wrong(Binding("max", {"max": 8, "workers": 8}), full) == []
    budget = Binding("budget", {"budget": 8.5, "spare": 0.5, "price": 1.0})
    assert wrong(budget, full, config=replace(CONFIG, budget=8.5)) == []
    stop = Change(id="x", action="stop", node=full.workers[1].node, state="ordered")
    going = ScalingPlan(term=1, number=1, model=MODEL, changes=(stop,))
    assert wrong(Binding("changing", LIES["changing"]), plan=going) == []
    pinned = replace(SEEN, pins={MODEL: {"aggregated": 2, "decode": 0}})
    assert wrong(Binding("pinned", LIES["pinned"]), pinned) == []
    first = replace(SEEN, demand={MODEL: replace(CALM, work_300=0.0)})
    assert wrong(Binding("panic", {**LIES["panic"], "since": 1000.0}), first) == []


def test_a_limit_is_judged_when_it_is_first_told() -> None:
    bindings, judge = Bindings(CONFIG), LinearJudge()
    told = Binding("unseen", {"seconds": 20.0, "limit": 300.0})
    young = replace(SEEN, demand={MODEL: replace(CALM, seen=20.0)})
    output = PlannerOutput(plans=(PLAN,), bindings={MODEL: told})
    assert list(bindings.wrong("p0", 1000.0, judge, young, output)) == []
    assert list(bindings.wrong("p0", 1030.0, judge, SEEN, output)) == [], "of the last slow tick"
    again = replace(output, bindings={MODEL: Binding("unseen", told.figures)})
    assert list(bindings.wrong("p0", 1200.0, judge, SEEN, again))

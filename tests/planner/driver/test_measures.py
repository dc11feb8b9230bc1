from __future__ import annotations

import pytest

from pdserve.messages.planner import Change, Instance, ScalingPlan
from pdserve.observe.metrics import Metrics
from pdserve.planner.changes.ids import change_id
from pdserve.planner.driver.measures import Measures
from pdserve.planner.tick import PlannerInput
from tests.planner.support import worker

START = change_id("m", "decode", 1, 1, 0)


def plan(*changes: Change, cost: float = 3.0) -> ScalingPlan:
    return ScalingPlan(
        term=1,
        number=1,
        model="m",
        target={"decode": 2},
        changes=changes,
        forecast={"0.5": 1.0, "0.9": 2.0},
        observed=0.9,
        miss_before=0.2,
        cost=cost,
    )


def test_workers_by_state_and_their_time_and_cost() -> None:
    metrics = Metrics()
    measures = Measures(metrics)
    instance = Instance(change=START, kind="gpu", state="booting")
    seen = PlannerInput(wall=0.0, workers=(worker(1), worker(2)), instances=(instance,))
    measures.note(100.0, seen, [plan()])
    measures.note(110.0, seen, [plan()])
    assert metrics.planner_workers.labels("m", "aggregated", "ready").value == 2
    assert metrics.planner_workers.labels("m", "decode", "booting").value == 1
    assert metrics.planner_worker_seconds.labels("m", "ready").value == pytest.approx(20.0)
    assert metrics.planner_cost.labels("m").value == pytest.approx(30.0 / 3600)
    assert metrics.planner_target_workers.labels("m", "decode").value == 2
    assert metrics.planner_work.labels("m", "p90").value == 2.0
    measures.note(10_000.0, seen, [plan()])  # it stood still
    assert metrics.planner_worker_seconds.labels("m", "ready").value == pytest.approx(140.0)


def test_a_model_that_another_planner_owns_is_not_counted() -> None:
    metrics = Metrics()
    measures = Measures(metrics)
    seen = PlannerInput(wall=0.0, workers=(worker(1),))
    measures.note(1.0, seen, [plan()])
    assert len(metrics.planner_workers) == 1
    measures.note(2.0, seen, [])
    assert len(metrics.planner_workers) == len(metrics.planner_work) == 0


def test_a_change_takes_from_its_first_sight_to_its_last() -> None:
    metrics = Metrics()
    measures = Measures(metrics)
    seen = PlannerInput(wall=0.0)
    change = Change(id=START, action="start", state="booting")
    measures.note(10.0, seen, [plan(change)])
    assert metrics.planner_changes.labels("start", "booting").value == 1
    measures.note(25.0, seen, [plan()])
    seconds = metrics.planner_change_seconds.labels("start")
    assert seconds.count == 1
    assert seconds.sum == pytest.approx(15.0)
    assert len(metrics.planner_changes) == 0

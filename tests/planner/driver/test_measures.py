from __future__ import annotations

from dataclasses import replace

import pytest

from pdserve.messages.planner import Change, Instance, ScalingPlan
from pdserve.observe.metrics import Metrics
from pdserve.planner.changes.book import Ended
from pdserve.planner.changes.ids import change_id
from pdserve.planner.changes.table import ChangeState
from pdserve.planner.config import PlannerConfig, PoolConfig
from pdserve.planner.driver.measures import Measures
from pdserve.planner.explain import Binding
from pdserve.planner.tick import PlannerInput, PlannerOutput
from tests.planner.support import worker

CONFIG = PlannerConfig(
    mode="act", pools=(PoolConfig(model="m", min=2, max=8), PoolConfig(model="other", max=8))
)
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
    measures = Measures(metrics, CONFIG)
    instance = Instance(change=START, kind="gpu", state="booting")
    seen = PlannerInput(wall=0.0, workers=(worker(1), worker(2)), instances=(instance,))
    measures.note(100.0, seen, PlannerOutput((plan(),)))
    measures.note(110.0, seen, PlannerOutput((plan(),)))
    assert metrics.planner_workers.labels("m", "aggregated", "ready").value == 2
    assert metrics.planner_workers.labels("m", "decode", "booting").value == 1
    assert metrics.planner_worker_seconds.labels("m", "ready").value == pytest.approx(20.0)
    assert metrics.planner_cost.labels("m").value == pytest.approx(30.0 / 3600)
    assert metrics.planner_target_workers.labels("m", "decode").value == 2
    assert metrics.planner_work.labels("m", "p90").value == 2.0
    measures.note(10_000.0, seen, PlannerOutput((plan(),)))  # it stood still
    assert metrics.planner_worker_seconds.labels("m", "ready").value == pytest.approx(140.0)


def test_a_model_that_another_planner_owns_is_not_counted() -> None:
    metrics = Metrics()
    measures = Measures(metrics, CONFIG)
    seen = PlannerInput(wall=0.0, workers=(worker(1),))
    measures.note(1.0, seen, PlannerOutput((plan(),)))
    assert len(metrics.planner_workers) == 1
    measures.note(2.0, seen, PlannerOutput())
    assert len(metrics.planner_workers) == len(metrics.planner_work) == 0


def test_a_change_takes_from_its_first_sight_to_its_last() -> None:
    metrics = Metrics()
    measures = Measures(metrics, CONFIG)
    seen = PlannerInput(wall=0.0)
    change = Change(id=START, action="start", state="booting")
    measures.note(10.0, seen, PlannerOutput((plan(change),)))
    assert metrics.planner_changes.labels("start", "booting").value == 1
    measures.note(25.0, seen, PlannerOutput((plan(),)))
    seconds = metrics.planner_change_seconds.labels("start")
    assert seconds.count == 1
    assert seconds.sum == pytest.approx(15.0)
    assert len(metrics.planner_changes) == 0


def test_the_oldest_change_of_a_model_says_how_long_it_lasts() -> None:
    metrics = Metrics()
    measures = Measures(metrics, CONFIG)
    seen = PlannerInput(wall=0.0)
    first = Change(id=START, action="start", state="pending")
    later = Change(id=change_id("m", "decode", 1, 2, 0), action="start", state="asked")
    measures.note(10.0, seen, PlannerOutput((plan(first),)))
    measures.note(40.0, seen, PlannerOutput((plan(first, later),)))
    assert metrics.planner_oldest_change_seconds.labels("m", "start").value == 30.0
    measures.note(50.0, seen, PlannerOutput((plan(later),)))
    assert metrics.planner_oldest_change_seconds.labels("m", "start").value == 10.0
    measures.note(60.0, seen, PlannerOutput((plan(),)))
    assert {one.value for _, one in metrics.planner_oldest_change_seconds} == {0.0}


def test_whose_models_they_are_what_binds_and_how_changes_ended() -> None:
    metrics = Metrics()
    measures = Measures(metrics, CONFIG)
    seen = PlannerInput(wall=0.0)
    change = Change(id=START, action="start", kind="gpu")
    output = PlannerOutput(
        (plan(),),
        bindings={"m": Binding("floor", {"floor": 2, "workers": 2})},
        ended=(Ended(change, "m", ChangeState.FAILED, 60.0),),
    )
    measures.note(10.0, seen, output)
    assert {labels: one.value for labels, one in metrics.planner_owner} == {
        ("m",): 1.0,
        ("other",): 0.0,
    }
    assert {labels: one.value for labels, one in metrics.planner_least_workers} == {("m",): 2.0}
    assert [labels for labels, _ in metrics.planner_binding] == [("m", "floor")]
    assert metrics.planner_changes_ended.labels("m", "start", "failed").value == 1
    measures.note(15.0, seen, PlannerOutput((plan(),), bindings={"m": Binding("panic")}))
    assert [labels for labels, _ in metrics.planner_binding] == [("m", "panic")]
    assert metrics.planner_changes_ended.labels("m", "start", "failed").value == 1


def test_a_planner_that_advises_promises_no_workers_and_one_that_stops_tells_nothing() -> None:
    metrics = Metrics()
    measures = Measures(metrics, replace(CONFIG, mode="advise"))
    seen = PlannerInput(wall=0.0, workers=(worker(1),))
    measures.note(10.0, seen, PlannerOutput((plan(),)))
    assert len(metrics.planner_least_workers) == 0
    assert len(metrics.planner_owner) == 2
    measures.stopped()
    assert len(metrics.planner_owner) == len(metrics.planner_workers) == 0
    before = metrics.planner_worker_seconds.labels("m", "ready").value
    measures.note(900.0, seen, PlannerOutput((plan(),)))
    assert metrics.planner_worker_seconds.labels("m", "ready").value == before

"""What does not depend on the load, while an order is still on its way or a worker drains."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdserve.planner.changes.ids import change_id
from pdserve.planner.tick import Refusal
from tests.planner.support import MODEL, Bench, actions, binding, config, pool, worker

TWO = {MODEL: {"aggregated": 2}}
SILENT = Refusal("transient", "no answer within 5 s", silent=True)


def mine(number: int, **more):
    """A worker that a planner has started."""
    change = change_id(MODEL, "aggregated", 0, 0, number)
    return worker(number, kind="gpu", change=change, **more)


def pinned(*, least: int = 1) -> Bench:
    """Three workers, of which w1 is told to stop, and two are wanted."""
    bench = Bench(config(pool(min=least)))
    bench.see(mine(1), mine(2), mine(3), pins=TWO)
    bench.load(0.1)
    assert actions(bench.tick()) == ["begin stop w1"]
    return bench


def silent(bench: Bench) -> dict[str, Refusal]:
    """No worker has answered its order."""
    return {order.change.id: SILENT for order in bench.last.orders}


def test_a_pin_takes_its_drain_back_before_it_starts_a_worker():
    bench = pinned()
    bench.see(mine(1, state="draining", ordered=True), mine(2))
    assert actions(bench.tick()) == ["begin undo_drain w1"]
    assert actions(bench.tick()) == ["begin undo_drain w1"], "and asks for nothing else"
    bench.see(mine(1), mine(2))
    assert actions(bench.tick()) == []


def test_a_pin_starts_what_no_drain_brings():
    bench = pinned()
    bench.see(mine(1, state="draining", ordered=True))
    assert actions(bench.tick()) == ["begin undo_drain w1"]
    assert sorted(actions(bench.tick())) == ["begin start aggregated", "begin undo_drain w1"]


def test_a_pin_withdraws_an_order_to_stop_that_is_still_on_its_way():
    """The worker does not answer, and another one has gone meanwhile."""
    bench = pinned()
    assert actions(bench.tick(refusals=silent(bench))) == ["begin stop w1"]
    bench.see(mine(1), mine(2))
    stop = bench.last.orders[0]
    (undo,) = bench.tick().orders
    assert (undo.change.action, undo.change.node) == ("undo_drain", "w1")
    assert undo.number > stop.number, "a worker that hears both serves"
    assert bench.last.plans[0].target == {"aggregated": 2}


def test_the_floor_withdraws_an_order_to_stop_that_is_still_on_its_way():
    bench = pinned(least=2)
    bench.see(mine(1), mine(2), pins={})
    (undo,) = bench.tick().orders
    assert (undo.change.action, undo.change.node) == ("undo_drain", "w1")


def test_a_drain_that_only_a_pin_has_ordered_is_taken_back_with_the_pin():
    """The load would do without w1, but no rule has judged so; the next slow tick does."""
    bench = pinned()
    going = mine(1, state="draining", ordered=True)
    bench.see(going, mine(2), mine(3))
    assert actions(bench.tick()) == []
    bench.see(*bench.seen.workers, pins={})
    assert actions(bench.tick()) == ["begin undo_drain w1"]
    assert binding(bench.last) == "no pin holds any more, so the drain of w1 is taken back"
    assert bench.last.plans[0].target == {"aggregated": 3}
    assert actions(bench.tick()) == ["begin undo_drain w1"], "once"
    bench.see(mine(1), mine(2), mine(3))
    assert actions(bench.tick()) == []


def test_an_order_that_only_a_pin_has_given_is_withdrawn_with_the_pin():
    bench = pinned()
    bench.see(*bench.seen.workers, pins={})
    assert actions(bench.tick()) == ["begin undo_drain w1"]
    assert actions(bench.tick()) == [], "it served all the time"


def test_a_drain_is_not_taken_back_beyond_max():
    """Meanwhile another worker has been started by hand."""
    bench = Bench(config(pool(max=3)))
    bench.see(mine(1), mine(2), mine(3), pins=TWO)
    bench.load(0.1)
    assert actions(bench.tick()) == ["begin stop w1"]
    going = mine(1, state="draining", ordered=True)
    bench.see(going, mine(2), mine(3), worker(4), pins={})
    assert actions(bench.tick()) == []
    bench.see(going, mine(2), mine(3))
    assert actions(bench.tick()) == ["begin undo_drain w1"]


def test_a_drain_that_the_load_allowed_goes_on_after_a_pin():
    bench = Bench(config(pool()))
    bench.see(*(mine(number) for number in range(1, 4)))
    bench.load(0.1, seen=1e9)
    bench.until(65)
    stopped = [line.removeprefix("begin stop ") for line in actions(bench.last)]
    assert stopped == ["w1", "w2"]
    rest = (mine(3), *(mine(int(one[1:]), state="draining", ordered=True) for one in stopped))
    bench.see(*rest, pins={MODEL: {"aggregated": 1}})
    bench.tick()
    bench.see(*rest, pins={})
    assert actions(bench.tick()) == []


def test_a_plan_names_a_worker_that_does_not_answer_until_it_does():
    bench = pinned()
    bench.tick(refusals=silent(bench))
    assert binding(bench.last) == "pinned to aggregated=2; waits for w1 to answer"
    assert len(bench.last.log) == 1, "and its log does"
    bench.tick()
    assert binding(bench.last).endswith("waits for w1 to answer"), "it is being asked again"
    bench.see(mine(1, state="draining", ordered=True), mine(2), mine(3))
    bench.tick()
    assert binding(bench.last) == "pinned to aggregated=2"


def test_a_stop_that_nobody_answered_says_so_when_it_is_given_up():
    bench = pinned()
    bench.tick(refusals=silent(bench))
    bench.until(10)
    assert any("given_up: no answer within 5 s" in line for line in bench.last.log)


def test_a_refusal_is_an_answer():
    bench = pinned()
    refused = {bench.last.orders[0].change.id: Refusal("transient", "its last drain is undone")}
    bench.tick(refusals=refused)
    assert binding(bench.last) == "pinned to aggregated=2"


@pytest.mark.parametrize(("left", "says"), [(300.0, "300"), (30.0, "")])
def test_a_plan_names_a_worker_that_may_drain_for_longer(left, says):
    bench = pinned()
    going = mine(1, state="draining", ordered=True, drain_left=left)
    bench.see(going, mine(2), mine(3))
    bench.tick()
    told = f"; w1 may drain for {says} s more, by its own limit" if says else ""
    assert binding(bench.last) == f"pinned to aggregated=2{told}"
    bench.see(replace(going, drain_left=left - 5), mine(2), mine(3))
    assert bench.tick().log == (), "a count-down is no new plan"


def test_what_would_be_stopped_is_in_no_target():
    bench = Bench(config(pool(), mode="advise"))
    bench.see(mine(1), mine(2), mine(3))
    bench.load(0.1)
    bench.until(65)
    plan = bench.last.plans[0]
    assert [one.action for one in plan.changes] == ["stop", "stop"]
    assert plan.target == {"aggregated": 1}

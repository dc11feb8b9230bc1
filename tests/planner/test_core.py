"""Every rule of the planner with numbers, through the whole core."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from pdserve.errors import ConfigError
from pdserve.ids import NodeId
from pdserve.messages.planner import Kind
from pdserve.planner.changes.ids import change_id
from pdserve.planner.config import Floor
from pdserve.planner.core import owner_of
from pdserve.planner.outlook import Horizon, PoolOutcome
from pdserve.planner.tick import Refusal
from tests.planner.support import (
    KINDS,
    ME,
    MODEL,
    Bench,
    LinearJudge,
    actions,
    binding,
    config,
    demand,
    instance,
    pool,
    worker,
)

START = "begin start aggregated"


def names(bench: Bench) -> list[str]:
    """Ids of the changes that are ordered now."""
    return [order.change.id for order in bench.last.orders]


def mine(number: int, mode: str = "aggregated", **more):
    """A worker that a planner has started."""
    change = change_id(MODEL, mode, 0, 0, number)
    return worker(number, mode, kind="gpu", change=change, **more)


def crowd(count: int, mode: str = "aggregated", first: int = 1):
    return [mine(number, mode) for number in range(first, first + count)]


# ---------------------------------------------------------------------- up


def test_capacity_is_added_when_two_of_three_ticks_agree():
    """0.97 work/s on one worker: 7.2 % miss, a little more than 5 %."""
    bench = Bench()
    bench.see(worker(1))
    bench.load(0.97)
    assert actions(bench.tick()) == []
    assert binding(bench.last) == "waits for a second tick in agreement: 7.2% would miss"
    assert actions(bench.tick()) == [START]


def test_one_odd_tick_adds_nothing():
    bench = Bench()
    bench.see(worker(1))
    for work in (0.97, 0.7, 0.7, 0.97, 0.7, 0.7):
        bench.load(work)
        assert actions(bench.tick()) == []


def test_votes_need_not_be_in_a_row():
    bench = Bench()
    bench.see(worker(1))
    for work, added in ((0.97, 0), (0.5, 0), (0.97, 1)):
        bench.load(work)
        assert len(actions(bench.tick())) == added


def test_capacity_is_added_at_once_when_a_fifth_will_miss():
    bench = Bench()
    bench.see(worker(1))
    bench.load(1.2)  # 25 % miss
    assert actions(bench.tick()) == [START]


def test_capacity_is_added_at_once_when_much_work_waits():
    """4 × 1 s of work per worker."""
    bench = Bench()
    bench.see(worker(1))
    bench.load(0.91, held_work=3.0, queued_work=0.9)
    assert actions(bench.tick()) == []
    bench = Bench()
    bench.see(worker(1))
    bench.load(0.91, held_work=3.0, queued_work=1.1)
    assert actions(bench.tick()) == [START]


@pytest.mark.parametrize(("work", "workers"), [(1.7, 2), (2.8, 3), (3.7, 4), (6.6, 7)])
def test_as_many_are_started_as_are_needed_and_not_one_after_the_other(work, workers):
    bench = Bench()
    bench.see(worker(1))
    bench.load(work)
    assert actions(bench.tick()) == [START] * (workers - 1)
    assert bench.last.plans[0].target == {"aggregated": workers}


def test_workers_that_cure_next_to_nothing_are_not_bought():
    """Where no number is enough, the fewest are started that come within a point of the best."""

    class Stubborn(LinearJudge):
        def _outcome(self, objectives, load, candidate):
            return PoolOutcome(miss=0.1 + 0.3 / len(candidate.slots) ** 3)

    bench = Bench(judge=Stubborn())
    bench.see(worker(1))
    bench.load(1.0)
    assert actions(bench.tick()) == [START] * 3


def test_starts_under_way_are_not_asked_for_again():
    bench = Bench()
    bench.see(worker(1))
    bench.load(2.8)
    bench.tick()
    asked = names(bench)
    for state in ("pending", "pending", "booting", "booting"):
        bench.see(worker(1), instances=tuple(instance(one, state) for one in asked))
        bench.tick()
        assert actions(bench.last) == []
        assert bench.last.plans[0].target == {"aggregated": 3}


def test_pending_workers_are_not_capacity():
    """If they counted as serving the third worker would not be asked for when load grows."""
    bench = Bench()
    bench.see(worker(1))
    bench.load(1.7)
    bench.tick()
    bench.see(worker(1), instances=(instance(names(bench)[0], "pending"),))
    bench.load(2.8)
    bench.tick()
    assert actions(bench.last) == [START]
    assert bench.last.plans[0].present == {"aggregated": 1}
    assert bench.last.plans[0].target == {"aggregated": 3}


def test_an_order_is_repeated_until_the_lists_show_it():
    bench = Bench()
    bench.see(worker(1))
    bench.load(1.7)
    bench.tick()
    first = names(bench)
    bench.tick()
    assert names(bench) == first != []
    bench.see(worker(1), instances=(instance(first[0], "pending"),))
    assert not bench.tick().orders


def test_another_kind_is_tried_when_one_is_pending_for_long():
    kinds = (Kind(name="gpu", actuator="fake"), Kind(name="spot", actuator="fake"))
    bench = Bench()
    bench.see(worker(1), kinds=kinds)
    bench.load(1.7)
    bench.tick()
    bench.see(worker(1), instances=(instance(names(bench)[0], "pending"),), kinds=kinds)
    assert all(output.orders == () for output in bench.until(115))
    bench.tick(10)
    assert [order.change.kind for order in bench.last.orders] == ["spot"]


# ---------------------------------------------------------------------- the order of levers


def disagg(bench: Bench, prefill: int = 2, decode: int = 2, **more) -> None:
    bench.see(*crowd(prefill, "prefill"), *crowd(decode, "decode", 10), **more)


def test_a_drain_is_cancelled_before_anything_is_bought():
    bench = Bench(config(pool(min=1)))
    bench.see(*crowd(3))
    bench.load(0.5)
    bench.until(65)
    (stop,) = bench.last.orders
    assert stop.change.action == "stop"
    bench.see(
        *[
            replace(one, state="draining") if one.node == stop.change.node else one
            for one in crowd(3)
        ]
    )
    bench.tick()
    bench.load(2.6)
    bench.tick()
    assert actions(bench.last) == [f"begin undo_drain {stop.change.node}"]


def test_a_drain_is_cancelled_also_without_a_panic():
    """From 4.6 to 6.7 work/s, 1.46 × the forecast: seven workers let 6 % miss, eight none."""
    bench = Bench()
    bench.see(*crowd(8))
    bench.load(4.6)
    bench.until(65)
    assert actions(bench.last) == ["begin stop w1"]
    bench.see(replace(mine(1), state="draining"), *crowd(8)[1:])
    bench.tick()
    bench.load(6.7)
    bench.until(10)
    assert actions(bench.last) == ["begin undo_drain w1"]


def test_a_drain_is_taken_back_for_what_waits_until_a_new_worker_serves():
    """With the one that loads two are enough for the load, but one has to do what waits."""
    bench = Bench()
    loading = mine(4, state="loading")
    going = mine(1, state="draining", ordered=True)
    bench.see(going, mine(2), loading)
    bench.load(0.8)
    bench.tick()
    assert actions(bench.last) == [], "nothing waits"
    bench.load(0.8, held_work=30.0)
    assert actions(bench.tick()) == ["begin undo_drain w1"]
    assert bench.last.plans[0].miss_before > 0.2
    assert bench.last.plans[0].target == {"aggregated": 3}


def test_a_mode_is_switched_before_a_worker_is_started():
    """Work for 3 prefill and 1 decode worker: the ratio is wrong, not the number."""
    bench = Bench(config(pool(modes=("prefill", "decode"))))
    bench.judge.decode_weight = 0.3
    disagg(bench)
    bench.load(2.0)
    bench.until(100)
    bench.load(5.0)
    bench.until(10)
    assert actions(bench.last) == ["begin mode w10>prefill"]


def test_decode_misses_never_add_prefill_workers():
    bench = Bench(config(pool(modes=("prefill", "decode"), max=12)))
    bench.judge.decode_weight = 2.0
    disagg(bench)
    bench.load(4.0, missed={"decode": 30, "handoff": 20, "queue": 5})
    bench.until(10)
    assert {*actions(bench.last)} == {"begin start decode"}


def test_prefill_misses_add_prefill_workers():
    bench = Bench(config(pool(modes=("prefill", "decode"), max=12)))
    bench.judge.decode_weight = 0.4
    disagg(bench)
    bench.load(7.2)
    bench.until(10)
    assert {*actions(bench.last)} == {"begin start prefill"}


def test_a_pool_stays_aggregated_unless_modes_are_named():
    bench = Bench()
    bench.see(*crowd(2))
    bench.load(5.0)
    bench.until(10)
    assert {*actions(bench.last)} == {START}


# ---------------------------------------------------------------------- what binds


def overloaded(**more) -> Bench:
    bench = Bench(config(pool(**more.pop("pool", {})), **more))
    bench.see(*crowd(2))
    bench.load(6.0)
    bench.until(10)
    return bench


def test_max_binds():
    bench = overloaded(pool={"max": 4})
    assert actions(bench.last) == [START] * 2
    assert binding(bench.last) == "max is 4 workers, and there are 4"


def test_the_budget_binds_with_all_that_is_asked_for():
    bench = overloaded(budget=7.0, prices={"gpu": 2.0})
    assert actions(bench.last) == [START]
    assert binding(bench.last) == "the budget of 7 leaves 1, and a worker costs 2"
    assert bench.last.plans[0].cost == 6.0


def test_slots_bind():
    bench = Bench()
    kinds = (Kind(name="gpu", actuator="fake", slots=3),)
    listed = tuple(instance(one.change, "running") for one in crowd(2))
    bench.see(*crowd(2), kinds=kinds, instances=listed)
    bench.load(6.0)
    bench.until(10)
    assert actions(bench.last) == [START]
    assert binding(bench.last) == "all 3 slots of kind gpu are in use"


def test_an_actuator_that_does_not_answer_binds_in_its_own_words():
    bench = Bench()
    bench.see(*crowd(2), down={"fake": "slurmctld: connection refused"})
    bench.load(6.0)
    bench.until(10)
    assert actions(bench.last) == []
    assert "'fake' does not answer: slurmctld: connection refused" in binding(bench.last)


def test_without_an_actuator_modes_are_still_switched():
    bench = Bench(config(pool(modes=("prefill", "decode"))))
    bench.judge.decode_weight = 0.3
    disagg(bench, kinds=())
    bench.load(2.0)
    bench.until(100)
    bench.load(5.0)
    bench.until(10)
    assert actions(bench.last) == ["begin mode w10>prefill"]


def test_what_no_worker_can_help_is_said_and_not_bought():
    bench = Bench()
    bench.judge.unreachable = 0.12
    bench.see(worker(1))
    bench.load(0.5)
    bench.until(20)
    assert actions(bench.last) == []
    assert binding(bench.last).startswith("12.0% of the requests have prompts that take longer")
    assert "1 s on an idle worker" in binding(bench.last)


def test_a_kind_that_fails_is_told_and_not_started():
    bench = Bench()
    bench.see(worker(1))
    bench.load(1.7)
    for _ in range(3):
        bench.tick()
        (name,) = names(bench)
        bench.see(worker(1), refusals={name: Refusal("denied", "no such account")})
        bench.tick()
        bench.see(worker(1), refusals={})
        bench.now += 300
    assert actions(bench.tick()) == []
    assert binding(bench.last) == "kind 'gpu' is disabled: no such account"
    assert "no such account" in bench.last.degraded["planner_kind_failing"]
    bench.core.enable("gpu")
    assert actions(bench.tick()) == [START]


# ---------------------------------------------------------------------- down


def calm(workers: int, work: float, **more) -> Bench:
    bench = Bench(config(pool(**more.pop("pool", {})), **more))
    bench.see(*crowd(workers))
    bench.load(work)
    return bench


def test_one_worker_is_removed_at_the_slow_tick():
    bench = calm(3, 0.5)
    assert all(output.orders == () for output in bench.until(60))
    bench.tick()
    assert actions(bench.last) == ["begin stop w1"]
    assert "2 are enough" in bench.last.orders[0].change.reason


def stopped_at_once(workers: int, work: float, **more) -> int:
    bench = calm(workers, work, **more)
    bench.until(65)
    assert {order.change.action for order in bench.last.orders} <= {"stop"}
    left = workers - len(bench.last.orders)
    assert bench.last.plans[0].target == {"aggregated": left}
    return len(bench.last.orders)


def test_as_many_are_removed_at_once_as_those_that_remain_can_bear():
    """Six are left idle by a fall to 2.0 work/s: 3 workers would be two thirds busy and too many
    would wait, and the cache is half as large; so four stay."""
    assert stopped_at_once(6, 1.9) == 2
    assert stopped_at_once(6, 1.4) == 3


def test_never_more_than_half_go_at_once_and_none_below_the_floor():
    assert stopped_at_once(8, 0.1) == 4
    assert stopped_at_once(8, 0.1, pool={"min": 6}) == 2
    assert stopped_at_once(40, 0.1, pool={"max": 40}) == 8


def test_what_holds_one_removal_back_holds_several():
    """The highest load of the last minutes, and nine of ten loads until a new worker serves."""
    bench = calm(6, 0.5)
    bench.load(0.5, peak_300=1.9)
    bench.until(65)
    assert len(bench.last.orders) == 2
    bench = calm(6, 0.5)
    bench.forecast.spread = 3.8
    bench.until(65)
    assert len(bench.last.orders) == 2


def test_a_removal_is_judged_with_what_waits_now():
    """Else the next tick, which counts it, takes the drain back."""
    bench = calm(3, 0.5)
    bench.load(0.5, queued_work=60.0)
    assert not any(output.orders for output in bench.until(65))


def test_drains_that_were_begun_at_once_are_all_taken_back():
    bench = calm(6, 0.5)
    bench.until(65)
    gone = {order.change.node for order in bench.last.orders}
    assert len(gone) == 3
    bench.see(*(replace(w, state="draining") if w.node in gone else w for w in crowd(6)))
    bench.tick()
    bench.load(5.0)
    bench.tick()
    assert {*actions(bench.last)} >= {f"begin undo_drain {node}" for node in gone}


def test_what_the_others_would_have_to_do_decides():
    """At 0.9 work/s two workers are half busy: a rule without consolidation would remove one. The
    other one would be at 90 %, and its requests would wait for far too long."""
    bench = calm(2, 0.9)
    bench.until(300)
    assert not any(actions(bench.tick()) for _ in range(60))
    assert binding(bench.last).startswith("with 1 workers the p95 wait would be")
    assert "above 80%, at 0.90 work/s (peak)" in binding(bench.last)


def test_a_smaller_cache_is_part_of_what_the_others_would_have_to_do():
    """Without it 1.45 work/s would fit 2 workers (p95 0.73 s); with 2/3 of the hits it does not."""
    bench = calm(3, 1.45)
    bench.until(120)
    assert actions(bench.last) == []
    (cached,) = {load.cached for load, _ in bench.judge.asked if load.cached < 1}
    assert cached == pytest.approx(2 / 3)


def test_the_highest_load_of_the_last_minutes_must_fit():
    bench = calm(3, 0.5)
    bench.load(0.5, peak_300=2.2)
    bench.until(120)
    assert actions(bench.last) == []
    assert "at 2.20 work/s (peak)" in binding(bench.last)


def test_the_forecast_must_fit():
    bench = calm(3, 0.5)
    bench.forecast.spread = 4.0
    bench.until(120)
    assert actions(bench.last) == []
    assert "at 2.00 work/s (ahead)" in binding(bench.last)


def test_beyond_a_start_up_the_expected_load_must_fit_and_not_nine_of_ten():
    """Starts take 120 s. What exceeds the expected load later is met by a start."""
    bench = calm(3, 0.5)
    bench.forecast.later = Horizon(0.6, 2.0, 2.5)
    bench.until(65)
    assert actions(bench.last) == ["begin stop w1"]


def test_a_load_that_is_expected_to_grow_later_must_fit():
    bench = calm(3, 0.5)
    bench.forecast.later = Horizon(2.0, 2.0, 2.0)
    bench.until(120)
    assert actions(bench.last) == []
    assert "at 2.00 work/s (ahead)" in binding(bench.last)


def test_no_demand_is_data_and_the_pool_shrinks_to_its_minimum():
    """Other planners read it as missing, and kept idle workers for ever."""
    bench = calm(4, 0.0, pool={"min": 2})
    bench.load(0.0, first_tokens=0)
    left = shrink_all(bench, 900)
    assert left == 2
    assert binding(bench.last) == "min and floors ask for 2, and 2 serve"


def shrink_all(bench: Bench, seconds: float) -> int:
    """Obeys every stop at once; returns the workers that are left. No more than half go at once."""
    at = []
    for _ in range(int(seconds / 5)):
        bench.tick()
        stops = {order.change.node for order in bench.last.orders if order.change.action == "stop"}
        assert len(stops) <= (len(bench.seen.workers) + 1) // 2
        if stops:
            at.append(bench.now)
            bench.see(*(one for one in bench.seen.workers if one.node not in stops))
    assert all(later - sooner >= bench.config.remove_interval for sooner, later in pairwise(at))
    return len(bench.seen.workers)


def test_a_missing_report_is_not_zero():
    bench = calm(4, 0.0)
    bench.seen = replace(bench.seen, demand={})
    bench.until(600)
    assert actions(bench.last) == []
    assert binding(bench.last) == "blind: no router has reported the demand for this model"


def test_a_silent_router_stops_removals_but_not_starts():
    bench = calm(3, 0.5)
    bench.load(0.5, faults="router r2 no longer reports its demand")
    bench.until(120)
    assert actions(bench.last) == []
    assert binding(bench.last) == "nothing is removed: router r2 no longer reports its demand"
    bench.load(4.0, faults="router r2 no longer reports its demand")
    bench.until(10)
    assert {*actions(bench.last)} == {START}


def test_nothing_is_removed_while_something_is_coming():
    bench = calm(3, 0.5)
    name = change_id(MODEL, "aggregated", 9, 9, 9)
    bench.see(*crowd(3), instances=(instance(name, "booting"),))
    bench.until(120)
    assert actions(bench.last) == []
    assert binding(bench.last) == "waits for start of gpu"


def test_one_removal_at_a_time_also_beside_an_operators():
    bench = calm(4, 0.5)
    bench.see(*crowd(4), replace(worker(9), state="draining", running=3))
    bench.until(120)
    assert actions(bench.last) == []
    assert binding(bench.last) == "waits for end of w9"


def test_what_an_operator_has_drained_holds_nothing_up():
    """`pdserve drain --stay`: the worker may stay so for hours."""
    bench = calm(4, 0.5)
    bench.see(*crowd(4), replace(worker(9), state="draining"))
    assert any(output.orders for output in bench.until(130))


def test_a_worker_that_is_told_to_drain_is_no_capacity_any_more():
    """6.7 work/s on eight workers, one of which was told and does not drain yet: 6 % would miss."""
    bench = calm(8, 4.6)
    bench.until(65)
    assert actions(bench.last) == ["begin stop w1"]
    bench.load(6.7)
    bench.tick()
    assert bench.last.plans[0].miss_before == pytest.approx(0.0597, abs=1e-3)


def test_nothing_is_removed_while_another_worker_is_told_to():
    """An order that nobody obeys yet shows in no list."""
    bench = Bench(config(pool(), slow_tick=5.0, remove_interval=1.0))
    bench.see(*crowd(4))
    bench.load(0.5)
    stops = [actions(output) for output in bench.until(15)]
    both = ["begin stop w1", "begin stop w2"]
    assert stops == [[], both, both]


def test_the_floor_that_holds_soon_is_kept_at_a_removal():
    bench = calm(3, 0.1, pool={"min": 3})
    bench.see(*crowd(3), replace(mine(9), state="loading"))
    bench.until(65)
    bench.see(*crowd(3))
    assert not any(output.orders for output in bench.until(130))


def test_a_load_that_leaves_its_forecast_is_told_to_it():
    bench = calm(4, 0.5)
    bench.until(30)
    assert bench.forecast.shifts == 0
    bench.load(0.8)
    bench.tick()
    assert bench.forecast.shifts == 1


def test_the_victim_is_the_one_whose_loss_costs_least():
    bench = calm(3, 0.3)
    workers = [
        mine(1, hot_tokens=90_000),
        mine(2, hot_tokens=2_000, live_tokens=1_000),
        mine(3, hot_tokens=2_000, live_tokens=9_000),
    ]
    bench.see(*workers)
    bench.until(65)
    assert actions(bench.last) == ["begin stop w2", "begin stop w3"]


def test_of_equal_workers_the_dearest_goes():
    bench = calm(3, 0.3, prices={"gpu": 1.0, "big": 4.0})
    bench.see(*crowd(2), replace(mine(3), kind="big"))
    bench.until(65)
    assert actions(bench.last)[0] == "begin stop w3"


def test_a_worker_is_removed_only_if_it_would_be_idle_for_long_enough():
    """Starts take 600 s, so it must be idle for 1,210 s: the forecast is read that far ahead."""
    bench = calm(3, 0.5)
    bench.core._times.add("start", "gpu", 600.0)
    bench.until(65)
    assert max(bench.forecast.asked) == pytest.approx(2 * (600 + 5))


def test_a_removal_that_had_to_be_undone_is_not_repeated():
    bench = calm(3, 1.0)
    bench.until(65)
    bench.see(*crowd(3)[1:])
    bench.load(1.95)
    bench.until(10)
    assert actions(bench.last) == [START]
    name = names(bench)[0]
    bench.see(*crowd(3)[1:], worker(5, change=name), instances=())
    bench.load(1.6)
    bench.until(1800)
    assert actions(bench.last) == []
    assert binding(bench.last).startswith("fewer than 3 workers were not enough for 1.95 work/s")
    bench.load(0.7)
    assert any(output.orders for output in bench.until(65))


def test_what_was_too_much_says_nothing_of_larger_pools():
    """Two were not enough for 1.9 work/s. Six are too many for it, and go until three are left."""
    bench = calm(3, 1.0)
    bench.until(65)
    bench.see(*crowd(3)[1:])
    bench.load(1.95)
    bench.until(10)
    assert actions(bench.last) == [START]
    bench.see(*crowd(6), instances=())
    bench.load(1.6)
    assert shrink_all(bench, 900) == 3
    assert binding(bench.last).startswith("fewer than 3 workers were not enough for 1.95 work/s")


def started(bench: Bench, first: int):
    """The workers whose starts are ordered now."""
    return [worker(at, change=name) for at, name in enumerate(names(bench), first)]


def test_more_workers_than_before_a_removal_say_nothing_of_it():
    """Two were not enough for 1.95 work/s, and three had been enough. That more are needed for 3.4
    has another reason: they may become three again as soon as three can bear the load."""
    bench = calm(3, 1.0)
    bench.until(65)
    bench.see(*crowd(2, first=2))
    bench.load(1.95)
    bench.until(10)
    assert actions(bench.last) == [START]
    there = (*crowd(2, first=2), *started(bench, 5))
    bench.see(*there, instances=())
    bench.load(3.4)
    bench.tick()
    assert START in actions(bench.last)
    bench.see(*there, *started(bench, 6)[:1], instances=())
    bench.load(3.0)
    bench.until(900)
    assert actions(bench.last) == []
    assert binding(bench.last).startswith("with 3 workers")


@pytest.mark.parametrize(
    ("again", "removes"), [({"work": 1.1, "held_work": 60.0}, True), ({"work": 1.95}, False)]
)
def test_only_a_load_that_has_come_back_is_waited_for(again, removes):
    """Where the same load needs the worker after all, the removal was judged a little wrong: loads
    do not come back for that."""
    bench = calm(3, 1.1)
    bench.core._times.add("start", "gpu", 20.0)
    bench.until(65)
    bench.see(*crowd(2, first=2))
    bench.load(**again)
    bench.until(10)
    assert actions(bench.last) == [START]
    bench.see(*crowd(2, first=2), *started(bench, 5), instances=())
    bench.load(0.85 * again["work"])
    assert not any(output.orders for output in bench.until(600))
    bench.load(0.5, levels=((0.0, 0.5), (200.0, again["work"])))
    assert any(output.orders for output in bench.until(65)) is removes


def test_a_removal_that_was_undone_for_a_load_that_had_just_begun_is_tried_again():
    """The mean of 30 s is nearly nothing then: no load is ever below four fifths of it."""
    bench = calm(3, 0.5)
    bench.until(65)
    bench.see(*crowd(3)[1:])
    bench.forecast.frozen, bench.forecast.value = True, 1.95
    bench.load(0.0, held_work=5.0)
    bench.until(10)
    assert actions(bench.last) == [START]
    bench.see(*crowd(2, first=2), worker(5, change=names(bench)[0]), instances=())
    bench.forecast.value = 0.0
    bench.load(0.0)
    assert any("stop" in act for output in bench.until(600) for act in actions(output))


def test_a_start_that_nobody_runs_is_withdrawn_when_it_is_no_longer_needed():
    bench = Bench()
    bench.see(worker(1))
    bench.load(1.7)
    bench.tick()
    (name,) = names(bench)
    bench.see(worker(1), instances=(instance(name, "pending"),))
    bench.load(0.5)
    bench.until(45)
    assert actions(bench.last) == []
    bench.until(65)
    assert [(order.verb, order.instance) for order in bench.last.orders] == [("end", name)]
    bench.see(worker(1), instances=())
    (ended,) = [line for output in bench.until(15) for line in output.log if "after" in line]
    assert "the start of gpu is no longer needed, and is withdrawn" in ended
    assert actions(bench.last) == []


def test_a_start_that_runs_is_not_withdrawn():
    bench = Bench()
    bench.see(worker(1))
    bench.load(1.7)
    bench.tick()
    bench.see(worker(1), instances=(instance(names(bench)[0], "booting"),))
    bench.load(0.5)
    assert not any(output.orders for output in bench.until(300))


# ---------------------------------------------------------------------- panic


def test_a_panic_cancels_a_drain_within_one_tick_and_freezes_removals():
    bench = calm(3, 0.5)
    bench.until(65)
    assert actions(bench.last) == ["begin stop w1"]
    bench.see(replace(mine(1), state="draining"), *crowd(3)[1:])
    bench.tick()
    bench.load(0.8)  # 1.6 × the forecast, and two workers could still bear it
    bench.tick()
    assert actions(bench.last) == ["begin undo_drain w1"]
    bench.see(*crowd(3))
    bench.until(120)
    assert actions(bench.last) == []
    assert "the load was 1.60 × the forecast" in binding(bench.last)
    bench.until(240)
    assert any("stop" in line for line in actions(bench.last))


def test_a_panic_needs_no_second_tick():
    """6 % miss, which without a panic waits for another tick in agreement."""
    bench = calm(1, 0.5)
    bench.until(10)
    bench.load(0.96)
    assert actions(bench.tick()) == [START]


def test_what_was_ordered_is_taken_in_before_more_is():
    bench = Bench()
    bench.see(worker(1))
    bench.load(0.97)
    bench.until(10)
    asked = names(bench)
    assert len(asked) == 1
    bench.see(worker(1), instances=(instance(asked[0], "booting"),))
    bench.forecast.value = 1.9  # no panic
    bench.load(1.95)
    assert actions(bench.tick()) == []
    assert actions(bench.tick()) == [START]


def test_an_order_to_drain_that_was_not_obeyed_is_withdrawn():
    bench = calm(3, 0.5)
    bench.until(65)
    stop = bench.last.orders[0]
    bench.load(2.6)
    bench.tick()
    assert actions(bench.last) == ["begin undo_drain w1"]
    assert bench.last.orders[0].number > stop.number


def test_an_operators_drain_is_not_cancelled():
    bench = calm(2, 0.5)
    bench.see(replace(mine(1), state="draining"), mine(2))
    bench.load(1.7)
    bench.until(10)
    assert actions(bench.last) == [START]


def test_during_a_panic_the_forecast_is_what_is_observed():
    bench = calm(1, 0.5)
    bench.forecast.value, bench.forecast.frozen = 0.5, True
    bench.load(1.7)
    bench.tick()
    assert actions(bench.last) == [START]
    assert bench.last.plans[0].forecast["0.9"] == 1.7


# ---------------------------------------------------------------------- blind


def blind(**more) -> Bench:
    bench = Bench()
    bench.see(worker(1))
    bench.seen = replace(
        bench.seen, demand={MODEL: demand(0.5, **{"poor": True, "held": 3, **more})}
    )
    return bench


def test_a_blind_planner_adds_one_when_requests_wait():
    bench = blind(held_wait=0.51)
    assert actions(bench.tick()) == []
    assert actions(bench.tick()) == [START]
    bench.until(30)
    assert actions(bench.last) == [START]  # the same order, until it shows


def test_a_blind_planner_holds_when_they_do_not_wait_for_long():
    bench = blind(held_wait=0.49)
    assert not any(output.orders for output in bench.until(120))


def test_a_blind_planner_never_shrinks():
    bench = blind()
    bench.see(*crowd(4))
    assert not any(output.orders for output in bench.until(1200))


def test_being_blind_is_told_after_a_minute_and_by_whom():
    bench = Bench()
    bench.see(worker(1))
    faults = "router r1 no longer reports its demand"
    bench.seen = replace(bench.seen, demand={MODEL: demand(0.0, known=False, faults=faults)})
    bench.until(60)
    assert bench.last.degraded == {}
    bench.tick()
    assert bench.last.degraded["planner_blind"] == f"m: for 60 s: {faults}"
    bench.load(0.5)
    assert bench.tick().degraded == {}


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"poor": True}, "predictions have been wrong"),
        ({"first_tokens": 19}, "19 first tokens seen of 20"),
        ({"level": float("nan")}, "level is not a number"),
        ({"peak_300": float("inf")}, "peak_300 is not a number"),
    ],
)
def test_what_makes_it_blind(fields, says):
    bench = Bench()
    bench.see(*crowd(3))
    bench.load(0.5, **fields)
    bench.until(120)
    assert actions(bench.last) == []
    assert says in bench.last.plans[0].blind


# ---------------------------------------------------------------------- floors and leases


def test_the_floor_is_kept_whatever_the_load():
    bench = Bench(config(pool(min=3)))
    bench.see(worker(1))
    bench.load(0.0)
    assert actions(bench.tick()) == [START] * 2
    blind_bench = Bench(config(pool(min=2)))
    blind_bench.see(worker(1))
    assert actions(blind_bench.tick()) == [START]


@pytest.mark.parametrize(
    ("pools", "kinds", "says"),
    [
        ((pool(min=2, kinds=("gpuu",)),), KINDS, "no actuator offers a kind gpuu"),
        ((pool(min=2),), (), "no actuator offers a kind for this model"),
        ((pool(min=2), pool(model="n")), KINDS, "its pool names no kinds"),
    ],
)
@pytest.mark.parametrize("known", [True, False])
def test_a_floor_that_cannot_be_kept_is_said(pools, kinds, says, known):
    bench = Bench(config(*pools))
    bench.see(worker(1), kinds=kinds)
    if known:
        bench.load(0.1)
    for output in bench.until(130):
        assert actions(output) == []
        assert binding(output).startswith(
            f"min and floors ask for 2, and 1 serve: nothing can start a worker: {says}"
        )
        assert output.degraded["planner_floor"].startswith(f"{MODEL}: {binding(output)}")
    bench.see(worker(1), worker(2))
    assert f"{MODEL}: min" not in bench.tick().degraded.get("planner_floor", "")


def test_a_drain_is_taken_back_for_the_floor_before_a_worker_is_started():
    """A start takes minutes. It does not matter that nobody asks for anything."""
    bench = calm(2, 0.1)
    bench.until(65)
    assert actions(bench.last) == ["begin stop w1"]
    bench.load(0.0)
    going = mine(1, state="draining", ordered=True)
    bench.see(going, mine(2))
    bench.tick()
    bench.see(going)
    assert actions(bench.tick()) == ["begin undo_drain w1"]
    assert actions(bench.tick()) == ["begin undo_drain w1"]
    bench.see(mine(1))
    assert actions(bench.tick()) == []


def test_an_empty_pool_is_started_without_any_demand():
    bench = Bench()
    assert actions(bench.tick()) == [START]


def test_a_floor_of_prefill_and_decode_workers_has_both():
    bench = Bench(config(pool(min=3, modes=("prefill", "decode"))))
    bench.tick()
    started = [order.change.mode for order in bench.last.orders]
    assert started == ["decode", "prefill", "decode"]


def test_two_models_have_a_budget_and_reasons_of_their_own():
    pools = (pool(kinds=("gpu",), min=1), pool(model="n", kinds=("cpu",), min=1))
    bench = Bench(config(*pools, budget=4.0))
    kinds = (Kind(name="gpu", actuator="fake"), Kind(name="cpu", actuator="fake"))
    other = replace(worker(2), model="n")
    bench.see(worker(1), other, kinds=kinds)
    bench.seen = replace(bench.seen, demand={MODEL: demand(5.0), "n": demand(5.0)})
    bench.until(10)
    assert [order.change.kind for order in bench.last.orders] == ["gpu", "gpu"]
    bench.seen = replace(bench.seen, demand={})
    bench.until(65)
    words = bench.last.degraded["planner_blind"]
    assert "m: for" in words
    assert "n: for" in words


def test_a_defect_in_one_models_decisions_leaves_the_others_alone(caplog):
    class Broken(LinearJudge):
        def judge(self, traffic, objectives, load, candidates):
            if load.work == 5.0:
                raise ZeroDivisionError
            return super().judge(traffic, objectives, load, candidates)

    pools = (pool(kinds=("gpu",)), pool(model="n", kinds=("cpu",)))
    bench = Bench(config(*pools), judge=Broken())
    kinds = (Kind(name="gpu", actuator="fake"), Kind(name="cpu", actuator="fake"))
    bench.see(worker(1), replace(worker(2), model="n"), kinds=kinds)
    bench.seen = replace(bench.seen, demand={MODEL: demand(5.0), "n": demand(2.5)})
    output = bench.tick()
    assert [order.change.kind for order in output.orders] == ["cpu", "cpu"]
    assert output.degraded["planner_failed"].startswith("m: ZeroDivisionError in a decision")
    assert "ZeroDivisionError" in caplog.text
    assert [plan.model for plan in output.plans] == ["n"]
    bench.load(0.5)
    assert "planner_failed" not in bench.tick().degraded
    assert [plan.model for plan in bench.last.plans] == ["m", "n"]


def test_workers_of_a_floor_are_started_before_it_holds():
    floor = Floor(begin=3600.0, end=7200.0, min=3)
    bench = Bench(config(pool(floors=(floor,))))
    bench.see(worker(1))
    bench.load(0.1)
    bench.seen = replace(bench.seen, wall=3600.0 - 181)
    assert actions(bench.tick()) == []
    bench.seen = replace(bench.seen, wall=3600.0 - 180)
    assert actions(bench.tick()) == [START] * 2


def test_a_worker_that_ends_gets_its_successor_in_time():
    """Start-up 120 s, drain 5 s, slack 60 s."""
    bench = calm(2, 1.0)
    bench.see(mine(1, hard_end=186.0), mine(2))
    assert actions(bench.tick()) == []
    bench.see(mine(1, hard_end=185.0), mine(2))
    assert actions(bench.tick()) == [START]
    assert bench.last.orders[0].change.reason == "w1 will be ended from outside"
    assert binding(bench.last) == "w1 will be ended from outside"
    shown = (instance(names(bench)[0], "booting"),)
    bench.see(mine(1, hard_end=100.0), mine(2), instances=shown)
    bench.until(20)
    assert actions(bench.last) == []


def test_a_worker_that_ends_gets_one_successor_and_another_if_that_fails():
    bench = calm(2, 1.0)
    bench.see(mine(1, hard_end=185.0), mine(2))
    assert actions(bench.tick()) == [START]
    name = names(bench)[0]
    bench.see(mine(1, hard_end=90.0), mine(2), worker(3, change=name))
    bench.until(40)
    assert actions(bench.last) == []
    other = calm(2, 1.0)
    other.see(mine(1, hard_end=185.0), mine(2))
    other.tick()
    other.see(mine(1, hard_end=90.0), mine(2), instances=(instance(names(other)[0], "failed"),))
    assert actions(other.tick()) == []
    assert any(actions(output) == [START] for output in other.until(65))


def test_a_successor_may_exceed_max_but_not_the_budget():
    bench = Bench(config(pool(max=2)))
    bench.see(mine(1, hard_end=60.0), mine(2))
    bench.load(1.0)
    assert actions(bench.tick()) == [START]
    bench = Bench(config(pool(max=2), budget=2.0))
    bench.see(mine(1, hard_end=60.0), mine(2))
    bench.load(1.0)
    assert actions(bench.tick()) == []


def test_a_successor_has_the_mode_of_the_one_that_ends():
    bench = Bench(config(pool(modes=("prefill", "decode"))))
    bench.see(mine(1, "prefill"), mine(2, "decode", hard_end=100.0))
    bench.load(0.5)
    assert actions(bench.tick()) == ["begin start decode"]


def test_what_ends_before_a_start_would_serve_is_no_capacity():
    bench = calm(2, 1.6)
    bench.see(mine(1, hard_end=100.0), mine(2))
    bench.tick()
    assert bench.last.plans[0].miss_before == 0.0  # the successor comes first
    bench.load(2.6)
    bench.tick()
    assert actions(bench.last).count(START) >= 2


# ---------------------------------------------------------------------- switches


def test_a_worker_keeps_its_mode_for_a_while():
    bench = Bench(config(pool(modes=("prefill", "decode"), max=4)))
    bench.judge.decode_weight = 0.3
    disagg(bench)
    bench.load(5.0)
    assert not any(output.orders for output in bench.until(90))
    bench.until(10)
    assert actions(bench.last) == ["begin mode w10>prefill"]


@pytest.mark.parametrize(
    ("miss_share", "work", "switched"),
    [(None, 4.0, True), (0.04, 4.0, True), (0.02, 4.0, False), (0.02, 5.0, True)],
)
def test_modes_stay_where_the_objective_is_kept_with_room_to_spare(miss_share, work, switched):
    """Unless a fifth of the next requests will miss: what was observed is of the past."""
    bench = Bench(config(pool(modes=("prefill", "decode"), max=4)))
    bench.judge.decode_weight = 0.3
    disagg(bench)
    bench.load(work, miss_share=miss_share)
    orders = [action for _ in range(40) for action in actions(bench.tick())]
    assert any("mode" in one for one in orders) is switched


def test_a_switch_is_not_taken_back_at_once():
    bench = Bench(config(pool(modes=("prefill", "decode"), max=4)))
    bench.judge.decode_weight = 0.3
    disagg(bench)
    bench.load(5.0)
    bench.until(100)
    bench.see(*crowd(2, "prefill"), mine(10, "prefill"), mine(11, "decode"))
    bench.tick()
    bench.judge.decode_weight = 1.4  # now the former ratio would be right
    bench.load(3.0)
    began = bench.now
    while not bench.tick().orders:
        assert bench.now < began + 240
    assert bench.now >= began + 120  # three slow ticks agree


@pytest.mark.parametrize("why", ["fixed", "pinned", "refused"])
def test_workers_that_cannot_be_switched_are_not(why):
    bench = Bench(config(pool(modes=("prefill", "decode"), max=4)))
    bench.judge.decode_weight = 0.3
    more = {"fixed": {"can_switch": False}, "pinned": {"pinned": True}, "refused": {}}[why]
    fixed = [mine(10, "decode", **more), mine(11, "decode", **more)]
    bench.see(*crowd(2, "prefill"), *fixed)
    bench.load(2.0)
    bench.until(100)
    bench.load(5.0)
    bench.until(10)
    if why == "refused":
        assert actions(bench.last) == ["begin mode w10>prefill"]
        vetoed = Refusal("vetoed", "no other worker decodes")
        bench.tick(refusals={names(bench)[0]: vetoed})
        assert actions(bench.last) == ["begin mode w11>prefill"]
    else:
        assert actions(bench.last) == []


def test_a_switch_waits_for_another_removal():
    bench = Bench(config(pool(modes=("prefill", "decode"), max=4)))
    bench.judge.decode_weight = 0.3
    leaving = mine(20, "decode", state="leaving", target="decode")
    bench.see(*crowd(2, "prefill"), *crowd(2, "decode", 10), leaving)
    bench.load(7.0)
    bench.until(70)
    assert actions(bench.last) == []


# ---------------------------------------------------------------------- the operator


def test_a_worker_that_was_started_by_hand_stays_for_an_hour():
    bench = calm(1, 0.3)
    bench.see(worker(1), worker(2))
    assert not any(output.orders for output in bench.until(3590))
    assert "was started by hand" in binding(bench.last)
    assert any(output.orders for output in bench.until(130))


def test_a_mode_that_was_set_by_hand_stays():
    bench = Bench(config(pool(modes=("prefill", "decode"), max=4)))
    disagg(bench)
    bench.load(2.0)
    bench.until(20)
    bench.see(mine(1, "prefill"), mine(2, "decode"), *crowd(2, "decode", 10))
    bench.tick()
    bench.judge.decode_weight = 0.3
    bench.load(3.0)
    bench.until(1000)
    assert "w2" not in " ".join(actions(bench.last))


def test_what_another_planner_switched_was_not_set_by_hand():
    """The one that owned the model before this one, or while this one did not."""
    other = next(
        NodeId(f"p{n}")
        for n in range(99)
        if owner_of(MODEL, [ME, NodeId(f"p{n}")], budget=0.0) != ME
    )
    both, alone, switched = (ME, other), (ME,), mine(10, "prefill")
    for before, then in ((both, alone), (alone, both)):
        bench = Bench(config(pool(modes=("prefill", "decode"), max=4)))
        bench.see(mine(1, "prefill"), *crowd(3, "decode", 10))
        bench.load(2.0)
        bench.tick(planners=before)
        bench.see(mine(1, "prefill"), switched, *crowd(2, "decode", 11))
        bench.tick(planners=then)
        assert bench.core._tenure.may_switch(bench.now, switched) == ""


def test_a_pinned_worker_is_not_removed():
    bench = calm(2, 0.3)
    bench.see(mine(1, pinned=True), mine(2, pinned=True))
    bench.until(130)
    assert actions(bench.last) == []
    assert binding(bench.last) == "w1 is pinned"


def test_a_paused_model_is_left_alone():
    bench = Bench(config(pool(min=3)))
    bench.see(worker(1), paused={MODEL: "ada, until she resumes it"})
    bench.load(5.0)
    bench.until(120)
    assert actions(bench.last) == []
    assert binding(bench.last) == "paused by ada, until she resumes it"


def test_a_pinned_pool_gets_what_the_operator_fixed():
    bench = calm(4, 0.1)
    bench.see(*crowd(4), pins={MODEL: {"aggregated": 2}})
    bench.tick()
    assert actions(bench.last) == ["begin stop w1"]
    assert binding(bench.last) == "pinned to aggregated=2"
    bench.see(mine(3), pins={MODEL: {"aggregated": 2}})
    bench.until(20)
    assert actions(bench.last) == [START]


def test_a_pin_switches_before_it_starts():
    bench = Bench(config(pool(modes=("prefill", "decode"))))
    disagg(bench, pins={MODEL: {"prefill": 1, "decode": 3}})
    bench.load(0.5)
    assert actions(bench.tick()) == ["begin mode w1>decode"]


def test_a_pin_does_not_repeat_a_switch_that_was_refused():
    """Not for 300 s; then it is tried again."""
    bench = Bench(config(pool(modes=("prefill", "decode"))))
    pins = {MODEL: {"prefill": 1, "decode": 3}}
    disagg(bench, pins=pins, kinds=())
    bench.load(0.5)
    assert actions(bench.tick()) == ["begin mode w1>decode"]
    refused = {names(bench)[0]: Refusal("vetoed", "it is the last one")}
    assert actions(bench.tick(refusals=refused)) == ["begin mode w2>decode"]
    refused = {names(bench)[0]: Refusal("vetoed", "it is the last one")}
    assert actions(bench.tick(refusals=refused)) == []
    assert not any(output.orders for output in bench.until(285))
    assert actions(bench.tick(20)) == ["begin mode w1>decode"]


def test_a_pin_does_not_repeat_a_stop_that_was_refused():
    bench = Bench(config(pool()))
    bench.see(*crowd(3), pins={MODEL: {"aggregated": 2}})
    bench.load(0.5)
    assert actions(bench.tick()) == ["begin stop w1"]
    refused = {names(bench)[0]: Refusal("vetoed", "it is needed")}
    assert actions(bench.tick(refusals=refused)) == ["begin stop w2"]
    refused = {names(bench)[0]: Refusal("vetoed", "it is needed")}
    assert actions(bench.tick(refusals=refused)) == ["begin stop w3"]
    refused = {names(bench)[0]: Refusal("vetoed", "it is needed")}
    assert actions(bench.tick(refusals=refused)) == []
    assert not any(output.orders for output in bench.until(280))
    assert actions(bench.tick(30)) == ["begin stop w1"]


@pytest.mark.parametrize("state", ["pending", "booting"])
def test_a_pin_keeps_the_last_worker_that_takes_requests(state):
    """The pinned workers are only coming, and a prefill worker takes none."""
    bench = Bench(config(pool(modes=("aggregated", "prefill", "decode"))))
    pins = {MODEL: {"aggregated": 2}}
    fixed = {"can_switch": False}
    bench.see(mine(1, "prefill", **fixed), mine(10, "decode", **fixed), pins=pins)
    bench.load(0.5)
    assert actions(bench.tick()) == [START] * 2
    shown = tuple(instance(one, state) for one in names(bench))
    bench.see(*bench.seen.workers, instances=shown)
    bench.tick()
    stopped = [line for output in bench.until(60) for line in actions(output)]
    assert {*stopped} == {"begin stop w1"}


def test_a_pin_keeps_the_floor_while_its_workers_are_coming():
    bench = Bench(config(pool(min=2, modes=("aggregated", "prefill", "decode"))))
    pins = {MODEL: {"aggregated": 2}}
    there = [mine(1), mine(10, "decode", can_switch=False)]
    bench.see(*there, pins=pins)
    bench.load(0.5)
    assert actions(bench.tick()) == [START]
    (name,) = names(bench)
    bench.see(*there, instances=(instance(name, "booting"),))
    assert not any(output.orders for output in bench.until(60))
    bench.see(*there, worker(2, change=name), instances=(instance(name, "running"),))
    assert actions(bench.tick()) == ["begin stop w10"]


def test_a_pin_without_prefill_and_decode_gets_rid_of_the_last_of_both():
    """Neither stops while the other one needs it."""
    bench = Bench(config(pool(modes=("aggregated", "prefill", "decode"))))
    pins = {MODEL: {"aggregated": 2}}
    bench.see(*crowd(2), mine(10, "prefill"), mine(11, "decode"), pins=pins)
    bench.load(0.5)
    (order,) = bench.tick().orders
    assert (order.change.node, order.change.mode, order.last) == ("w11", "aggregated", True)
    bench.see(*crowd(2), mine(10, "prefill"), mine(11, live_tokens=1))
    assert actions(bench.tick()) == ["begin stop w1"]
    bench.see(mine(2), mine(10, "prefill"), mine(11))
    assert actions(bench.tick()) == ["begin stop w10"]


def test_a_pin_starts_nothing_that_the_next_switch_brings():
    bench = Bench(config(pool(modes=("aggregated", "prefill", "decode"))))
    bench.see(*crowd(3), pins={MODEL: {"prefill": 1, "decode": 2}})
    assert actions(bench.tick()) == ["begin mode w1>decode"]
    changing = replace(bench.seen.workers[0], state="leaving", target="decode")
    bench.see(changing, *crowd(3)[1:], pins={MODEL: {"prefill": 1, "decode": 2}})
    assert actions(bench.tick()) == []
    bench.see(changing, *crowd(3)[1:], pins={MODEL: {"prefill": 2, "decode": 2}})
    assert actions(bench.tick()) == ["begin start decode"]


def test_a_pin_starts_nothing_while_the_others_are_needed():
    """One of two decode workers changes: the other and the prefill worker serve together."""
    bench = Bench(config(pool(modes=("aggregated", "prefill", "decode"))))
    pins = {MODEL: {"aggregated": 3}}
    workers = (worker(1, "decode"), worker(2, "decode"), worker(3, "prefill"))
    bench.see(*workers, pins=pins)
    assert actions(bench.tick()) == ["begin mode w1>aggregated"]
    bench.see(replace(workers[0], state="leaving", target="aggregated"), *workers[1:], pins=pins)
    assert actions(bench.tick()) == []
    bench.see(worker(1), *workers[1:], pins=pins)
    assert actions(bench.tick()) == ["begin mode w2>aggregated"]


def test_a_pin_takes_the_last_decode_and_the_last_prefill_worker():
    bench = Bench(config(pool(modes=("aggregated", "prefill", "decode"))))
    workers = (worker(1, "prefill"), worker(2, "decode"))
    bench.see(*workers, pins={MODEL: {"aggregated": 2}})
    (order,) = bench.tick().orders
    assert (order.change.node, order.change.mode, order.last) == ("w1", "aggregated", True)
    bench.see(worker(1), worker(2, "decode"), pins={MODEL: {"aggregated": 2}})
    (order,) = bench.tick().orders
    assert (order.change.node, order.change.mode, order.last) == ("w2", "aggregated", True)
    bench = Bench(config(pool(modes=("prefill", "decode"))))
    disagg(bench, pins={MODEL: {"prefill": 1, "decode": 3}})
    (order,) = bench.tick().orders
    assert not order.last, "another one computes prompts"


def test_a_worker_of_the_wrong_mode_is_drained():
    bench = Bench(config(pool(modes=("prefill", "decode"))))
    disagg(bench)
    bench.judge.decode_weight = 2.0
    bench.load(4.0)
    bench.until(10)
    name = names(bench)[0]
    assert actions(bench.last)[0] == "begin start decode"
    bench.judge.decode_weight = 1.0
    bench.load(1.0)
    came = worker(30, "prefill", kind="gpu", change=name)
    disagg(bench)
    bench.see(*bench.seen.workers, came)
    bench.tick()
    assert "begin stop w30" in actions(bench.last)
    assert "w30 came otherwise" in bench.last.degraded["planner_kind_failing"]


# ---------------------------------------------------------------------- who decides


def test_each_model_has_one_planner_and_all_planners_agree():
    planners = [NodeId(f"planner-{number}") for number in range(5)]
    models = [f"model-{number}" for number in range(200)]
    owners = {model: owner_of(model, planners, budget=0.0) for model in models}
    assert {*owners.values()} == {*planners}
    assert owners == {m: owner_of(m, planners[::-1], budget=0.0) for m in models}
    lost = planners[0]
    for model, owner in owners.items():
        if owner != lost:
            assert owner_of(model, planners[1:], budget=0.0) == owner


def test_with_a_budget_one_planner_has_all_models():
    planners = [NodeId(f"planner-{number}") for number in range(5)]
    models = [f"model-{number}" for number in range(50)]
    assert len({owner_of(model, planners, budget=8.0) for model in models}) == 1


def test_a_planner_decides_only_for_its_models():
    other = NodeId("planner-2")
    owned = owner_of(MODEL, [ME, other], budget=0.0) == ME
    bench = Bench()
    bench.see(planners=(ME, other))
    assert bool(bench.tick().orders) is owned
    stranger = Bench()
    bigger = next(
        NodeId(f"p{n}")
        for n in range(99)
        if owner_of(MODEL, [ME, NodeId(f"p{n}")], budget=0.0) != ME
    )
    stranger.see(planners=(ME, bigger))
    assert stranger.tick().plans == ()
    assert stranger.tick(planners=(ME,)).orders


def test_a_restarted_planner_goes_on_from_the_lists():
    bench = Bench()
    bench.see(worker(1))
    bench.load(2.8)
    bench.tick()
    shown = [instance(name, "booting") for name in names(bench)]
    bench.see(worker(1), instances=tuple(shown))
    bench.tick()
    bench.term = 2
    bench.restart()
    assert bench.tick().orders == ()
    assert bench.last.plans[0].target == {"aggregated": 3}
    assert {change.id for change in bench.last.plans[0].changes} == {one.change for one in shown}


def test_a_planner_that_dies_before_the_list_shows_a_start_does_not_double_it():
    """The change is asked for, and the planner dies. Its successor asks the list first: it begins
    after the list has been read."""
    bench = Bench()
    bench.see(worker(1))
    bench.load(1.7)
    bench.tick()
    (asked,) = names(bench)
    bench.term = 2
    bench.restart()
    bench.see(worker(1), instances=(instance(asked, "pending"),))
    bench.until(30)
    assert actions(bench.last) == []


def test_orders_carry_term_and_a_number_that_grows():
    bench = calm(3, 0.5)
    bench.term = 77
    bench.restart()
    bench.until(65)
    stop = bench.last.orders[0]
    bench.load(2.6)
    bench.tick()
    undo = bench.last.orders[0]
    assert (stop.term, undo.term) == (77, 77)
    assert undo.number > stop.number > 0


def test_a_model_that_is_taken_over_begins_a_term():
    """Its last owner may have begun its life later than this planner."""
    bench = calm(3, 0.5)
    other = next(one for one in map(NodeId, "abcdefgh") if not owns_beside(one))
    bench.seen = replace(bench.seen, planners=(ME, other), wall=100.0)
    bench.until(60)
    assert bench.last.plans == ()
    bench.seen = replace(bench.seen, planners=(ME,), wall=200.0)
    orders = [order for output in bench.until(125) for order in output.orders]
    assert {order.term for order in orders} == {200_000}


def owns_beside(other: NodeId) -> bool:
    return owner_of(MODEL, (ME, other), budget=config().budget) == ME


def test_an_owner_whose_orders_are_stale_begins_a_term_when_it_must_know_the_other():
    bench = calm(3, 0.5)
    bench.seen = replace(bench.seen, wall=100.0)
    bench.until(65)
    (stop,) = bench.last.orders
    assert stop.term == 100_000
    refusals = {stop.change.id: Refusal("stale", "stale: a later planner has ordered it")}
    bench.tick(refusals=refusals, wall=165.0)
    terms = [bench.tick(wall=165.0 + 5 * tick).plans[0].term for tick in range(1, 20)]
    assert terms[4] == 100_000
    assert terms[5:] == [195_000] * 14


def test_a_term_of_a_clock_that_was_ahead_is_exceeded():
    """A planner whose clock was a year ahead has gone: its successor would be refused as long."""
    bench = calm(3, 0.5)
    bench.seen = replace(bench.seen, wall=100.0)
    bench.until(65)
    (stop,) = bench.last.orders
    ahead = stop.term + 365 * 86_400_000
    bench.tick(refusals={stop.change.id: Refusal("stale", "stale: a later planner", newest=ahead)})
    bench.until(35)
    assert bench.last.plans[0].term == ahead + 1
    bench.until(65)
    assert {order.term for order in bench.last.orders} <= {ahead + 1}


def test_a_planner_that_only_advises_orders_nothing_and_says_the_same():
    bench = Bench(config(mode="advise"))
    bench.see(worker(1))
    bench.load(2.8)
    outputs = bench.until(30)
    assert not any(output.orders for output in outputs)
    assert bench.last.plans[0].target == {"aggregated": 3}
    assert sum(len(output.log) for output in outputs) == 1


def test_a_configuration_that_cannot_work_is_refused():
    with pytest.raises(ConfigError):
        Bench(config(pool(min=3), budget=2.0))


# ---------------------------------------------------------------------- ends


def test_a_worker_that_does_not_end_is_ended_by_its_actuator_after_its_drain():
    bench = calm(3, 0.5)
    bench.until(65)
    bench.see(replace(mine(1), state="draining"), *crowd(3)[1:])
    bench.until(60)
    assert actions(bench.last) == []
    bench.until(10)
    (order,) = bench.last.orders
    assert (order.verb, order.instance) == ("end", mine(1).change)


def test_a_worker_that_never_becomes_ready_does_not_block_others():
    bench = Bench()
    bench.see(worker(1))
    bench.load(1.7)
    bench.tick()
    name = names(bench)[0]
    bench.see(worker(1), instances=(instance(name, "booting"),))
    bench.until(365)
    assert ("end", name) in [(order.verb, order.instance) for order in bench.last.orders]
    bench.see(worker(1), instances=())
    bench.until(70)
    assert actions(bench.last) == [START]
    assert names(bench) != [name]


def test_a_life_that_dies_during_its_drain_is_gone():
    bench = calm(3, 0.5)
    bench.until(65)
    bench.see(replace(mine(1), state="draining"), *crowd(3)[1:])
    bench.tick()
    bench.see(*crowd(3)[1:])
    bench.tick()
    assert "stop w1 after" in bench.last.log[0]
    assert bench.last.plans[0].present == {"aggregated": 2}
    assert bench.last.orders == ()


# ---------------------------------------------------------------------- starts that do not come


def test_starts_that_come_late_are_not_asked_for_again():
    """A queue may say that a start runs in an hour: that is no reason for one more at each tick."""
    bench = Bench()
    bench.see(worker(1))
    bench.load(1.7)
    asked: set[str] = set()
    for _ in range(10):
        bench.tick()
        asked |= {*names(bench)}
        late = tuple(instance(one, "pending", expected=3600.0) for one in asked)
        bench.see(worker(1), instances=late)
    assert len(asked) == 1


def test_starts_of_a_kind_that_is_slower_than_the_preferred_one_are_not_asked_for_again():
    """The preferred kind is full, and its start-up is the horizon."""
    kinds = (Kind(name="fast", actuator="fake", slots=1), Kind(name="slow", actuator="fake"))
    bench = Bench(config(pool(kinds=("fast", "slow"), max=12)))
    bench.see(mine(1), kinds=kinds)
    asked: dict[str, str] = {}
    for work in (1.7, *[3.5] * 10):
        bench.load(work)
        for order in bench.tick().orders:
            asked[order.change.id] = order.change.kind
        fast = [mine(1)]
        came = [one for one, kind in asked.items() if kind == "fast"]
        fast += [replace(worker(2, kind="fast"), change=one) for one in came]
        if came and bench.now < 1020:
            continue
        slow = [instance(one, "booting", "slow") for one, kind in asked.items() if kind == "slow"]
        slow += [instance(one, "running", "fast") for one in came]
        bench.see(*fast, kinds=kinds, instances=tuple(slow))
    assert sorted(asked.values()) == ["fast", "slow", "slow"]


def test_a_start_that_is_being_ended_is_no_capacity():
    """Its actuator cannot end it, and lists it as running for ever."""
    bench = Bench()
    bench.see(worker(1))
    bench.load(1.7)
    bench.tick()
    (stuck,) = names(bench)
    bench.see(worker(1), instances=(instance(stuck, "running"),))
    bench.until(365 + 70)
    assert sorted(actions(bench.last)) == [START, "end start aggregated"]


@pytest.mark.parametrize("work", [0.5, 1.7])
def test_a_worker_whose_engine_does_not_come_back_is_replaced(work):
    bench = Bench()
    bench.see(*crowd(2) if work > 1 else crowd(1))
    bench.load(work)
    bench.tick()
    broken = mine(1, state="loading")
    others = crowd(1, first=2) if work > 1 else []
    bench.see(broken, *others, instances=(instance(broken.change, "running"),))
    bench.until(300)
    assert actions(bench.last) == []
    bench.until(70)
    assert actions(bench.last) == [START]
    bench.see(*crowd(2))
    bench.tick()
    assert bench.last.plans[0].present == {"aggregated": 2}


def test_running_instances_are_not_ended_while_nothing_of_the_cluster_is_seen():
    """A planner that begins without a way to the workers, but with one to their actuator, finds
    processes that never become members. They may serve all the same."""
    bench = Bench()
    there = crowd(3)
    listed = tuple(instance(one.change, "running") for one in there)
    bench.see(instances=listed)
    assert not any(output.orders for output in bench.until(1800))
    bench.see(there[0], instances=listed)
    bench.load(0.5)
    assert not any(output.orders for output in bench.until(30))
    bench.see(*there, instances=listed)
    assert not any(output.orders for output in bench.until(30))


def test_a_worker_of_the_wrong_mode_is_not_drained_if_it_is_the_last():
    bench = Bench()
    bench.see(worker(1))
    bench.load(1.7)
    bench.tick()
    came = worker(2, "decode", kind="gpu", change=names(bench)[0])
    bench.see(came)
    bench.load(0.1)
    assert not any("stop" in act for output in bench.until(60) for act in actions(output))
    bench.see(came, *crowd(1, first=3))
    bench.tick()
    assert actions(bench.last) == ["begin stop w2"]


def test_a_worker_of_the_wrong_mode_that_the_load_needs_is_not_drained_again():
    bench = Bench()
    bench.see(*crowd(1))
    bench.load(1.7)
    bench.tick()
    came = worker(2, "decode", kind="gpu", change=names(bench)[0])
    bench.see(*crowd(1), came)
    bench.tick()
    assert actions(bench.last) == ["begin stop w2"]
    seen = []
    drains = replace(came, state="draining")
    for now in (drains, drains, *[came] * 10):
        bench.see(*crowd(1), now)
        seen += [act for act in actions(bench.tick()) if "w2" in act]
    assert seen[-1] == "begin undo_drain w2"
    assert "begin stop w2" not in seen[seen.index("begin undo_drain w2") :]


# ---------------------------------------------------------------------- removals


def test_nothing_is_removed_before_the_load_has_been_seen_for_long_enough():
    """A planner that begins in a lull knows nothing of the load before."""
    bench = calm(3, 0.5)
    for seen in range(5, 300, 5):
        bench.load(0.5, seen=float(seen))
        assert actions(bench.tick()) == []
    assert "the demand has been seen for 2" in binding(bench.last)
    bench.load(0.5, seen=300.0)
    assert ["begin stop w1"] in [actions(output) for output in bench.until(65)]


def test_a_busy_pool_does_not_shrink_because_its_objective_cannot_be_kept():
    class Hopeless(LinearJudge):
        """All prompts are too long for the objective, so that none is judged."""

        def _outcome(self, objectives, load, candidate):
            real = super()._outcome(objectives, load, candidate)
            return PoolOutcome(miss=0.0, unreachable=1.0, utilisation=real.utilisation)

    bench = Bench(judge=Hopeless())
    bench.see(*crowd(4))
    bench.load(3.5)
    assert not any(output.orders for output in bench.until(600))
    assert "100.0% of the requests have prompts that take longer" in binding(bench.last)
    bench.load(1.5)
    assert ["begin stop w1"] in [actions(output) for output in bench.until(65)]


def test_longer_prompts_are_forecast_as_work_at_once():
    """The forecast knows as many requests as before, and each is five times the work."""
    bench = Bench(config(pool(max=10)))
    bench.see(*crowd(2))
    bench.load(1.0, request_work=0.1)
    bench.until(60)
    assert bench.last.plans[0].forecast["0.5"] == pytest.approx(1.0)
    bench.forecast.frozen = True
    bench.load(5.0, request_work=0.5)
    bench.tick()
    assert bench.last.plans[0].forecast["0.5"] == pytest.approx(5.0)


def test_switches_are_judged_at_each_tick_while_one_is_under_way():
    """None may begin then, which does not make them futile: the next must not wait when it ends."""
    bench = Bench(config(pool(modes=("prefill", "decode"), max=6)))
    bench.judge.decode_weight = 0.1
    prefill, decode = crowd(1, "prefill"), crowd(5, "decode", 10)
    bench.see(*prefill, *decode)
    bench.load(20.0)
    while not bench.tick().orders:
        assert bench.now < 1200.0
    changing = bench.last.orders[0].change.node
    leaving = [
        replace(one, target="prefill", state="leaving") if one.node == changing else one
        for one in decode
    ]
    bench.see(*prefill, *leaving)
    for _ in range(3):
        bench.judge.asked.clear()
        bench.tick()
        assert any(len(candidates) > 1 for _, candidates in bench.judge.asked)

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from pdserve.planner.changes.book import Step
from pdserve.planner.changes.table import Action
from pdserve.planner.outlook import PoolCandidate, PoolOutcome
from pdserve.planner.rules.scene import slot_of
from pdserve.planner.rules.switches import BetterRatio, LastSwitch, switches
from tests.planner.support import Bench, actions, config, pool
from tests.planner.test_core import crowd, mine

BACK, ON = ("decode", "prefill"), ("prefill", "decode")


def found(modes: tuple[str, str], before: float = 0.2, after: float = 0.1) -> BetterRatio:
    step = Step(action=Action.SWITCH, reason="r", mode=modes[1])
    return BetterRatio(step, modes, PoolOutcome(miss=before), PoolOutcome(miss=after))


def last() -> LastSwitch:
    one = LastSwitch(stable=300.0, ticks=3, gain=0.15)
    one.did(0.0, ON)
    return one


def test_a_switch_back_needs_three_ticks_with_an_advantage():
    one = last()
    assert one.forbidden(299.0) == BACK
    assert [one.allows(at, found(BACK)) for at in (60.0, 120.0, 180.0)] == [False, False, True]


def test_ticks_must_follow_each_other():
    one = last()
    assert not one.allows(60.0, found(BACK))
    assert one.allows(120.0, None)
    assert [one.allows(at, found(BACK)) for at in (180.0, 240.0)] == [False, False]


def test_a_small_advantage_does_not_count():
    one = last()
    weak = found(BACK, before=0.2, after=0.171)
    assert not any(one.allows(at, weak) for at in (60.0, 120.0, 180.0, 240.0))


def test_other_switches_and_late_ones_are_free():
    one = last()
    assert one.allows(60.0, found(ON))
    assert one.allows(300.0, found(BACK))
    assert LastSwitch(300.0, 3, 0.15).allows(0.0, found(BACK))


def ordered(prefill: int, decode: int, work: float, weight: float) -> set[str]:
    """All that is ordered in a pool that may not grow, past its dwell."""
    bench = Bench(config(pool(modes=("prefill", "decode"), max=prefill + decode)))
    bench.judge.decode_weight = weight
    bench.see(*crowd(prefill, "prefill"), *crowd(decode, "decode", 10))
    bench.load(0.0)
    bench.until(55)
    bench.load(work)
    return {line for output in bench.until(110) for line in actions(output)}


def test_the_mode_that_gives_a_worker_keeps_room():
    """After the switch two decode workers would be 94 % busy, or 56 %."""
    assert ordered(2, 3, 4.7, 0.8) == set()
    assert "begin mode w10>prefill" in ordered(2, 3, 4.7, 0.48)


def test_a_worker_keeps_its_mode_for_dwell():
    """The ratio is wrong from the beginning, and the workers were first seen then."""
    bench = Bench(config(pool(modes=("prefill", "decode"), max=5), dwell=90.0))
    bench.judge.decode_weight = 0.48
    bench.see(*crowd(2, "prefill"), *crowd(3, "decode", 10))
    bench.load(4.7)
    orders = [actions(output) for output in bench.until(130)]
    first = next(at for at, lines in enumerate(orders) if lines)
    assert orders[first] == ["begin mode w10>prefill"]
    assert 5.0 * first >= 90.0, "after the tick at which they were first seen"


def test_a_worker_is_not_switched_more_than_four_times_in_an_hour():
    bench = Bench(config(pool(modes=("prefill", "decode"), max=4), stable=1.0, dwell=1.0))
    workers = [*crowd(2, "prefill"), *crowd(2, "decode", 10)]
    bench.see(*workers)
    bench.load(5.0)
    count = 0
    for turn in range(200):
        bench.judge.decode_weight = 0.3 if turn // 20 % 2 else 3.0
        bench.tick()
        for order in bench.last.orders:
            if order.change.action == "mode":
                count += 1
                bench.see(
                    *(
                        one
                        if one.node != order.change.node
                        else type(one)(**{**fields(one), "mode": order.change.mode})
                        for one in bench.seen.workers
                    )
                )
    assert 0 < count <= 4 * 4


def test_the_last_ready_worker_of_a_job_waits_for_those_that_are_coming():
    ready = mine(1, "prefill")
    base = PoolCandidate(tuple(slot_of(one) for one in [ready, *crowd(2, "prefill", 2), mine(9)]))
    base = replace(base, slots=(*base.slots[:3], base.slots[3]._replace(mode="decode")))
    scene: Any = SimpleNamespace(
        modes=("prefill", "decode"),
        reversal=None,
        switchable=lambda mode: [ready] if mode == "prefill" else [],
        pool=SimpleNamespace(mix={"prefill": 1, "decode": 1}),
    )
    assert switches(scene, base) == []
    scene.pool.mix = {"prefill": 2, "decode": 1}
    assert [(one.worker, one.mode) for one in switches(scene, base)] == [(ready, "decode")]


def fields(one) -> dict:
    return {name: getattr(one, name) for name in one.__slots__}

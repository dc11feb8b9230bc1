"""Which smaller mix is looked for, and who goes first."""

from __future__ import annotations

from pdserve.planner.tick import Refusal
from tests.planner.support import Bench, actions, binding, config, pool
from tests.planner.test_core import crowd, mine


def split(prefill: int, decode: int, work: float, **weights) -> Bench:
    bench = Bench(config(pool(modes=("prefill", "decode"), max=8)))
    for name, value in weights.items():
        setattr(bench.judge, name, value)
    bench.see(*crowd(prefill, "prefill"), *crowd(decode, "decode", 10))
    bench.load(work)
    bench.until(65)
    return bench


def test_the_mode_with_room_gives_a_worker():
    """2 work/s: half of it for 2 prefill workers, three tenths of that for 3 decode workers."""
    lighter = split(2, 3, 1.0, decode_weight=0.3)
    assert actions(lighter.last) == ["begin stop w10", "begin stop w11"]
    assert actions(split(3, 2, 1.0, decode_weight=1.6).last) == ["begin stop w1", "begin stop w2"]


def test_both_modes_give_workers_at_once_and_the_ratio_stays():
    bench = split(4, 4, 1.6)
    gone = {*actions(bench.last)}
    assert gone == {f"begin stop {name}" for name in ("w1", "w2", "w10", "w11")}


def test_two_that_need_each_other_are_said_to():
    bench = split(1, 1, 0.01)
    assert binding(bench.last).startswith("the last workers need each other: decode and prefill")


def test_every_worker_keeps_something_to_do():
    assert actions(split(1, 1, 0.01).last) == []
    assert actions(split(2, 1, 0.01).last) == ["begin stop w1"]
    assert actions(split(1, 2, 0.01).last) == ["begin stop w10"]


def test_the_last_prefill_and_the_last_decode_worker_become_one():
    """At night one aggregated worker is enough. Neither may go alone: the other one needs it."""
    bench = Bench(config(pool(modes=("aggregated", "prefill", "decode"), max=8)))
    bench.see(mine(1, "prefill"), mine(10, "decode"))
    bench.load(0.1)
    bench.until(125)
    (order,) = bench.last.orders
    assert (order.change.action, order.change.node, order.change.mode) == (
        *("mode", "w10", "aggregated"),
    )
    assert order.last, "no other worker decodes for the prefill worker"
    bench.see(mine(1, "prefill"), mine(10))
    stopped = {line for output in bench.until(130) for line in actions(output)}
    assert stopped == {"begin stop w1"}


def test_decode_workers_beside_aggregated_ones_may_go_although_nobody_computes_for_them():
    """They came in the wrong mode, or their prefill workers have died; the mix is none to begin
    with, and was taken for one of which no worker can be spared."""
    bench = Bench(config(pool(modes=("aggregated",), max=8)))
    bench.see(mine(1), *crowd(3, "decode", 10))
    bench.load(0.1)
    bench.until(65)
    assert actions(bench.last)
    assert all(line.startswith("begin stop") for line in actions(bench.last))


def test_a_pool_in_which_some_have_nothing_to_do_shrinks_to_those_that_have():
    bench = Bench(config(pool(modes=("aggregated", "prefill", "decode"), max=8)))
    bench.see(mine(1), mine(2), mine(10, "decode"))
    bench.load(0.1)
    bench.until(65)
    assert actions(bench.last) == ["begin stop w10", "begin stop w1"]


def test_a_worker_that_refused_to_stop_is_left_alone_and_another_one_goes():
    bench = split(2, 2, 0.9, decode_weight=1.6)
    (order,) = bench.last.orders
    assert order.change.node == "w1"
    refused = {order.change.id: Refusal("vetoed", "it is needed")}
    assert actions(bench.tick(refusals=refused)) == []
    stopped = {line for output in bench.until(130) for line in actions(output)}
    assert stopped == {"begin stop w2"}


def test_few_mixes_are_judged():
    bench = split(4, 4, 5.5)
    judged = [load for load, _ in bench.judge.asked if load.cached < 1]
    assert len(judged) <= 24
    assert actions(bench.last) == []


def test_a_lease_that_ends_makes_a_victim_cheap():
    bench = Bench()
    bench.see(mine(1, hot_tokens=1_000), mine(2, hot_tokens=9_000, hard_end=300.0))
    bench.load(0.1)
    bench.until(65)
    assert actions(bench.last) == ["begin stop w2"]


def test_where_nothing_can_be_started_nothing_is_removed():
    """What was removed could not come back when the load does."""
    bench = Bench(config(pool()))
    bench.see(mine(1), mine(2), mine(3), kinds=())
    bench.load(0.1)
    bench.until(65)
    assert actions(bench.last) == []
    assert binding(bench.last).startswith("nothing can start a worker: no actuator offers a kind")

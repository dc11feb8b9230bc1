"""Which modes help, and how few new workers are enough. The order of levers is in `test_core`."""

from __future__ import annotations

import pytest

from pdserve.planner.levers import helpful_modes
from pdserve.planner.rules.scene import mix_of
from tests.planner.support import Bench, LastValue, actions, config, pool, worker

ALL = ("aggregated", "decode", "prefill")


@pytest.mark.parametrize(
    ("observed", "predicted", "prefill"),
    [
        ({"decode": 60, "queue": 40}, {}, False),
        ({"handoff": 30, "decode": 30, "queue": 40}, {}, False),
        ({"decode": 40, "queue": 60}, {}, True),
        ({"decode": 19}, {"queue": 0.2}, True),  # too few to count
        ({}, {"decode_admission": 0.2, "queue": 0.1}, False),
        ({}, {"decode": 0.1, "prefill": 0.2}, True),
        ({}, {}, True),
    ],
)
def test_misses_at_decoding_are_not_cured_by_prefill_workers(observed, predicted, prefill):
    assert ("prefill" in helpful_modes(ALL, observed, predicted)) is prefill


@pytest.mark.parametrize("needed", range(1, 12))
def test_the_fewest_that_are_enough(needed):
    """0.9 work/s per worker lets 5 % miss at most at 0.947 work/s."""
    bench = Bench(config(pool(max=40)))
    bench.see(worker(1))
    bench.load(0.94 * (needed + 1))
    bench.until(10)
    assert len(actions(bench.last)) == needed


@pytest.mark.parametrize(("work", "each"), [(3.4, 1), (5.2, 2), (7.0, 3)])
def test_prefill_and_decode_workers_are_added_in_turn(work, each):
    """Both modes are full, so one more of either does not help before one of the other comes."""
    bench = Bench(config(pool(modes=("prefill", "decode"), max=16)))
    bench.see(worker(1, "prefill"), worker(2, "decode"))
    bench.load(work)
    bench.until(10)
    started = sorted(order.change.mode for order in bench.last.orders)
    assert started == ["decode"] * each + ["prefill"] * each


@pytest.mark.parametrize(("work", "started"), [(3.81, 0), (3.84, 1)])
def test_what_replays_cannot_tell_from_the_objective_adds_no_worker(work, started):
    """Of four workers 5.5% and 6.3% of the requests would miss, and 5% may."""
    bench = Bench(config(pool(max=40)))
    bench.see(*(worker(number) for number in range(1, 5)))
    bench.load(work)
    bench.until(10)
    assert len(actions(bench.last)) == started


def test_workers_that_do_not_help_are_not_bought():
    class Hopeless:
        def judge(self, traffic, objectives, load, candidates):
            from pdserve.planner.outlook import PoolOutcome

            return [PoolOutcome(miss=0.5, causes={"queue": 0.5}) for _ in candidates]

    bench = Bench(judge=Hopeless())  # type: ignore[arg-type]
    bench.see(worker(1))
    bench.load(1.0)
    bench.until(60)
    assert actions(bench.last) == []
    assert bench.last.plans[0].binding == ("more workers do not help: 50.0% would miss with 7 more")


def test_what_helps_but_is_not_enough_is_done():
    bench = Bench(config(pool(max=3)))
    bench.see(worker(1))
    bench.load(6.0)
    bench.until(10)
    assert len(actions(bench.last)) == 2
    assert bench.last.plans[0].miss_after == pytest.approx(0.55)


def test_a_tick_asks_for_few_replays():
    bench = Bench(config(pool(max=64)))
    bench.see(worker(1))
    bench.load(50.0)
    bench.tick()
    assert sum(len(candidates) for _, candidates in bench.judge.asked) <= 16
    bench.judge.asked.clear()
    bench.load(0.0)
    bench.until(300)
    assert bench.judge.asked == []


class Plateau:
    """All miss until there are `enough` prefill workers, and again with fewer than two others."""

    def __init__(self, enough: int) -> None:
        self.enough = enough

    def judge(self, traffic, objectives, load, candidates):
        from pdserve.planner.outlook import PoolOutcome

        mixes = [mix_of(one.slots) for one in candidates]
        kept = [mix["prefill"] >= self.enough and mix["decode"] >= 2 for mix in mixes]
        return [PoolOutcome(miss=0.0 if one else 0.9, causes={"queue": 0.9}) for one in kept]


def switched(enough: int, **limits: int) -> list[str]:
    """What is ordered for a pool of 1:5 in which nothing helps before there are `enough`. No worker
    obeys."""
    bench = Bench(config(pool(modes=("prefill", "decode"), **limits)), judge=Plateau(enough))  # type: ignore[arg-type]
    bench.see(worker(1, "prefill"), *(worker(n, "decode") for n in range(2, 7)))
    bench.load(0.0)
    bench.until(90)
    bench.load(3.0)
    return [line for output in bench.until(20) for line in actions(output)]


@pytest.mark.parametrize("enough", [2, 3, 4])
def test_a_switch_is_done_if_only_further_ones_will_help(enough):
    """A queue that still grows shows nothing of one more worker, until there are enough. Meanwhile
    none is bought."""
    first, *others = switched(enough, max=6)
    assert first == "begin mode w2>prefill"
    assert {line.split()[1] for line in others} == {"mode"}
    assert switched(enough, max=12) == [first, *others]


class Crossing:
    """Up to 4 of work per second, all prompts' workers are best, and beyond it none is."""

    def judge(self, traffic, objectives, load, candidates):
        from pdserve.planner.outlook import PoolOutcome

        found = []
        for one in candidates:
            prefill = mix_of(one.slots)["prefill"] / len(one.slots)
            miss = 0.5 - 0.4 * prefill if load.work <= 4.0 else 0.5 + 0.4 * prefill
            found.append(PoolOutcome(miss=miss, causes={"queue": miss}))
        return found


def test_beyond_what_a_pool_can_bear_the_expected_load_decides():
    """Each mix misses too many. By what may come at worst a prefill worker fewer were better, by
    what is expected one more."""
    bench = Bench(
        config(pool(modes=("prefill", "decode"), max=6)),
        judge=Crossing(),  # type: ignore[arg-type]
        forecast=LastValue(spread=2.0),
    )
    bench.see(*(worker(n, "prefill" if n < 4 else "decode") for n in range(1, 7)))
    bench.load(0.0)
    bench.until(90)
    bench.load(3.0)
    lines = [line for output in bench.until(20) for line in actions(output)]
    assert lines
    assert all(line.endswith(">prefill") for line in lines), lines


class Late:
    """All requests miss, and decode workers make them less late, by a part for each."""

    def __init__(self, part: float) -> None:
        self.part = part

    def judge(self, traffic, objectives, load, candidates):
        from pdserve.planner.outlook import PoolOutcome

        mixes = [mix_of(one.slots) for one in candidates]
        waits = [100.0 * (1 - self.part) ** mix["decode"] for mix in mixes]
        return [PoolOutcome(miss=1.0, causes={"queue": 1.0}, wait_p95=wait) for wait in waits]


@pytest.mark.parametrize(("part", "switches"), [(0.2, True), (0.05, False)])
def test_where_all_are_late_it_counts_how_late_they_are(part, switches):
    """Else a backlog that is there already would hide what each switch is worth, for ever."""
    bench = Bench(config(pool(modes=("prefill", "decode"), max=6)), judge=Late(part))  # type: ignore[arg-type]
    bench.see(*(worker(n, "prefill" if n < 4 else "decode") for n in range(1, 7)))
    bench.load(0.0)
    bench.until(90)
    bench.load(3.0)
    lines = [line for output in bench.until(20) for line in actions(output)]
    assert bool(lines) == switches
    assert all(line.endswith(">decode") for line in lines), lines


class Counted(Crossing):
    """Nothing helps, and each question is counted."""

    def __init__(self) -> None:
        self.asked = 0

    def judge(self, traffic, objectives, load, candidates):
        from pdserve.planner.outlook import PoolOutcome

        self.asked += len(candidates)
        return [PoolOutcome(miss=0.5, causes={"queue": 0.5}) for _ in candidates]


def test_switches_that_did_not_help_are_not_judged_at_each_tick():
    judge = Counted()
    bench = Bench(config(pool(modes=("prefill", "decode"), max=6)), judge=judge)  # type: ignore[arg-type]
    bench.see(*(worker(n, "prefill" if n < 4 else "decode") for n in range(1, 7)))
    bench.load(0.0)
    bench.until(90)
    bench.load(3.0)
    bench.tick()
    asked = []
    for _ in range(6):
        before = judge.asked
        bench.tick()
        asked.append(judge.asked - before)
    assert sorted(asked)[3] < 5 < min(sorted(asked)[4:])
    before = judge.asked
    bench.load(9.0)  # another load is another question
    bench.tick()
    assert judge.asked - before > 5


def test_without_an_end_of_the_row_nothing_is_switched():
    assert switched(5, max=6) == []

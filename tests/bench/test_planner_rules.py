"""The rules that the planner is compared with, and what is done with their answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from bench.planner_arms.aibrix import Apa, Kpa
from bench.planner_arms.base import PoolView, WorkerView
from bench.planner_arms.clairvoyant import Clairvoyant, sizes
from bench.planner_arms.driver import difference
from bench.planner_arms.dynamo import DynamoLoad
from bench.planner_arms.fixed import Static
from bench.planner_arms.hpa import Hpa, Keda
from bench.planner_arms.llm_d import Saturation
from bench.planner_what_if import learnt
from pdserve.planner.what_if.records import LatencyObjective
from pdserve.sim.workloads.trace_request import TraceRequest

if TYPE_CHECKING:
    from bench.planner_arms.base import Rule
    from pdserve.ids import Seconds

DYNAMO = DynamoLoad(queue_limit=1.0, itl=0.040, idle_itl=0.016, token=1e-4)


def pool(*workers: WorkerView, starting: int = 0, now: Seconds = 0.0) -> PoolView:
    return PoolView(now=now, workers=workers, starting=starting)


def busy(running: int, size: int, *, starting: int = 0, now: Seconds = 0.0) -> PoolView:
    return pool(*[WorkerView(running=running)] * size, starting=starting, now=now)


def test_a_fixed_size_ignores_the_load() -> None:
    assert Static(3).wanted(busy(100, 1)) == 3


@pytest.mark.parametrize(
    ("running", "size", "starting", "wanted"),
    [
        (70, 4, 0, 4),  # 70% of 100: the target
        (76, 4, 0, 4),  # within the tolerance
        (100, 4, 0, 6),  # 4 * 1.0 / 0.7 = 5.7
        (100, 4, 2, 6),  # those that start count as 0%, and 6 are enough
        (140, 4, 1, 8),  # 5 * (4 * 2 / 5) = 8
        (600, 2, 0, 6),  # at most four more in one step
    ],
)
def test_hpa_grows_by_utilisation(running: int, size: int, starting: int, wanted: int) -> None:
    assert Hpa(slots=100).wanted(busy(running, size, starting=starting)) == wanted


def test_hpa_shrinks_to_the_highest_of_five_minutes() -> None:
    rule = Hpa(slots=10)
    assert rule.wanted(busy(7, 4, now=0.0)) == 4
    assert rule.wanted(busy(3, 4, now=150.0)) == 4
    assert rule.wanted(busy(3, 4, now=301.0)) == 2  # 4 * 0.3 / 0.7 = 1.7
    assert rule.wanted(busy(1, 4, now=302.0)) == 2


def test_hpa_counts_kv_if_that_is_higher() -> None:
    assert Hpa(slots=10).wanted(pool(WorkerView(kv=1.0, running=1))) == 2


def test_keda_grows_by_kv_or_queue() -> None:
    assert Keda().wanted(pool(WorkerView(kv=0.9))) == 2
    assert Keda().wanted(pool(WorkerView(kv=0.1, waiting=60))) == 2
    assert Keda().wanted(pool(WorkerView(kv=0.6, waiting=29))) == 1


def asked(rule: Rule, *views: PoolView) -> list[int]:
    return [rule.wanted(view) for view in views]


def test_kpa_panics_and_then_takes_nothing_away() -> None:
    rule = Kpa(target=10)
    calm = [busy(10, 1, now=float(at)) for at in range(0, 60, 2)]
    assert set(asked(rule, *calm)) == {1}
    # A mean of 100 in 6 s is ten times the target: a panic, and at most twice as many.
    assert asked(rule, *[busy(100, 1, now=at) for at in (60.0, 62.0, 64.0)])[-1] == 2
    panic = asked(rule, *[busy(0, 2, now=float(at)) for at in range(66, 128, 2)])
    assert panic == sorted(panic)
    assert panic[-1] >= 2
    assert rule.wanted(busy(0, 2, now=130.0)) == 1


def test_apa_has_a_tolerance_to_both_sides_and_a_rate() -> None:
    assert Apa(target=100).wanted(busy(109, 4)) == 4
    assert Apa(target=10).wanted(busy(12, 4)) == 5
    assert Apa(target=10).wanted(busy(40, 4)) == 8
    assert Apa(target=100).wanted(busy(91, 4)) == 4
    assert Apa(target=10).wanted(busy(6, 4)) == 3
    assert Apa(target=10).wanted(busy(0, 4)) == 2


@pytest.mark.parametrize(
    ("view", "wanted"),
    [
        (pool(WorkerView(kv=0.65)), 1),  # 0.15 to spare
        (pool(WorkerView(kv=0.75)), 2),  # 0.05
        (pool(WorkerView(waiting=3)), 2),  # 2 places
        (pool(WorkerView(kv=0.85)), 2),  # saturated
        (pool(WorkerView(kv=0.85), starting=1), 2),
        (pool(WorkerView(kv=0.3), WorkerView(kv=0.3)), 1),  # 0.6 on one
        (pool(WorkerView(kv=0.4), WorkerView(kv=0.4)), 2),  # 0.8 on one
        (pool(WorkerView(kv=0.1), WorkerView(kv=0.1), WorkerView(kv=0.85)), 3),
    ],
)
def test_llm_d_keeps_something_to_spare(view: PoolView, wanted: int) -> None:
    assert Saturation().wanted(view) == wanted


@pytest.mark.parametrize(
    ("view", "wanted"),
    [
        (pool(WorkerView(running=9, itl=0.041), WorkerView()), 3),  # any is over
        (pool(WorkerView(running=9, itl=0.041), starting=1), 2),
        (pool(WorkerView(backlog=11_000), WorkerView()), 3),  # 1.1 s of queue
        (pool(*[WorkerView(running=9, itl=0.024)] * 2), 2),  # 16 + 8 * 2 = 32 ms, the limit
        (pool(*[WorkerView(running=9, itl=0.023)] * 2), 1),
        (pool(*[WorkerView(running=9, itl=0.026)] * 3), 2),  # 16 + 10 * 1.5 = 31 ms
        (pool(*[WorkerView(backlog=4_100)] * 2), 2),  # 0.82 s on one
        (pool(WorkerView()), 1),
    ],
)
def test_dynamo_adds_for_any_and_removes_after_consolidation(view: PoolView, wanted: int) -> None:
    assert DYNAMO.wanted(view) == wanted


def test_clairvoyant_has_what_the_time_of_a_start_will_need() -> None:
    rule = Clairvoyant(by_window=[1, 1, 3, 1, 1], start_up=40.0)
    views = [busy(0, 1, now=now) for now in (0.0, 14.0, 15.0, 89.0, 90.0, 200.0)]
    assert asked(rule, *views) == [1, 1, 3, 3, 1, 1]


def test_clairvoyant_sizes_follow_the_trace() -> None:
    def at(second: float, number: int) -> TraceRequest:
        return TraceRequest(number, second, ((number, 4000),), 100)

    times = [n * 2.0 for n in range(30)] + [60 + n / 8 for n in range(240)]
    trace = [at(second, number) for number, second in enumerate(times)]
    found = sizes(
        trace,
        learnt("h100-70b-tp4"),
        LatencyObjective(1.0, 0.04, idle_factor=2.0),
        400_000,
        8,
        0.05,
    )
    assert found[0] == 1
    assert found[2] > 2


@pytest.mark.parametrize(
    ("view", "wanted", "done"),
    [
        (busy(0, 2), 4, (2, 0, 0)),
        (busy(0, 2), 100, (6, 0, 0)),
        (busy(0, 2, starting=2), 3, (0, 1, 0)),
        (busy(0, 2, starting=2), 1, (0, 2, 1)),
        (busy(0, 1, starting=2), 0, (0, 2, 0)),
        (busy(0, 2), 2, (0, 0, 0)),
    ],
)
def test_starts_are_withdrawn_before_workers_drain(
    view: PoolView, wanted: int, done: tuple[int, int, int]
) -> None:
    assert difference(view, wanted, most=8) == done

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pdserve.ids import NodeId
from pdserve.perf_model.latency_model import LatencyModel
from pdserve.planner.demand_series import DemandBucket, DemandHealth, DemandSeries
from pdserve.planner.driver.demand_view import demand_view
from pdserve.planner.recent_arrivals import RecentArrival

HEALTHY = DemandHealth(age=1.0)
LEARNT = replace(LatencyModel(), per_token=1e-3, fitted=True)


def series(*works: float, health: DemandHealth = HEALTHY, **fields: Any) -> DemandSeries:
    """Buckets of 5 s with these rates, of requests of 0.1 s."""
    buckets = tuple(
        DemandBucket(5.0 * at, 5.0, work=5.0 * rate, arrivals=50 * rate, work_squared=0.5 * rate)
        for at, rate in enumerate(works)
    )
    known: Any = {"model": "m", "health": health, "buckets": buckets, "times": LEARNT}
    return DemandSeries(**known | fields)


def test_rates_are_of_the_last_bucket_since_the_last_change_and_the_highest() -> None:
    seen = demand_view(series(*[9.0] * 12, *[1.0] * 40, 1.5))
    assert seen.work == pytest.approx(1.5)
    assert seen.level == pytest.approx(41.5 / 41, rel=0.1)
    assert seen.peak_300 == pytest.approx(9.0, rel=0.3)
    assert seen.work_300 == pytest.approx(149.5 / 53)
    later = demand_view(series(*[9.0] * 12, *[1.0] * 70))
    assert later.peak_300 == pytest.approx(1.0, rel=0.1)


def test_of_a_few_requests_the_share_that_missed_is_not_told() -> None:
    def judged(kept: float, missed: float) -> float | None:
        buckets = tuple(
            DemandBucket(*(5.0 * at, 5.0), kept={"both": kept}, missed={"both": {"queue": missed}})
            for at in range(40)
        )
        return demand_view(replace(series(), buckets=buckets)).miss_share

    assert judged(9.0, 1.0) == pytest.approx(0.1)
    assert judged(4.0, 0.0) is None


def test_peaks_are_looked_for_as_long_as_capacity_is_kept() -> None:
    """Of a load that ended 40 minutes ago, too."""
    works = [9.0] * 60 + [1.0] * 480
    assert demand_view(series(*works), stable=3600.0).peak(3600.0) == pytest.approx(9.0, rel=0.1)
    assert demand_view(series(*works), stable=1200.0).peak(1200.0) == pytest.approx(1.0, rel=0.1)


def test_the_newest_buckets_and_the_usual_request_are_seen() -> None:
    seen = demand_view(series(*[1.0] * 20))
    assert len(seen.recent) == 12
    assert seen.recent[-1] == (5.0, 50.0, 5.0)
    assert seen.request_work == pytest.approx(0.1)
    assert seen.request_spread == pytest.approx(0.1)


def test_what_was_reported_since_belongs_to_the_newest_bucket() -> None:
    rest = DemandBucket(100.0, 3.0, work=9.0, arrivals=90)
    seen = demand_view(series(*[1.0] * 20, rest=rest))
    assert len(seen.recent) == 12
    assert seen.recent[-1] == (8.0, 140.0, 14.0)
    assert seen.level == pytest.approx(1.0), "a level is made of complete buckets"


def test_the_first_bucket_is_a_level_already() -> None:
    assert demand_view(series(2.0)).level == pytest.approx(2.0)
    assert demand_view(series()).level == 0.0


def test_it_says_how_long_the_demand_has_been_seen() -> None:
    assert demand_view(series(*[1.0] * 12)).seen == 60.0
    assert demand_view(series(*[1.0] * 100)).seen == 300.0
    assert demand_view(series(*[1.0] * 100), stable=448.0).seen == 450.0


def test_zero_is_known_and_nothing_heard_is_not() -> None:
    zero = demand_view(series(0.0, 0.0))
    assert (zero.known, zero.work, zero.faults) == (True, 0.0, "")
    silent = demand_view(series(health=DemandHealth()))
    assert not silent.known
    assert silent.faults == "no router has reported its demand"
    fresh = demand_view(series())
    assert (fresh.known, "no full 5 s" in fresh.faults) == (False, True)


def test_a_missing_router_is_unknown_and_a_silent_one_only_doubtful() -> None:
    r = NodeId("r")
    missing = demand_view(series(1.0, health=DemandHealth(1.0, missing=(r,))))
    assert (missing.known, "r has not reported" in missing.faults) == (False, True)
    silent = demand_view(series(1.0, health=DemandHealth(9.0, silent=(r,))))
    assert (silent.known, "no longer reports" in silent.faults) == (True, True)
    refused = demand_view(series(1.0, health=DemandHealth(1.0, refused={r: "NaN"})))
    assert not refused.known


@pytest.mark.parametrize(("told", "counts"), [(1e-9, "0.1"), (1e9, "10"), (float("nan"), "1")])
def test_a_speed_that_cannot_be_is_told(told: float, counts: str) -> None:
    seen = demand_view(series(1.0, speeds={NodeId("w"): told, NodeId("v"): 1.4}))
    assert seen.known
    assert seen.faults == (
        f"routers take w for {told:g} times as slow as usual, and {counts} counts"
    )


def test_unlearnt_or_wrong_times_are_poor() -> None:
    assert not demand_view(series(1.0)).poor
    assert demand_view(series(1.0, times=LatencyModel())).poor
    assert demand_view(series(1.0, prediction_poor=True)).poor


def test_what_waits_and_what_was_missed_is_summed() -> None:
    buckets = tuple(
        DemandBucket(5.0 * at, 5.0, kept={"both": 8}, missed={"both": {"queue": 1, "prefill": 1}})
        for at in range(3)
    )
    whole = replace(series(), buckets=buckets, held=4, held_work=2.0, held_oldest=1.5)
    seen = demand_view(whole, queued_tokens=500)
    assert (seen.kept, seen.missed) == (24, {"queue": 3, "prefill": 3})
    assert (seen.held, seen.held_work, seen.held_wait) == (4, 2.0, 1.5)
    assert seen.queued_work == pytest.approx(0.5)


def shifted(seconds: float, before: float = 0.1, after: float = 0.9) -> DemandSeries:
    """Four requests a second for 300 s, of 0.1 s, whose work is another one in the last seconds."""
    end, arrivals, buckets = 300.0, [], []
    for number in range(1200):
        at = 0.25 * number
        work = after if at >= end - seconds else before
        arrivals.append(RecentArrival(at, int(10_000 * work) + number % 50, work=work))
    for at in range(60):
        own = [one.work for one in arrivals[20 * at : 20 * (at + 1)]]
        squared = sum(work**2 for work in own)
        buckets.append(DemandBucket(5.0 * at, 5.0, 20, work=sum(own), work_squared=squared))
    return series(buckets=tuple(buckets), arrivals=tuple(arrivals))


@pytest.mark.parametrize(("seconds", "near"), [(10.0, 0.4), (25.0, 0.2), (100.0, 0.1)])
@pytest.mark.parametrize(("before", "after"), [(0.1, 0.9), (0.9, 0.1)])
def test_longer_or_shorter_prompts_are_soon_known_work(
    seconds: float, near: float, before: float, after: float
) -> None:
    """Their number is what it was. The first dozens may be a burst, and count for less."""
    seen = demand_view(shifted(seconds, before, after))
    assert seen.rate == pytest.approx(4.0)
    assert seen.request_work == pytest.approx(after, abs=near * abs(after - before))
    assert seen.level == pytest.approx(4 * after, abs=4 * near * abs(after - before))
    assert seen.peak_300 >= 4 * max(before, after) * 0.7, "what was before stays a peak"


def test_nothing_changes_when_a_shift_is_as_old_as_what_is_looked_at() -> None:
    works = [demand_view(shifted(seconds)).request_work for seconds in (280.0, 296.0, 299.0, 300.0)]
    assert works == [pytest.approx(0.9, rel=0.05)] * 4


def test_a_silent_router_is_no_shift() -> None:
    """There are no arrivals of it, and its mean counts in the buckets."""
    known = shifted(30.0)
    assert demand_view(known).request_work > 0.5
    silent = replace(known, health=DemandHealth(9.0, silent=(NodeId("r"),)))
    assert demand_view(silent).request_work < 0.3
    estimated = tuple(replace(one, estimated=0.5) for one in known.buckets)
    assert demand_view(replace(known, buckets=estimated)).request_work < 0.3


def test_a_shift_of_the_last_seconds_is_not_known_yet() -> None:
    seen = demand_view(shifted(2.0))
    assert seen.request_work < 0.2
    assert seen.level < 1.0

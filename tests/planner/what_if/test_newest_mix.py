"""A shift of lengths is found soon, and chance is not taken for one."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

import pytest

from pdserve.planner.recent_arrivals import RecentArrival
from pdserve.planner.what_if.newest_mix import newest_mix

if TYPE_CHECKING:
    from collections.abc import Callable


def arrivals(
    long: Callable[[float], float], seed: int = 1, rate: float = 4.0, until: float = 300.0
) -> list[RecentArrival]:
    """Chats of about 300 tokens, and a share `long(at)` of prompts of about 12,000."""
    random, at, found = Random(f"mix {seed}"), 0.0, []
    while (at := at + random.expovariate(rate)) < until:
        mean = 12_000 if random.random() < long(at) else 300
        found.append(RecentArrival(at, int(random.gammavariate(4, mean / 4))))
    return found


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("before", "after"), [(0.0, 1.0), (1.0, 0.0)])
def test_a_shift_is_found_after_some_seconds(seed: int, before: float, after: float) -> None:
    found = newest_mix(arrivals(lambda at: after if at >= 290 else before, seed))
    assert found[0].at == pytest.approx(290, abs=2.5)


@pytest.mark.parametrize("seed", range(5))
def test_a_smaller_shift_is_found_after_half_a_minute(seed: int) -> None:
    found = newest_mix(arrivals(lambda at: 0.5 if at >= 260 else 0.1, seed))
    assert found[0].at == pytest.approx(260, abs=15)


def test_chance_is_no_shift() -> None:
    """Of 200 mixes that stay the same, at most two are cut."""
    cut = 0
    for seed in range(200):
        every = arrivals(lambda at: 0.15, seed, rate=1.5)
        cut += len(newest_mix(every)) < len(every)
    assert cut <= 2


def test_a_rate_that_changes_is_no_shift() -> None:
    slow = arrivals(lambda at: 0.2, until=200.0, rate=1.0)
    fast = arrivals(lambda at: 0.2, seed=2, rate=6.0, until=100.0)
    every = slow + [one._replace(at=200 + one.at) for one in fast]
    assert newest_mix(every) == every


def test_equal_prompts_differ_without_doubt() -> None:
    every = [RecentArrival(float(n), 100 if n < 50 else 500) for n in range(80)]
    assert newest_mix(every)[0].at == pytest.approx(50, abs=4)
    alike = [RecentArrival(float(n), 100) for n in range(80)]
    assert newest_mix(alike) == alike


def test_few_arrivals_say_nothing_and_a_burst_is_not_replayed_alone() -> None:
    few = [RecentArrival(float(n), 100 if n < 11 else 900) for n in range(23)]
    assert newest_mix(few) == few
    burst = [RecentArrival(float(n), 100) for n in range(100)]
    burst += [RecentArrival(100 + n / 10, 900) for n in range(30)]
    assert newest_mix(burst)[0].at <= burst[-1].at - 5


def test_only_what_is_to_be_computed_counts() -> None:
    """A hit rate that collapses is a shift, though prompts are as long as before."""
    every = [RecentArrival(float(n), 9000, 8500 if n < 60 else 0) for n in range(90)]
    assert newest_mix(every)[0].at == pytest.approx(60, abs=5)


def test_one_that_stands_for_several_is_one_draw() -> None:
    """Of many requests each 64th is kept: what it tells of chance is that of one."""
    shifts = 0
    for seed in range(40):
        random = Random(seed)
        drawn = [int(random.lognormvariate(6.0, 1.2)) for _ in range(1200)]
        kept = [RecentArrival(0.25 * n, one, weight=64.0) for n, one in enumerate(drawn)]
        shifts += len(newest_mix(kept)) < len(kept)
    assert shifts <= 1
    longer = [RecentArrival(0.25 * n, 500 if n < 900 else 5000, weight=64.0) for n in range(1200)]
    assert len(newest_mix(longer)) == pytest.approx(300, abs=60)


def test_the_means_are_those_of_all_that_they_stand_for() -> None:
    every = [RecentArrival(float(n), 100 + n % 2) for n in range(60)]
    mixed = [RecentArrival(60.0 + n, 100 + 900 * (n % 5 > 0)) for n in range(40)]
    assert len(newest_mix([*every, *mixed])) < 60
    rare = [one._replace(weight=0.01) if one.prompt_tokens > 900 else one for one in mixed]
    assert len(newest_mix([*every, *rare])) == 100
    assert newest_mix([]) == []

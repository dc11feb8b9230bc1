"""Recent arrivals become a load of one height."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest

from pdserve.planner.recent_arrivals import RecentArrival
from pdserve.planner.what_if.even_load import even_load


def poisson(*parts: tuple[float, float, float], seed: int) -> list[RecentArrival]:
    """Arrivals of parts, each with its seconds, its rate, and the work of a request."""
    random, found, begin = Random(seed), [], 0.0
    for seconds, rate, work in parts:
        at = begin + random.expovariate(rate)
        while at < begin + seconds:
            found.append(RecentArrival(at, int(1000 * work), work=work))
            at += random.expovariate(rate)
        begin += seconds
    return found


def rate(arrivals: list[RecentArrival]) -> float:
    return len(arrivals) / (arrivals[-1].at - arrivals[0].at)


def halves(arrivals: list[RecentArrival]) -> tuple[float, float]:
    middle = len(arrivals) // 2
    return rate(arrivals[:middle]), rate(arrivals[middle:])


def test_what_came_before_a_step_comes_at_the_new_rate(seed: int) -> None:
    found = even_load(poisson((240, 2.0, 0.1), (60, 8.0, 0.1), seed=seed))
    before, after = halves(found)
    assert after == pytest.approx(8.0, rel=0.25)
    assert before == pytest.approx(after, rel=0.3)
    assert all(one.at <= other.at for one, other in pairwise(found))


def test_a_load_without_a_change_stays_as_it_is(seed: int) -> None:
    """Of 40 loads chance seems to be a change in a few."""
    same = 0
    for number in range(40):
        load = poisson((300, 3.0, 0.1), seed=seed + number)
        found = even_load(load)
        same += [one.at for one in found] == pytest.approx([one.at for one in load])
    assert same >= 30


def test_an_arrival_counts_as_many_as_it_stands_for() -> None:
    before = [RecentArrival(float(at), 100, work=0.1, weight=1.0) for at in range(100)]
    after = [RecentArrival(float(at), 100, work=0.1, weight=9.0) for at in range(100, 130)]
    found = even_load([*before, *after])
    assert found[-1].at - found[100].at == pytest.approx(29.0, rel=0.1)
    assert found[99].at - found[0].at == pytest.approx(11.0, rel=0.2)


def test_too_few_arrivals_stay() -> None:
    assert even_load([]) == []
    pair = [RecentArrival(1.0, 10), RecentArrival(2.0, 10)]
    assert even_load(pair) == pair

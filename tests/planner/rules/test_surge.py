"""Chance is no panic, a step is one at once, and a panic ends."""

from __future__ import annotations

from random import Random
from statistics import median
from typing import TYPE_CHECKING

import pytest

from pdserve.planner.demand_series import DemandBucket, DemandSeries
from pdserve.planner.driver.demand_view import demand_view
from pdserve.planner.forecast import Forecast
from pdserve.planner.rules.surge import Surge
from tests.planner.plant import HEALTHY, LEARNT
from tests.planner.support import demand

if TYPE_CHECKING:
    from collections.abc import Callable

CHAT, LONG, SHARE = 0.03, 0.9, 0.15
REQUEST = (1 - SHARE) * CHAT + SHARE * LONG
"""Mean work of a request, in seconds."""


class Feed:
    """A load of chats and some long prompts, by chance, in ticks of 5 s."""

    def __init__(self, rate: Callable[[float], float], seed: int, share: float = SHARE) -> None:
        self.rate, self.random, self.share = rate, Random(seed), share
        self.surge, self.forecast = Surge(1.5), Forecast()
        self.buckets: list[DemandBucket] = []
        self.begun: list[float] = []

    def bucket(self, at: float) -> DemandBucket:
        works, ahead = [], self.random.expovariate(self.rate(at))
        while ahead < 5.0:
            works.append(LONG if self.random.random() < self.share else CHAT)
            ahead += self.random.expovariate(self.rate(at))
        squared = sum(work * work for work in works)
        return DemandBucket(at, 5.0, len(works), work=sum(works), work_squared=squared)

    def run(self, seconds: float) -> Feed:
        for _ in range(int(seconds / 5)):
            at = 5.0 * len(self.buckets)
            self.buckets.append(self.bucket(at))
            seen = demand_view(DemandSeries("m", HEALTHY, tuple(self.buckets[-120:]), times=LEARNT))
            found = self.forecast.at(0.0)
            self.surge.see(at, seen, 0.0 if found is None else found.p50, 300.0)
            self.forecast.observe(at, seen.level)
            if self.surge.begins(at):
                self.begun.append(at)
        return self


@pytest.mark.parametrize("rate", [0.5, 3.0])
def test_chance_is_no_panic(rate: float, seed: int) -> None:
    """An hour, in which means of 30 s are often above 1.5 times the mean."""
    assert len(Feed(lambda at: rate, seed).run(3600).begun) <= 2


@pytest.mark.parametrize("before", [0.7, 5.0])
def test_three_times_the_load_is_a_panic_in_two_or_three_ticks(before: float, seed: int) -> None:
    """By chance, one of thirty low loads takes longer."""
    in_time, levels = 0, []
    for number in range(8):
        feed = Feed(lambda at: before * (1 + 2 * (at >= 400)), seed + number).run(400)
        calm = len(feed.begun)
        feed.run(30 if before < 1 else 15)
        in_time += len(feed.begun) > calm
        levels.append(feed.run(60).surge.level)
    assert in_time > 4
    assert median(levels) == pytest.approx(3 * before * REQUEST, rel=0.4)


def test_longer_prompts_at_the_same_rate_are_a_panic_too(seed: int) -> None:
    feed = Feed(lambda at: 3.0, seed, share=0.05).run(600)
    feed.share = 0.5
    assert feed.run(60).begun[-1:] >= [600.0]


def test_a_panic_ends_and_low_load_does_not_renew_it(seed: int) -> None:
    def rate(at: float) -> float:
        return 2.5 if 300 <= at < 600 else 0.5

    feed = Feed(rate, seed).run(1500)
    late = [at for at in feed.begun if at >= 700]
    assert not late or feed.begun == late, feed.begun
    assert not feed.surge.active(5.0 * len(feed.buckets)) or late


def test_only_a_load_above_its_own_renews_a_panic() -> None:
    surge = Surge(1.5)
    surge.see(0.0, demand(1.0), 0.5, 300.0)
    assert (surge.begins(0.0), surge.ratio, surge.left(0.0)) == (True, 2.0, 300.0)
    surge.see(100.0, demand(1.0), 0.5, 300.0)
    assert (surge.begins(100.0), surge.left(100.0)) == (False, 200.0)
    surge.see(200.0, demand(1.1), 0.5, 300.0)
    assert (surge.begins(200.0), surge.left(200.0)) == (True, 300.0)
    assert not surge.active(500.0)


def test_a_burst_that_is_over_was_no_panic() -> None:
    """Without it nothing would be removed for 300 s, and the burst would be the load meanwhile."""
    surge = Surge(1.5)
    surge.see(0.0, demand(1.0), 0.5, 300.0)
    surge.see(5.0, demand(0.8), 0.5, 300.0)
    assert surge.active(5.0)
    surge.see(10.0, demand(0.7), 0.5, 300.0)
    assert not surge.active(10.0)
    surge.see(15.0, demand(0.8), 0.5, 300.0)
    assert surge.begins(15.0)


def test_a_load_that_stays_is_a_panic_even_if_the_forecast_has_followed() -> None:
    surge = Surge(1.5)
    surge.see(0.0, demand(1.0), 0.5, 300.0)
    surge.see(100.0, demand(1.1), 0.7, 300.0)
    surge.see(110.0, demand(1.0), 0.9, 300.0)
    assert surge.active(110.0)


def test_a_load_that_falls_is_a_shift_and_no_panic() -> None:
    surge = Surge(1.5)
    surge.see(0.0, demand(0.3), 1.0, 300.0)
    assert surge.shifted(30.0)
    assert not surge.shifted(31.0)
    assert not surge.active(0.0)


def test_the_first_load_is_no_panic() -> None:
    surge = Surge(1.5)
    surge.see(0.0, demand(3.0), 0.0, 300.0)
    assert not surge.active(0.0)

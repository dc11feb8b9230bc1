"""Finds since when prompts are as long as they are now. Pure.

A what-if scales recent arrivals to a load in work. When lengths have shifted, arrivals from before
would be scaled too: a load of a few long prompts would become one of very many short ones, which
needs other workers. So only the arrivals of the newest mix are replayed.

A shift is the cut of the recent arrivals at which the mean of the tokens to compute before it and
after it differ most, by a factor and by far more than chance explains (Welch's statistic, with the
larger variance for both sides: a few equal prompts say nothing about how much prompts differ).
Tokens, not predicted times: the first prompts of a new length are predicted badly.
"""

from __future__ import annotations

from itertools import accumulate
from math import sqrt
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.ids import Seconds
    from pdserve.planner.demand_series import DemandSeries
    from pdserve.planner.recent_arrivals import RecentArrival

__all__ = ["newest_arrivals", "newest_mix"]

_FEWEST: Final = 12
"""Arrivals on each side of a cut."""
_SPAN: Final[Seconds] = 5.0
"""The newest mix lasts at least so long: a burst of one client is never replayed alone."""
_FACTOR: Final = 1.5
"""Ratio of the means below which a shift makes no difference."""
_SURE: Final = 5.0
"""Differences of means in standard errors. Many cuts are tried at each tick, and lengths are
skewed, so this is more than for one test."""
_FINER: Final = 1.2
"""Each cut leaves so many times as many arrivals after it as the one before."""


class _Moments(NamedTuple):
    """Sums over arrivals, of the tokens that no cache has."""

    kept: float
    """Arrivals that were kept: what chance depends on, however many each stands for."""
    weight: float
    tokens: float
    squares: float

    def less(self, other: _Moments) -> _Moments:
        return _Moments(*(mine - its for mine, its in zip(self, other, strict=True)))

    @property
    def mean(self) -> float:
        return self.tokens / self.weight

    @property
    def variance(self) -> float:
        return max(0.0, self.squares / self.weight - self.mean**2)


def newest_arrivals(series: DemandSeries) -> Sequence[RecentArrival]:
    """The arrivals since lengths last shifted. Of silent routers there are none, so their silence
    would look like a shift: while part of the demand is estimated, all arrivals."""
    arrivals = series.arrivals
    first = arrivals[0].at if arrivals else 0.0
    estimated = any(one.estimated for one in series.buckets if one.at + one.seconds > first)
    return arrivals if estimated or series.health.silent else newest_mix(arrivals)


def newest_mix(arrivals: Sequence[RecentArrival]) -> Sequence[RecentArrival]:
    """The arrivals since lengths last shifted; all of them if they have not. `arrivals` are in
    order of time."""
    if len(arrivals) < 2 * _FEWEST:
        return arrivals
    sums = list(accumulate(map(_moments, arrivals), _plus))
    best, surest = 0, _SURE
    for cut in _cuts(len(arrivals)):
        if arrivals[-1].at - arrivals[cut].at < _SPAN:
            continue
        sure = _difference(sums[cut - 1], sums[-1].less(sums[cut - 1]))
        if sure > surest:
            best, surest = cut, sure
    return arrivals[best:]


def _moments(one: RecentArrival) -> _Moments:
    tokens = max(0, one.prompt_tokens - one.cached_tokens)
    return _Moments(1.0, one.weight, one.weight * tokens, one.weight * tokens**2)


def _plus(one: _Moments, two: _Moments) -> _Moments:
    return _Moments(*(a + b for a, b in zip(one, two, strict=True)))


def _cuts(count: int) -> list[int]:
    """Indices of the first arrival after a cut, the newest cut first."""
    found, after = [], float(_FEWEST)
    while after <= count - _FEWEST:
        found.append(count - int(after))
        after = max(after + 1, after * _FINER)
    return found


def _difference(before: _Moments, after: _Moments) -> float:
    """The difference of the means in standard errors; 0 if it is too small to matter."""
    low, high = sorted((before.mean, after.mean))
    if high < _FACTOR * low or high <= 0:
        return 0.0
    variance = max(before.variance, after.variance)
    error = sqrt(variance * (1 / before.kept + 1 / after.kept))
    return (high - low) / error if error > 0 else float("inf")

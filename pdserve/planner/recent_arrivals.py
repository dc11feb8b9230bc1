"""Keeps the arrivals of the last minutes, at most so many: beyond, one stands for several. Pure.

Each arrival has a weight, and the sum of the weights is the number of arrivals, but for less than
two of the kept ones. All that are kept at one time have about the same weight, because what-if
replays them as they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from pdserve.ids import Seconds

__all__ = ["RecentArrival", "RecentArrivals"]


class RecentArrival(NamedTuple):
    """One arrival, on the planner's clock."""

    at: Seconds
    prompt_tokens: int
    cached_tokens: int = 0
    """Prompt tokens that the worker with the most of them had in its cache."""
    choices: int = 1
    work: Seconds = 0.0
    """Predicted prefill seconds at speed 1 of the other prompt tokens."""
    weight: float = 1.0
    """Number of arrivals that it stands for."""


class RecentArrivals:
    """Arrivals of the last `seconds`, at most `most` of them."""

    def __init__(self, seconds: Seconds, most: int) -> None:
        self._seconds = seconds
        self._most = most
        self._kept: list[RecentArrival] = []
        self._step = 1.0
        """Least weight of one that is kept."""
        self._skipped = 0.0
        """Weight of arrivals since the last one that was kept."""
        self._odd = False

    def add(self, arrival: RecentArrival) -> None:
        """Adds one, which may stand for several already. Their times need not be in order."""
        weight = self._skipped + arrival.weight
        if weight < self._step:
            self._skipped = weight
            return
        self._skipped = 0.0
        self._kept.append(arrival._replace(weight=weight))
        if len(self._kept) > self._most:
            self._thin(max(one.at for one in self._kept))

    def since(self, now: Seconds) -> tuple[RecentArrival, ...]:
        """Those of the last seconds, the oldest first."""
        self._drop(now)
        return tuple(self._kept)

    def _drop(self, now: Seconds) -> None:
        self._kept = sorted(one for one in self._kept if one.at > now - self._seconds)
        if len(self._kept) < self._most / 4:
            self._step = max(1.0, self._step / 2)

    def _thin(self, now: Seconds) -> None:
        """Drops old ones, then every second one; its neighbour stands for both."""
        self._drop(now)
        if len(self._kept) <= self._most / 2:
            return
        self._step *= 2
        self._odd = not self._odd  # else the first of each pair would always be the one that stays
        pairs = zip(self._kept[::2], self._kept[1::2], strict=False)
        left = self._kept[-1:] if len(self._kept) % 2 else []
        self._kept = [
            (two if self._odd else one)._replace(weight=one.weight + two.weight)
            for one, two in pairs
        ] + left

"""Measures how good predictions are: observed over predicted, by kind of request and by worker.

`RatioWindow` keeps the last ratios of one bucket (uncached tokens x sequences at the worker), for
quantiles and the probability that a first token comes in time. `ErrorTracker` is the running
relative error, which decides whether a latency model is used, and since when it is too large.

Pure and bounded: it knows neither the latency model nor what its results are used for.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdserve.ids import Seconds

__all__ = ["ErrorSummary", "ErrorTracker", "RatioWindow", "bucket_of"]

_LENGTHS = (256, 1024, 4096, 16384, 65536)
_LOADS = (1, 4, 16, 64)


def bucket_of(uncached: int, sequences: int) -> tuple[int, int]:
    """The lower bounds of the bucket: uncached tokens, sequences at the worker."""
    length, load = bisect_right(_LENGTHS, uncached), bisect_right(_LOADS, sequences)
    return (_LENGTHS[length - 1] if length else 0, _LOADS[load - 1] if load else 0)


@dataclass(frozen=True, slots=True)
class ErrorSummary:
    """Compares the last observations with their predictions."""

    count: int = 0
    p50: float = 0.0
    """Half of them took less than this times the prediction."""
    p90: float = 0.0
    error: float = 0.0
    """Mean of |observed - predicted| / observed, each counted as 1 at most."""


class RatioWindow:
    """The last ratios observed / predicted, sorted as they come."""

    def __init__(self, size: int = 100) -> None:
        self._size = size
        self._recent: deque[float] = deque()
        self._sorted: list[float] = []

    def __len__(self) -> int:
        return len(self._recent)

    def add(self, ratio: float) -> None:
        if len(self._recent) >= self._size:
            del self._sorted[bisect_left(self._sorted, self._recent.popleft())]
        self._recent.append(ratio)
        insort(self._sorted, ratio)

    def quantile(self, share: float) -> float:
        """0 without observations."""
        if not self._sorted:
            return 0.0
        return self._sorted[min(len(self._sorted) - 1, int(share * len(self._sorted)))]

    def within(self, limit: float) -> float:
        """Probability of a ratio of at most `limit`: one imagined observation on either side keeps
        it from certainty."""
        return (bisect_right(self._sorted, limit) + 1) / (len(self._sorted) + 2)

    def summary(self) -> ErrorSummary:
        errors = [min(1.0, abs(1.0 - 1.0 / r)) if r > 0.0 else 1.0 for r in self._recent]
        return ErrorSummary(
            len(errors),
            self.quantile(0.5),
            self.quantile(0.9),
            sum(errors) / len(errors) if errors else 0.0,
        )


class ErrorTracker:
    """Mean error of the last predictions, relative and weighted by what was observed, so that a
    few long prompts weigh as much as the many short ones of the same time; and since when it is
    too large."""

    def __init__(self, limit: float, patience: Seconds, size: int = 200, least: int = 50) -> None:
        """Poor: above `limit` without a pause for `patience`; again good: below 3/4 of it. Fewer
        than `least` observations say nothing."""
        self._limit = limit
        self._patience = patience
        self._size = size
        self._least = least
        self._recent: deque[tuple[float, float]] = deque()
        self._missed = 0.0
        self._observed = 0.0
        self._since: Seconds | None = None
        self.poor = False

    @property
    def value(self) -> float:
        return self._missed / self._observed if self._observed > 0.0 else 0.0

    def add(self, now: Seconds, predicted: float, observed: float) -> None:
        missed = min(abs(observed - predicted), observed)
        self._recent.append((missed, observed))
        self._missed += missed
        self._observed += observed
        if len(self._recent) > self._size:
            missed, observed = self._recent.popleft()
            self._missed -= missed
            self._observed -= observed
        self._judge(now)

    def _judge(self, now: Seconds) -> None:
        value = self.value
        if len(self._recent) < self._least or value <= 0.75 * self._limit:
            self._since, self.poor = None, False
        elif value <= self._limit:
            self._since = None
        elif self._since is None:
            self._since = now
        elif now - self._since >= self._patience:
            self.poor = True

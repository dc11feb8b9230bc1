"""Paired differences between two arms over seeds, with bootstrap intervals. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Difference", "difference", "interval", "kendall", "mean"]

_RESAMPLES: Final = 2000
_LEVEL: Final = 0.95


@dataclass(frozen=True, slots=True)
class Difference:
    """The relative difference of two arms: its mean, with a 95 % interval."""

    mean: float
    low: float
    high: float

    @property
    def word(self) -> str:
        """The verdict for a number of which more is better."""
        if self.low > 0:
            return "better"
        return "worse" if self.high < 0 else "equal"


def mean(values: Sequence[float]) -> float:
    """The mean of the values; 0 if there are none."""
    return sum(values) / len(values) if values else 0.0


def difference(ours: Sequence[float], theirs: Sequence[float]) -> Difference:
    """The difference of two arms. Values with one index have the same seed and world."""
    base = mean(theirs) or 1.0
    pairs = [(a - b) / base for a, b in zip(ours, theirs, strict=True)]
    low, high = interval(pairs)
    return Difference(mean(pairs), low, high)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """A bootstrap interval of the mean; the same values give the same interval."""
    random = Random(0)
    means = sorted(
        mean([random.choice(values) for _ in values]) for _ in range(_RESAMPLES if values else 1)
    )
    cut = round((1 - _LEVEL) / 2 * len(means))
    return means[cut], means[-1 - cut]


def kendall(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Kendall's tau of two lists of values by index: 1 if they rank alike, -1 if in reverse; ties
    count half."""
    total = agreement = 0.0
    for i in range(len(ours)):
        for j in range(i):
            total += 1
            product = (ours[i] - ours[j]) * (theirs[i] - theirs[j])
            agreement += (product > 0) - (product < 0)
    return agreement / total if total else 1.0

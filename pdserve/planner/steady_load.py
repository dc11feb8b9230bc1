"""Tells how high a load is now, and since when, although it varies by chance. Pure.

Requests come by chance, and a few long prompts are most of the work: that of 30 s is often twice
the mean although nothing has changed. A longer mean varies less, but holds what was before a
change. So the mean is taken over the longest time in which chance explains the differences, as in
adaptive windowing (Bifet and Gavaldà, 2007).

Both the number of the requests and their work are compared: the number varies less, and prompts may
become longer at the same rate.
"""

from __future__ import annotations

from itertools import accumulate
from math import sqrt
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pdserve.ids import Seconds

__all__ = ["Stretch", "beyond_chance", "mean_work", "running", "steady"]

_SIZES: Final = (2, 3, 4, 6, 9, 13, 20, 30)
"""Numbers of newest stretches that are compared with as many before them, or twice as many."""
_CHANCE: Final = 3.5
"""Standard deviations that are a change."""
_TRUST: Final = 80.0
"""Requests after which their own mean work counts as much as the usual one."""


class Stretch(NamedTuple):
    """The demand in a stretch of time."""

    seconds: Seconds
    arrivals: float
    work: Seconds
    """Work of these arrivals."""

    def __add__(self, other: Stretch) -> Stretch:  # type: ignore[override]
        return Stretch(self[0] + other[0], self[1] + other[1], self[2] + other[2])

    def __sub__(self, other: Stretch) -> Stretch:
        return Stretch(self[0] - other[0], self[1] - other[1], self[2] - other[2])


def running(stretches: Iterable[Stretch]) -> list[Stretch]:
    """The sums of the first stretches: of none, of one, and so on."""
    return [Stretch(0.0, 0.0, 0.0), *accumulate(stretches, Stretch.__add__)]


def steady(sums: Sequence[Stretch], first: int, last: int, spread: Seconds) -> Stretch:
    """Of the stretches from `first` to before `last` the newest in which the load has not changed,
    as one.

    Args: `sums` as `running` makes them, of stretches in order of time; `spread` is the sum of the
    squares of requests' work over the sum of their work, 0: unknown."""
    # The clearest change is looked for first: near it, each other split sees some of it, too.
    while (size := _clearest(sums, first, last, spread)) is not None:
        first = last - size
    return sums[last] - sums[first]


def _clearest(sums: Sequence[Stretch], first: int, last: int, spread: Seconds) -> int | None:
    """Number of newest stretches after the clearest change of the load; None: there is none."""
    found: tuple[float, int] | None = None
    for size in _SIZES:
        if size >= last - first:
            break
        newest = sums[last] - sums[last - size]
        before = sums[last - size] - sums[max(first, last - 3 * size)]
        apart = max(
            _apart(newest.arrivals, newest.seconds, before.arrivals, before.seconds, 1.0),
            _apart(newest.work, newest.seconds, before.work, before.seconds, spread),
        )
        if apart > _CHANCE and (found is None or apart > found[0]):
            found = apart, size
    return None if found is None else found[1]


def _apart(one: float, over: float, other: float, other_over: float, unit: float) -> float:
    """By how many standard deviations two sums differ, each over its own time: see `beyond_chance`
    for the unit. Sums over nothing do not, nor do those of unknown units."""
    if unit <= 0 or over <= 0 or other_over <= 0:
        return 0.0
    apart = abs(sqrt(one / unit / over) - sqrt(other / unit / other_over))
    return 2 * apart / sqrt(1 / over + 1 / other_over)


def beyond_chance(seen: float, usual: float, unit: float, deviations: float) -> bool:
    """True if chance does not explain that so much is seen instead of what is usual. What comes is
    units that come by chance: the square root of their number varies by one half, whatever their
    number. A unit of 0 is not known, and then nothing is chance."""
    return unit <= 0 or 2 * (sqrt(seen / unit) - sqrt(usual / unit)) > deviations


def mean_work(stretch: Stretch, request: Seconds) -> float:
    """Work per second: the rate of the requests, times their mean work. Few requests do not tell
    their mean work, so the usual one counts besides."""
    if stretch.seconds <= 0:
        return 0.0
    if stretch.arrivals <= 0 or request <= 0:
        return stretch.work / stretch.seconds
    mean = (stretch.work + _TRUST * request) / (stretch.arrivals + _TRUST)
    return stretch.arrivals * mean / stretch.seconds

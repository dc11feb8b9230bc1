"""Makes recent arrivals a load of one height, so that they can be scaled to a forecast. Pure.

A what-if scales the arrivals of the last minutes to a forecast by their mean. If the load has
changed meanwhile, the higher part would become far higher than the forecast, and pools would be
asked for that nothing needs. So earlier arrivals are moved apart or together until they come at the
rate of the newest ones; what varies by chance stays.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from pdserve.planner.steady_load import Stretch, running, steady

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.ids import Seconds
    from pdserve.planner.recent_arrivals import RecentArrival

__all__ = ["even_load"]

_BIN: Final[Seconds] = 5.0
"""Length of the stretches that are compared: the routers' buckets."""


class _Part(NamedTuple):
    """Arrivals between two changes of the load."""

    begin: Seconds
    total: Stretch

    @property
    def rate(self) -> float:
        return self.total.arrivals / self.total.seconds


def even_load(arrivals: Sequence[RecentArrival]) -> list[RecentArrival]:
    """The arrivals at the newest ones' rate. They are given and returned in order of time."""
    if not arrivals or arrivals[-1].at - arrivals[0].at < 2 * _BIN:
        return list(arrivals)
    return _moved(arrivals, _parts(_bins(arrivals), arrivals[-1].at))


def _bins(arrivals: Sequence[RecentArrival]) -> list[Stretch]:
    """The arrivals in stretches of 5 s, the last of which ends with the newest arrival."""
    end = arrivals[-1].at
    found = [Stretch(_BIN, 0.0, 0.0)] * (1 + int((end - arrivals[0].at) // _BIN))
    for one in arrivals:
        at = -1 - int((end - one.at) // _BIN)
        found[at] += Stretch(0.0, one.weight, one.weight * one.work)
    return found


def _parts(bins: list[Stretch], end: Seconds) -> list[_Part]:
    """The times between two changes of the load, the newest first."""
    found: list[_Part] = []
    sums, last = running(bins), len(bins)
    while last:
        total = steady(sums, 0, last, 0.0)
        last -= round(total.seconds / _BIN)
        end -= total.seconds
        found.append(_Part(end, total))
    return found


def _moved(arrivals: Sequence[RecentArrival], parts: Sequence[_Part]) -> list[RecentArrival]:
    """The arrivals of these parts, all at the rate of the first one. The newest stays in place."""
    found: list[RecentArrival] = []
    left = iter(reversed(arrivals))
    one = next(left, None)
    end = arrivals[-1].at
    moved = end
    for part in parts:
        factor = part.rate / parts[0].rate
        while one is not None and one.at > part.begin:
            found.append(one._replace(at=moved - (end - one.at) * factor))
            one = next(left, None)
        moved -= (end - part.begin) * factor
        end = part.begin
    found.reverse()
    return found

"""Tells a load that has left its forecast from one that varies by chance. Pure.

A load that has left its forecast upwards is a *panic*: there is more than 1.5 times as much of it,
and chance alone makes as much about once in hours. A panic is renewed only by a load above its own,
and taken back if the mean since the load rose turns out to be no such load.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Final

from pdserve.planner.steady_load import Stretch, beyond_chance, mean_work

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pdserve.ids import Seconds
    from pdserve.planner.outlook import DemandView

__all__ = ["Surge"]

_MEAN: Final[Seconds] = 30.0
"""Length of the longest mean that is compared with the forecast."""
_LEVEL: Final[Seconds] = 60.0
"""Length of the longest mean that counts as the load of a panic."""
_CHANCE: Final = 3.5
"""Standard deviations that are no chance: 1 of 4,000 means goes beyond."""


class Surge:
    """One model's load beside its forecast."""

    def __init__(self, factor: float) -> None:
        """`factor`: least load of a panic, as a multiple of the forecast."""
        self._factor = factor
        self._until: Seconds = -inf
        self.begun: Seconds = -inf
        """When the panic was noticed, or renewed."""
        self._rose: Seconds = -inf
        """When the load began to grow."""
        self._fell: Seconds = -inf
        self._highest = 0.0
        """Highest load of the panic so far."""
        self._usual = 0.0
        """The load that was forecast when it began."""
        self.level = 0.0
        """Work per second in the panic: the mean since the load rose, of at most 60 s."""
        self.ratio = 0.0
        """The load that began the panic, as a multiple of the forecast."""

    def active(self, now: Seconds) -> bool:
        """True in a panic."""
        return now < self._until

    def begins(self, now: Seconds) -> bool:
        """True at the tick at which a panic begins, or is renewed."""
        return now == self.begun

    def left(self, now: Seconds) -> Seconds:
        """Seconds until the panic is over."""
        return max(0.0, self._until - now)

    def shifted(self, now: Seconds) -> bool:
        """True if the load has just left the forecast, in either direction. What was forecast
        before does not tell how good forecasts are."""
        return now - max(self._rose, self._fell) <= _MEAN

    def see(self, now: Seconds, demand: DemandView, expected: float, lasts: Seconds) -> None:
        """The demand at one more tick, and the work per second that was forecast for it. After a
        lull, which is chance too, a forecast is too low; so the last minutes count besides.
        `lasts`: how long a panic lasts after the load has last grown."""
        expected = max(expected, demand.work_300)
        if self.active(now):
            self._follow(now, demand)
        rose = _rose(demand, expected, self._factor)
        level = _level(demand, rose)
        if rose and not (self.active(now) and level <= self._highest):
            if not self.active(now):
                self._usual = expected
            self.begun, self._until = now, now + lasts
            self._rose = now - rose
            self._highest = self.level = level
            self.ratio = level / expected
        if _fell(demand, expected, self._factor):
            self._fell = now

    def _follow(self, now: Seconds, demand: DemandView) -> None:
        """Measures the panic's load anew. A few long prompts in a row look like a surge for some
        seconds; once the mean is long enough to tell, they are none."""
        since = now - self._rose
        self.level = _level(demand, since)
        if since >= _MEAN and self.level <= self._factor * self._usual:
            self._until = now


def _rose(demand: DemandView, expected: float, factor: float) -> Seconds:
    """For how long the load has been above its forecast; 0: it is not, or by chance."""
    for window in _windows(demand, _MEAN):
        usual = expected * window.seconds
        number = usual / demand.request_work if demand.request_work > 0 else inf
        for seen, most, unit in (
            (window.work, usual, demand.request_spread),
            (window.arrivals, number, 1.0),
        ):
            if seen > factor * most > 0 and beyond_chance(seen, most, unit, _CHANCE):
                return window.seconds
    return 0.0


def _fell(demand: DemandView, expected: float, factor: float) -> bool:
    """True if the load is below its forecast, and not by chance."""
    *_, window = _windows(demand, _MEAN)
    usual = expected * window.seconds
    return usual > factor * window.work and beyond_chance(
        usual, window.work, demand.request_spread, _CHANCE
    )


def _level(demand: DemandView, seconds: Seconds) -> float:
    """Work per second of the last seconds."""
    *_, window = _windows(demand, min(seconds, _LEVEL))
    return mean_work(window, demand.request_work)


def _windows(demand: DemandView, most: Seconds) -> Iterator[Stretch]:
    """The load of the last seconds, the shortest time first, up to `most`; at least one."""
    total = Stretch(0.0, 0.0, 0.0)
    for one in reversed(demand.recent or (Stretch(_MEAN, 0.0, _MEAN * demand.level),)):
        if total.seconds and total.seconds + one.seconds > most + _SLACK:
            return
        total += one
        yield total


_SLACK: Final[Seconds] = 1.0
"""Sums of times are not exact."""

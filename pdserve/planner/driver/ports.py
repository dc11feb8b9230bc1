"""Puts the forecast and the what-if behind the ports that decisions use. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pdserve.planner.forecast import Forecast
from pdserve.planner.outlook import Horizon

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.ids import Seconds

__all__ = ["LoadForecaster"]

_WEEK: Final[Seconds] = 7 * 86400.0
_MONDAY: Final[Seconds] = 4 * 86400.0
"""Unix seconds of the first Monday, in UTC: the season of a load needs no other zone."""


class LoadForecaster:
    """Continues one model's requests per second. Implements `outlook.Forecaster`."""

    def __init__(self, wall: Callable[[], float]) -> None:
        """`wall`: Unix seconds, for the time of the week."""
        self._forecast = Forecast(lambda at: (wall() - _MONDAY) % _WEEK)

    def observe(self, at: Seconds, value: float) -> None:
        """One more bucket."""
        self._forecast.observe(at, value)

    def shifted(self) -> None:
        """The load has changed in a step: what it was before says nothing of it."""
        self._forecast.shifted()

    def at(self, horizon: Seconds) -> Horizon:
        """The forecast so far ahead; no load while nothing has been observed."""
        found = self._forecast.at(horizon)
        return Horizon(0.0, 0.0, 0.0) if found is None else Horizon(found.p50, found.p90, found.p95)

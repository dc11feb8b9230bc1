"""Passes time as an argument, so that a simulation can control it.

`Clock.now` is monotonic seconds from an arbitrary origin.
"""

from __future__ import annotations

import time
from math import floor
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from pdserve.ids import Seconds


class Clock(Protocol):
    """Reads the time. Waiting belongs to the event loop."""

    def now(self) -> Seconds:
        """Monotonic seconds."""
        ...


class SystemClock:
    """The machine's monotonic clock."""

    def now(self) -> Seconds:
        return time.monotonic()


def until_next(now: Seconds, period: Seconds) -> Seconds:
    """Time until the next multiple of `period`: whatever waits for it shares one wake-up."""
    # A timer may come a little early; that moment has been.
    return (floor(now / period + 0.05) + 1) * period - now


class ManualClock:
    """A clock that moves only when told, for tests and simulation."""

    def __init__(self, start: Seconds = 0.0) -> None:
        self._now = start

    def now(self) -> Seconds:
        return self._now

    def advance(self, seconds: Seconds) -> None:
        """Moves forward by `seconds` (>= 0)."""
        if seconds < 0:
            raise ValueError("time does not run backwards")
        self._now += seconds

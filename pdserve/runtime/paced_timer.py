"""Calls a function again and again: often while there is work, seldom while there is none.

An idle process then wakes up less. Seldom calls of all such timers fall on the same moments,
so that they share a wake-up. Who brings work calls `wake`, so that nothing waits for a seldom call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pdserve.clock import until_next
from pdserve.net.timers import TICK

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.ids import Seconds
    from pdserve.net.timers import Timer, Timers

__all__ = ["IDLE", "PacedTimer"]

IDLE: Final[Seconds] = 10.0
"""Interval between two calls while there is no work. `wake` ends it early."""
_LINGER: Final[Seconds] = 2.0
"""Time without work after which calls become seldom: load often comes in bursts."""
_EARLY: Final[Seconds] = TICK / 2
"""A deadline this long before a multiple of a tick expires at that multiple, and not a tick later:
then timers of the event loop itself expire at the same moment."""


class PacedTimer:
    """One such function on a node's timers; it ends with them."""

    def __init__(
        self,
        timers: Timers,
        interval: Seconds,
        call: Callable[[], bool],
        *,
        idle: Seconds = IDLE,
    ) -> None:
        """`interval` is that with work, `idle` that without; `call` returns True if there is some
        work. Call `start`."""
        self._timers = timers
        self._interval = interval
        self._idle = idle
        self._call = call
        self._worked: Seconds = float("-inf")
        self._seldom = False
        self._timer: Timer | None = None

    def start(self) -> None:
        """Calls now, and from now on."""
        self._worked = self._timers.now()
        self._fire()

    def stop(self) -> None:
        """Calls no more. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
        self._seldom = False

    def wake(self) -> bool:
        """Notes that work has come: the next call is soon. Returns True if calls were seldom. It is
        quick."""
        if not self._seldom:
            return False
        self._seldom = False
        now = self._worked = self._timers.now()
        if self._timer is not None:
            self._timer.cancel()
        self._arm(now)
        return True

    def _fire(self) -> None:
        now = self._timers.now()
        # The next call is due even if this one raises.
        self._seldom = now - self._worked >= max(_LINGER, 2 * self._interval)
        self._arm(now)
        if self._call():
            _ = self.wake()
            self._worked = now

    def _arm(self, now: Seconds) -> None:
        due = now + self._interval
        if self._seldom:
            due = now + until_next(now, self._idle) - _EARLY
        self._timer = self._timers.call_at(due, self._fire)

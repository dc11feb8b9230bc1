"""Detects a stalled engine core. Pure: the caller passes heartbeat readings and times.

A core must make progress while it computes, when a time passes at which it had to wake, and while
commands wait for it. Requests that wait for a peer (its KV, or quarantined blocks) let the core
sleep, so they do not count. Only time in which the node itself ran is counted: if the node or the
machine was stopped, the core may have been stopped too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pdserve.clock import until_next

if TYPE_CHECKING:
    from pdserve.ids import Seconds
    from pdserve.observe.heartbeat import HeartbeatReading

__all__ = ["StallWatchdog"]

_LOOKS_PER_TIMEOUT: Final = 10
_MAX_INTERVAL: Final[Seconds] = 0.5
_REST: Final = 10.0
"""Most seconds between two checks of a core without work. They only find work that the core began
by itself: a command brings a check at once."""
_LATE: Final = 2.0
"""Most intervals that one check may count; a later check was delayed by the node itself."""


class StallWatchdog:
    """Watches one run of a core."""

    def __init__(self, timeout: Seconds, now: Seconds) -> None:
        """`timeout` 0: the core never counts as stalled."""
        self.age: Seconds = 0.0
        """Seconds without progress although the core has work, as of the last check."""
        self._timeout = timeout
        self._looked = now
        self._ticks = -1
        self._owes = False

    @property
    def interval(self) -> Seconds:
        """Seconds between two checks."""
        if not self._timeout:
            return _MAX_INTERVAL
        return min(_MAX_INTERVAL, self._timeout / _LOOKS_PER_TIMEOUT)

    def pause(self, seen: HeartbeatReading, posted: int, now: Seconds) -> Seconds:
        """Seconds until the next check after this one, unless a command is posted before. `posted`
        as in `look`: this check itself may have posted one."""
        if self._owes or seen.heard < posted:
            return until_next(now, self.interval)
        return max(self.interval, min(seen.due - now, until_next(now, _REST)))

    def look(self, seen: HeartbeatReading, posted: int, now: Seconds) -> bool:
        """Check a heartbeat reading taken at `now`; `posted` is the number of commands posted by
        then. True if the core has stalled."""
        passed = min(now - self._looked, _LATE * self.interval)
        self._looked = now
        owes = seen.due <= now or seen.heard < posted
        begins = owes and not self._owes
        self._owes = owes
        if seen.ticks != self._ticks or begins or not owes:
            self._ticks, self.age = seen.ticks, 0.0
            return False
        self.age += passed
        return bool(self._timeout) and self.age >= self._timeout

"""Watches many deadlines that mostly do not pass, at almost no cost each.

A request that is answered in time needs no timer of its own. The owner keeps its requests in a
table, and this class keeps one number: no deadline in the table is before `due`. A new deadline
costs one comparison, an answer costs nothing. At `due` the owner scans its table once and returns
the earliest remaining deadline.

With 64 requests of equal timeout under way, that is one scan per timeout; at worst it is one scan
per tick over a bounded table. A measured request takes a tenth less time than with one entry per
request in the timer wheel. Owned by one `link`, one for each table.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.ids import Seconds
    from pdserve.net.timers import Timer, Timers

__all__ = ["LazyDeadline"]


class LazyDeadline:
    """`if when < deadlines.due: deadlines.watch(when)` is the whole cost of setting a deadline."""

    __slots__ = ("_look", "_timer", "_timers", "due")

    def __init__(self, timers: Timers, look: Callable[[Seconds], Seconds]) -> None:
        """Args: `look(now)` ends what has expired and returns the earliest deadline left, or
        `inf`.
        """
        self._timers = timers
        self._look = look
        self._timer: Timer | None = None
        self.due: Seconds = inf

    def watch(self, when: Seconds) -> None:
        """Notes a deadline before `due`."""
        if self._timer is not None:
            self._timer.cancel()
        self.due = when
        self._timer = self._timers.call_at(when, self._expired)

    def close(self) -> None:
        """Stops the timer: the table is empty and stays so."""
        if self._timer is not None:
            self._timer.cancel()
        self.due = inf

    def _expired(self) -> None:
        self._timer = None
        self.due = inf
        left = self._look(self._timers.now())
        # `look` may have started work whose deadline is earlier and is watched already.
        if left < self.due:
            self.watch(left)

"""Calls a function again and again: often while there is work, seldom while there is none.

An idle process then wakes up less. Seldom calls of all such timers fall on the same moments, so
that they share a wake-up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pdserve.clock import until_next

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.ids import Seconds
    from pdserve.net.timers import Timer
    from pdserve.runtime.node import Node

__all__ = ["IDLE", "PacedTimer"]

IDLE: Final[Seconds] = 1.0
"""Interval without work."""
_LINGER: Final[Seconds] = 2.0
"""Time without work after which calls become seldom: load often comes in bursts."""


class PacedTimer:
    """One such function on a node's timers; it ends with the node."""

    def __init__(self, node: Node, interval: Seconds, call: Callable[[], bool]) -> None:
        """`interval` is that with work; `call` returns True if there is some. Call `start`."""
        self._node = node
        self._interval = interval
        self._call = call
        self._worked: Seconds = float("-inf")
        self._seldom = False
        self._timer: Timer | None = None

    def start(self) -> None:
        """Calls now, and from now on."""
        self._worked = self._node.now()
        self._fire()

    def wake(self) -> None:
        """Notes that work has come: the next call is soon. It is quick."""
        if self._seldom:
            self._seldom = False
            now = self._worked = self._node.now()
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._node.timers.call_at(now + self._interval, self._fire)

    def _fire(self) -> None:
        now = self._node.now()
        # The next call is due even if this one raises.
        self._seldom = now - self._worked >= _LINGER
        due = now + (until_next(now, IDLE) if self._seldom else self._interval)
        self._timer = self._node.timers.call_at(due, self._fire)
        if self._call():
            self.wake()
            self._worked = now

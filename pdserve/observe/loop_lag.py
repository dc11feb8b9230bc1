"""Measures how late the event loop runs, and how many tasks it has.

A timer is due every `interval`; its lateness is one sample. Stalls shorter than the interval may
fall between two ticks, longer ones always show. `LagWindow` is plain code; a thin driver re-arms
the timer. Owned by the process's start-up.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from pdserve.clock import SystemClock

if TYPE_CHECKING:
    from pdserve.clock import Clock
    from pdserve.ids import Seconds
    from pdserve.observe.metrics import Metrics

INTERVAL: Seconds = 0.05
"""Sampling interval. Twenty wake-ups a second cost an idle process about a thousandth of a core."""
WINDOW: Seconds = 60.0


class LagWindow:
    """The largest lag of the current and the previous window."""

    def __init__(self, now: Seconds, window: Seconds = WINDOW) -> None:
        self._window = window
        self._since = now
        self._current: Seconds = 0.0
        self._previous: Seconds = 0.0

    def add(self, lag: Seconds, now: Seconds) -> None:
        """Records a sample taken at `now`."""
        elapsed = now - self._since
        if elapsed >= self._window:
            self._previous = self._current if elapsed < 2 * self._window else 0.0
            self._current = 0.0
            self._since = now
        self._current = max(self._current, lag)

    @property
    def max(self) -> Seconds:
        return max(self._current, self._previous)


class LoopLagMonitor:
    """Measures the running loop from `start` to `stop` into `metrics`."""

    def __init__(
        self, metrics: Metrics, interval: Seconds = INTERVAL, clock: Clock | None = None
    ) -> None:
        # uvloop's own clock counts whole milliseconds, which is too coarse.
        self._clock = clock or SystemClock()
        self._histogram = metrics.event_loop_lag
        self._gauge = metrics.event_loop_lag_max
        self._tasks = metrics.event_loop_tasks
        self._interval = interval
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Starts measuring; needs a running loop. Idempotent."""
        if self._timer is not None:
            return
        self._loop = asyncio.get_running_loop()
        self._window = LagWindow(self._clock.now())
        self._gauge.read_from(lambda: self._window.max)
        loop = self._loop
        self._tasks.read_from(lambda: len(asyncio.all_tasks(loop)))
        self._arm(self._clock.now())

    def stop(self) -> None:
        """Stops measuring. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self, now: Seconds) -> None:
        self._due = now + self._interval
        self._timer = self._loop.call_later(self._interval, self._tick)

    def _tick(self) -> None:
        now = self._clock.now()
        lag = max(0.0, now - self._due)
        self._histogram.observe(lag)
        self._window.add(lag, now)
        self._arm(now)

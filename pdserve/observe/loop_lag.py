"""Measures how late the event loop runs, and how many tasks it has.

A timer is due every `interval`; its lateness is one sample. Stalls shorter than the interval may
fall between two ticks, longer ones always show. In a process that does next to nothing the interval
is longer. `LagWindow` and `SamplingPace` are plain code; a thin driver re-arms the timer. Owned by
the process's start-up.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from pdserve.clock import SystemClock, until_next

if TYPE_CHECKING:
    from pdserve.clock import Clock
    from pdserve.ids import Seconds
    from pdserve.observe.metrics import Metrics

INTERVAL: Seconds = 0.05
"""Sampling interval of a process that works."""
IDLE_INTERVAL: Seconds = 1.0
"""Sampling interval of a process that does next to nothing: these wake-ups would be most of all it
has. The ticks fall on whole seconds, as those of other timers do."""
_IDLE_SHARE = 0.04
"""Share of the loop's thread in the time, below which it does next to nothing."""
_IDLE_TICKS = 40
"""Ticks in a row after which it counts as idle."""
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


class SamplingPace:
    """Chooses the next interval by the CPU time of the loop's thread."""

    def __init__(self, interval: Seconds, now: Seconds, used: Seconds) -> None:
        """`used`: CPU time of the thread so far."""
        self._interval = interval
        self._since = now
        self._used = used
        self._quiet = 0

    def next(self, now: Seconds, used: Seconds) -> Seconds:
        """The interval after a tick at `now`."""
        busy = used - self._used > _IDLE_SHARE * (now - self._since)
        self._since, self._used = now, used
        self._quiet = 0 if busy else self._quiet + 1
        idle = self._quiet >= _IDLE_TICKS
        return max(IDLE_INTERVAL, self._interval) if idle else self._interval


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
        now = self._clock.now()
        self._window = LagWindow(now)
        self._pace = SamplingPace(self._interval, now, time.thread_time())
        self._gauge.read_from(lambda: self._window.max)
        loop = self._loop
        self._tasks.read_from(lambda: len(asyncio.all_tasks(loop)))
        self._arm(now, self._interval)

    def stop(self) -> None:
        """Stops measuring. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self, now: Seconds, interval: Seconds) -> None:
        wait = interval if interval < IDLE_INTERVAL else until_next(now, interval)
        self._due = now + wait
        self._timer = self._loop.call_later(wait, self._tick)

    def _tick(self) -> None:
        now = self._clock.now()
        lag = max(0.0, now - self._due)
        self._histogram.observe(lag)
        self._window.add(lag, now)
        self._arm(now, self._pace.next(now, time.thread_time()))

"""Decides whether and when to restart a failed child. Plain arithmetic: it neither waits nor
restarts.

`RestartIntensity` is OTP's restart intensity: a bound of restarts in a time window. Intensities
multiply across levels of supervision, so they are small. `Backoff` is the pause before each
restart. A `supervisor` owns both and passes the time.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdserve.backoff import backoff_delay

if TYPE_CHECKING:
    from random import Random

    from pdserve.ids import Seconds

__all__ = ["Backoff", "RestartIntensity", "RestartLimits"]


@dataclass(frozen=True, slots=True)
class RestartLimits:
    """Bounds of restarts, and their back-off."""

    most: int = 5
    """Restarts allowed in any `within` seconds; 0: none."""
    within: Seconds = 30.0
    """Window of `most`, in seconds; also the uptime after which a child's back-off starts over."""
    first: Seconds = 0.1
    """Back-off before the first restart; it doubles with each."""
    cap: Seconds = 10.0
    """Largest back-off."""
    jitter: float = 0.5
    """Random share of the back-off, in [0, 1], so that children that failed together restart apart.
    """


class RestartIntensity:
    """Counts restarts in a sliding window."""

    def __init__(self, restarts: RestartLimits) -> None:
        self._restarts = restarts
        self._times: deque[Seconds] = deque()

    def allows(self, now: Seconds) -> bool:
        """True if one more restart is allowed; then it is counted. `now` never goes back."""
        times = self._times
        while times and now - times[0] >= self._restarts.within:
            times.popleft()
        if len(times) >= self._restarts.most:
            return False
        times.append(now)
        return True


class Backoff:
    """The back-off of one child that fails repeatedly."""

    def __init__(self, restarts: RestartLimits, random: Random) -> None:
        self._restarts = restarts
        self._random = random
        self._last: Seconds | None = None
        self._failures = 0

    def failed(self, now: Seconds) -> Seconds:
        """Notes a failure at `now`; returns how long to wait before the next attempt."""
        restarts = self._restarts
        if self._last is not None and now - self._last >= restarts.within:
            self._failures = 0
        self._last = now
        pause = backoff_delay(restarts.first, restarts.cap, self._failures)
        self._failures += 1
        return pause * (1.0 - restarts.jitter * self._random.random())

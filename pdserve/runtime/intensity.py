"""How often to restart what fails, and how soon. Plain arithmetic: nothing here waits or restarts.

`Intensity` is OTP's restart intensity: so many restarts in so many seconds, and no more.
Intensities multiply across levels of supervision, so they are small. `Backoff` is the pause before
each. Both are owned by a `supervisor`, which brings the time.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from random import Random

    from pdserve.ids import Seconds

__all__ = ["Backoff", "Intensity", "Restarts"]


@dataclass(frozen=True, slots=True)
class Restarts:
    """When to restart, and when to give up."""

    most: int = 5
    """Restarts allowed in any `within` seconds. 0: the first failure is one too many."""
    within: Seconds = 30.0
    """Also how long a child must run before its back-off starts over."""
    first: Seconds = 0.1
    """Back-off before the first restart; it doubles with each."""
    cap: Seconds = 10.0
    """Back-off never grows beyond this."""
    jitter: float = 0.5
    """Share of the back-off that is random, so that what failed together does not come back in
    step; in [0, 1]."""


class Intensity:
    """Counts restarts in a sliding window."""

    def __init__(self, restarts: Restarts) -> None:
        self._restarts = restarts
        self._times: deque[Seconds] = deque()

    def allows(self, now: Seconds) -> bool:
        """Whether one more restart may be made; if so, it is counted. `now` never goes back."""
        times = self._times
        while times and now - times[0] >= self._restarts.within:
            times.popleft()
        if len(times) >= self._restarts.most:
            return False
        times.append(now)
        return True


class Backoff:
    """The pauses of one thing that fails repeatedly."""

    def __init__(self, restarts: Restarts, random: Random) -> None:
        self._restarts = restarts
        self._random = random
        self._last: Seconds | None = None
        self._failures = 0

    def failed(self, now: Seconds) -> Seconds:
        """It failed at `now`: how long to wait before the next attempt."""
        restarts = self._restarts
        if self._last is not None and now - self._last >= restarts.within:
            self._failures = 0
        self._last = now
        pause = min(restarts.cap, restarts.first * 2.0 ** min(self._failures, 64))
        self._failures += 1
        return pause * (1.0 - restarts.jitter * self._random.random())

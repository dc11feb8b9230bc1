"""Decides when a dead engine core is restarted, and when it is not. Pure: time is an argument."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdserve.backoff import backoff_delay

if TYPE_CHECKING:
    import random

    from pdserve.ids import Seconds

__all__ = ["CoreRestartPolicy", "RestartBackoff"]


@dataclass(frozen=True, slots=True)
class CoreRestartPolicy:
    """How often a core is restarted, and with which back-off."""

    max_restarts: int = 5
    """Most restarts within any `window`; one more death in it is final. 0: never restart."""
    window: Seconds = 60.0
    """Period in which restarts are counted."""
    first_delay: Seconds = 0.2
    """Delay before the first restart; it doubles with each further one inside the window."""
    max_delay: Seconds = 10.0
    """Upper bound of the delay."""
    jitter: float = 0.5
    """Each delay is shortened by up to this fraction, so that workers do not restart in step."""


class RestartBackoff:
    """Counts the restarts of the last window and computes the next delay."""

    def __init__(self, policy: CoreRestartPolicy, rng: random.Random) -> None:
        self.policy = policy
        self.total = 0
        """Number of restarts granted so far."""
        self._rng = rng
        self._times: deque[Seconds] = deque()

    def next_delay(self, now: Seconds) -> Seconds | None:
        """Take note of a death at `now`; returns the delay before the restart, None for none."""
        policy, times = self.policy, self._times
        while times and times[0] <= now - policy.window:
            times.popleft()
        if len(times) >= policy.max_restarts:
            return None
        delay = backoff_delay(policy.first_delay, policy.max_delay, len(times))
        times.append(now)
        self.total += 1
        return delay * (1.0 - policy.jitter * self._rng.random())

"""When a core that died is started again, and when that is given up. Pure; the client owns one."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random

    from pdserve.ids import Seconds

__all__ = ["RestartPolicy", "Restarts"]


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Restart intensity and back-off."""

    max_restarts: int = 5
    """In any `window`; the next death within it is final. 0: never restart."""
    window: Seconds = 60.0
    first_delay: Seconds = 0.2
    """Before the first restart; doubles with each further one inside the window."""
    max_delay: Seconds = 10.0
    jitter: float = 0.5
    """Each delay is shortened by up to this fraction, so that workers do not restart in step."""


class Restarts:
    """Remembers the restarts of the last window."""

    def __init__(self, policy: RestartPolicy, rng: random.Random) -> None:
        self.policy = policy
        self.total = 0
        """Restarts granted so far."""
        self._rng = rng
        self._times: deque[Seconds] = deque()

    def next_delay(self, now: Seconds) -> Seconds | None:
        """The core died at `now`: seconds to wait before its restart, None to give up."""
        policy, times = self.policy, self._times
        while times and times[0] <= now - policy.window:
            times.popleft()
        if len(times) >= policy.max_restarts:
            return None
        delay = min(policy.max_delay, policy.first_delay * 2.0 ** len(times))
        times.append(now)
        self.total += 1
        return delay * (1.0 - policy.jitter * self._rng.random())

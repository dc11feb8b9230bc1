"""Computes when to dial again: one policy per cause, and the state to follow it.

Delays double from `first` to `most` and are drawn evenly from zero to the result ("full jitter"),
so that nodes that lost the same peer do not redial in step. After a link was up for `healthy`, the
delays start at `first` again. The caller does the waiting.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pdserve.backoff import backoff_delay

if TYPE_CHECKING:
    from collections.abc import Mapping
    from random import Random

    from pdserve.errors import DialFailed
    from pdserve.ids import Seconds

__all__ = ["REDIAL_POLICIES", "Redial", "RedialPolicy"]


@dataclass(frozen=True, slots=True)
class RedialPolicy:
    """The back-off for one cause of failure."""

    first: Seconds
    most: Seconds
    floor: Seconds = 0.0
    """Smallest delay, for causes that an operator must remove."""


_TRANSIENT: Final = RedialPolicy(first=0.1, most=5.0)
_BY_HAND: Final = RedialPolicy(first=5.0, most=60.0, floor=5.0)

REDIAL_POLICIES: Final[Mapping[str, RedialPolicy]] = {
    "lost": _TRANSIENT,  # a link that was up
    "refused": _TRANSIENT,  # the process restarts
    "timeout": _TRANSIENT,  # the attempt itself took seconds
    "failed": _TRANSIENT,
    "handshake": _TRANSIENT,  # busy or going away
    "key": _BY_HAND,
    "cluster": _BY_HAND,
    "version": _BY_HAND,
    "self": _BY_HAND,  # a seed is the own address
    # Another node answers at the address: the right address comes by gossip.
    "peer": _BY_HAND,
}
"""Policies by `DialFailed.cause`."""


class Redial:
    """The back-off state towards one peer. `random` is the caller's, so that a simulation
    repeats.
    """

    def __init__(self, random: Random, *, healthy: Seconds = 30.0) -> None:
        self._random = random
        self._healthy = healthy
        self._failures = 0
        self._cause = ""
        self._since: Seconds | None = None

    def connected(self, now: Seconds) -> None:
        """Notes that a link is up."""
        self._since = now

    def lost(self, now: Seconds) -> Seconds:
        """Notes that the link is down; returns the delay before the next dial."""
        if self._since is not None and now - self._since >= self._healthy:
            self._failures = 0
        self._since = None
        return self._delay("lost")

    def failed(self, error: DialFailed) -> Seconds:
        """Notes a failed dial; returns the delay before the next one."""
        return self._delay(error.cause)

    def _delay(self, cause: str) -> Seconds:
        pace = REDIAL_POLICIES.get(cause, _TRANSIENT)
        if REDIAL_POLICIES.get(self._cause, _TRANSIENT) is not pace:
            self._failures = 0
        self._cause = cause
        longest = backoff_delay(pace.first, pace.most, self._failures)
        self._failures += 1
        return max(pace.floor, self._random.uniform(0.0, longest))

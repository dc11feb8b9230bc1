"""When to dial again: a pace per cause, as data, and the state to follow it.

Delays double from `first` to `most` and are then drawn evenly from zero to the result ("full
jitter"), so that nodes that lost the same peer do not come back in step. A link that held for
`healthy` starts over. Nothing here waits: the caller asks for a delay and owns the waiting."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping
    from random import Random

    from pdserve.errors import DialFailed
    from pdserve.ids import Seconds

__all__ = ["PACES", "Pace", "Redial"]


@dataclass(frozen=True, slots=True)
class Pace:
    """How one cause is retried."""

    first: Seconds
    most: Seconds
    floor: Seconds = 0.0
    """Never sooner than this: for causes that time alone does not cure."""


_TRANSIENT: Final = Pace(first=0.1, most=5.0)
_BY_HAND: Final = Pace(first=5.0, most=60.0, floor=5.0)

PACES: Final[Mapping[str, Pace]] = {
    "lost": _TRANSIENT,  # a link that was up
    "refused": _TRANSIENT,  # the process restarts
    "timeout": _TRANSIENT,  # the attempt itself took seconds
    "failed": _TRANSIENT,
    "handshake": _TRANSIENT,  # busy or going away
    "key": _BY_HAND,
    "cluster": _BY_HAND,
    "version": _BY_HAND,
    "self": _BY_HAND,  # one of its seeds is the node itself
    "peer": _BY_HAND,  # somebody else is there: wait for news of the node
}
"""By `DialFailed.cause`."""


class Redial:
    """The pace towards one peer. `random` is the caller's, so that a simulation repeats."""

    def __init__(self, random: Random, *, healthy: Seconds = 30.0) -> None:
        self._random = random
        self._healthy = healthy
        self._failures = 0
        self._cause = ""
        self._since: Seconds | None = None

    def connected(self, now: Seconds) -> None:
        """A link is up."""
        self._since = now

    def lost(self, now: Seconds) -> Seconds:
        """The link is down; returns how long to wait before the next dial."""
        if self._since is not None and now - self._since >= self._healthy:
            self._failures = 0
        self._since = None
        return self._delay("lost")

    def failed(self, error: DialFailed) -> Seconds:
        """A dial failed; returns how long to wait before the next one."""
        return self._delay(error.cause)

    def _delay(self, cause: str) -> Seconds:
        pace = PACES.get(cause, _TRANSIENT)
        if PACES.get(self._cause, _TRANSIENT) is not pace:
            self._failures = 0
        self._cause = cause
        # Past the cap the exponent need not grow: 2 ** 1100 is no float.
        longest = min(pace.most, pace.first * 2.0 ** min(self._failures, 30))
        self._failures += 1
        return max(pace.floor, self._random.uniform(0.0, longest))

"""How fast the work that waits is being begun: seconds of predicted work per second.

A worker that also decodes begins less than a second of work in a second, and how much less nobody
predicts: it is seen. Only time in which somebody waited counts; what was seen fades within seconds.

Pure; the core owns one per hold queue.
"""

from __future__ import annotations

from math import exp
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pdserve.ids import Seconds

__all__ = ["DrainRate"]

_MEMORY: Final[Seconds] = 3.0
"""What was seen so long ago counts for a third."""
_LEAST: Final = 0.05
"""Share of what is assumed below which nothing is believed: some seconds in which nothing is begun,
as after the death of a worker, say little of the minutes to come."""
_DOUBT: Final[Seconds] = 0.5
"""What is assumed counts as if it had been seen for so long."""


class DrainRate:
    """Of one queue, from the first that waits on."""

    __slots__ = ("_doubt", "_since", "_time", "_work")

    def __init__(self, now: Seconds) -> None:
        self._since = now
        self._doubt = _DOUBT
        self._time: Seconds = 0.0
        self._work: Seconds = 0.0

    def began(self, now: Seconds, work: Seconds) -> None:
        """Held work has been begun."""
        passed = max(0.0, now - self._since)
        kept = exp(-passed / _MEMORY)
        self._time = self._time * kept + passed
        self._work = self._work * kept + work
        self._doubt *= kept
        self._since = now

    def rate(self, now: Seconds, assumed: float) -> float:
        """`assumed`: the rate if nothing has been seen; more than 0. Nor is the result ever 0."""
        passed = max(0.0, now - self._since)
        kept = exp(-passed / _MEMORY)
        doubt = self._doubt * kept
        rate = (self._work * kept + assumed * doubt) / (self._time * kept + passed + doubt)
        return max(rate, assumed * _LEAST)

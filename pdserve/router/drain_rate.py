"""Measures how fast held work begins: seconds of predicted work per second.

A worker that also decodes begins less than one second of work per second; how much less is not
predicted but measured. Only time in which some request waited counts, and old samples fade within
seconds. Pure; `RouterCore` owns one for each hold queue.
"""

from __future__ import annotations

from math import exp
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pdserve.ids import Seconds

__all__ = ["DrainRate"]

_MEMORY: Final[Seconds] = 3.0
"""Seconds after which a sample counts for a third."""
_LEAST: Final = 0.05
"""Least share of the assumed rate: a few seconds without progress, as after a worker's death, say
little of the next minutes."""
_DOUBT: Final[Seconds] = 0.5
"""The assumed rate counts like this many seconds of samples."""


class DrainRate:
    """The rate of one hold queue, from its first waiting request on."""

    __slots__ = ("_doubt", "_since", "_time", "_work")

    def __init__(self, now: Seconds) -> None:
        self._since = now
        self._doubt = _DOUBT
        self._time: Seconds = 0.0
        self._work: Seconds = 0.0

    def began(self, now: Seconds, work: Seconds) -> None:
        """Note that held work has begun."""
        passed = max(0.0, now - self._since)
        kept = exp(-passed / _MEMORY)
        self._time = self._time * kept + passed
        self._work = self._work * kept + work
        self._doubt *= kept
        self._since = now

    def rate(self, now: Seconds, assumed: float) -> float:
        """The measured rate, never 0. `assumed`: the rate without samples; more than 0."""
        passed = max(0.0, now - self._since)
        kept = exp(-passed / _MEMORY)
        doubt = self._doubt * kept
        rate = (self._work * kept + assumed * doubt) / (self._time * kept + passed + doubt)
        return max(rate, assumed * _LEAST)

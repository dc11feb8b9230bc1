"""Detects a rank that has stopped while there is no step. Pure: readings and times are arguments.

An idle rank beats at least once in `beat_interval`. Only time in which rank 0 itself looked counts:
if the machine or the whole engine was stopped, the rank was stopped with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pdserve.ids import Seconds

__all__ = ["RankWatch", "beat_interval", "look_interval"]

_LOOKS: Final = 10
_BEATS: Final = 4
_LONGEST_LOOK: Final[Seconds] = 0.5
_LONGEST_BEAT: Final[Seconds] = 1.0
_LATE: Final = 2.0
"""Most intervals that one look may count; a later look was delayed by rank 0 itself."""


def look_interval(patience: Seconds) -> Seconds:
    """Seconds between two looks at a rank that may stand still for `patience`."""
    return min(_LONGEST_LOOK, patience / _LOOKS)


def beat_interval(patience: Seconds) -> Seconds:
    """Most seconds between two signs of life of an idle rank."""
    return min(_LONGEST_BEAT, patience / _BEATS)


class RankWatch:
    """Watches one rank."""

    def __init__(self, patience: Seconds) -> None:
        """`patience`: longest time without a sign of life."""
        self._patience = patience
        self._looked: Seconds | None = None
        self._ticks = -1
        self._age: Seconds = 0.0

    def look(self, ticks: int, now: Seconds) -> bool:
        """Take the number of signs of life so far, read at `now`. True if the rank stands still."""
        before, self._looked = self._looked, now
        if ticks != self._ticks or before is None:
            self._ticks, self._age = ticks, 0.0
            return False
        self._age += min(now - before, _LATE * look_interval(self._patience))
        return self._age >= self._patience

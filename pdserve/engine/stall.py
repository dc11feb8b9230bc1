"""Whether a core that could get on does not. Pure: looks at its page are arguments, times too.

A core owes progress while it is at work, once it wanted to be, and while commands wait that it has
not taken. Requests that wait for somebody else (KV from a peer, blocks that a peer may still write
to) let it sleep, and so are no reason. What counts is time in which the node looked: if it was
stopped itself, or the machine slept, the core may have been, too, and what it did is still unseen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pdserve.engine.progress import Look
    from pdserve.ids import Seconds

__all__ = ["StallWatch"]

_LOOKS_PER_TIMEOUT: Final = 10
_MAX_INTERVAL: Final[Seconds] = 0.5
_LATE: Final = 2.0
"""A look that comes later than so many intervals was delayed by us; no more than that counts."""


class StallWatch:
    """Of one life of a core."""

    def __init__(self, timeout: Seconds, now: Seconds) -> None:
        """`timeout` 0: nothing is ever held against it."""
        self.age: Seconds = 0.0
        """How long it has stood still although it owed progress, as of the last look."""
        self._timeout = timeout
        self._looked = now
        self._ticks = -1
        self._owes = False

    @property
    def interval(self) -> Seconds:
        """Between two looks, as they should be."""
        if not self._timeout:
            return _MAX_INTERVAL
        return min(_MAX_INTERVAL, self._timeout / _LOOKS_PER_TIMEOUT)

    def look(self, seen: Look, posted: int, now: Seconds) -> bool:
        """Look at `now`, when so many commands had been posted. True: it has stalled."""
        passed = min(now - self._looked, _LATE * self.interval)
        self._looked = now
        owes = seen.due <= now or seen.heard < posted
        begins = owes and not self._owes
        self._owes = owes
        if seen.ticks != self._ticks or begins or not owes:
            self._ticks, self.age = seen.ticks, 0.0
            return False
        self.age += passed
        return bool(self._timeout) and self.age >= self._timeout

"""Keeps what counters said over the last minute, so that rates need no second question. Pure.

A role notes a sample of its counters about once a second, in a timer that it has anyway, and seldom
while nothing happens. What is asked for is the difference between now and the newest sample that is
old enough. It costs hot paths nothing.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final, Generic, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.ids import Seconds

__all__ = ["WINDOWS", "Recent", "Since", "trimmed"]

WINDOWS: Final[tuple[Seconds, ...]] = (10.0, 60.0)
"""Lengths of the windows that reports have."""
_SPACING: Final[Seconds] = 0.9
"""Least time between two samples; timers of a second come a little early or late."""

S = TypeVar("S")


class Since(NamedTuple, Generic[S]):
    """A sample and its age."""

    seconds: Seconds
    sample: S


class Recent(Generic[S]):
    """Samples of the last minute, the oldest first."""

    def __init__(self, now: Seconds, first: S) -> None:
        self._samples: deque[tuple[Seconds, S]] = deque([(now, first)])

    def note(self, now: Seconds, sample: S) -> None:
        """Keeps a sample, unless the last one is too new."""
        last, same = self._samples[-1]
        if now - last < _SPACING:
            return
        # While nothing changes, one object stands for all samples.
        self._samples.append((now, same if sample == same else sample))
        while len(self._samples) > 1 and self._samples[1][0] <= now - WINDOWS[-1]:
            self._samples.popleft()

    def since(self, now: Seconds, seconds: Seconds) -> Since[S]:
        """The newest sample that is at least `seconds` old; the oldest if none is."""
        found, later = self._samples[0], None
        for each in reversed(self._samples):
            if each[0] <= now - seconds:
                found = each
                break
            later = each
        # Nothing happened between two equal samples: then the first one is true of all the time.
        same = later is not None and later[1] == found[1]
        age = max(0.0, now - found[0])
        return Since(min(age, seconds) if same else age, found[1])

    def __len__(self) -> int:
        return len(self._samples)


def trimmed(
    bounds: Sequence[float], now: Sequence[int], then: Sequence[int] = ()
) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """The bounds and counts of a histogram's growth, without the empty buckets at both ends.

    The bucket before the first one is kept, since its bound is where the first one begins. If there
    is one count more than bounds, it is what lies above the last bound.
    """
    grown = [b - a for a, b in zip(then, now, strict=True)] if then else list(now)
    filled = [index for index, count in enumerate(grown) if count > 0]
    if not filled:
        return (), ()
    low, high = max(0, filled[0] - 1), filled[-1] + 1
    return tuple(bounds[low:high]), tuple(max(0, count) for count in grown[low:high])

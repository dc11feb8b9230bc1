"""The two ordered collections of the scheduler: who waits, and whose time runs out when.

Both remove any entry in O(log n), so an abort costs the same wherever the entry stands.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sortedcontainers import SortedDict

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pdserve.engine.sequence import Sequence
    from pdserve.ids import Seconds

__all__ = ["Deadlines", "WaitingQueue"]


class WaitingQueue:
    """Sequences without blocks: by priority, then first come first served.

    A preempted sequence returns to the place its arrival gives it, ahead of later ones. Unbounded
    by itself: the scheduler bounds the submissions it takes.
    """

    def __init__(self) -> None:
        self._by_order: SortedDict[tuple[int, int, int], Sequence] = SortedDict()

    def __len__(self) -> int:
        return len(self._by_order)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._by_order.values())

    def push(self, sequence: Sequence) -> None:
        self._by_order[sequence.order] = sequence

    def first(self) -> Sequence:
        """Whose turn it is. Raises IndexError when nobody waits."""
        sequence: Sequence = self._by_order.peekitem(0)[1]
        return sequence

    def discard(self, sequence: Sequence) -> bool:
        """Remove; False if it was not there."""
        return self._by_order.pop(sequence.order, None) is not None


class Deadlines:
    """Points in time, each with a handle."""

    def __init__(self) -> None:
        self._sorted: SortedDict[tuple[Seconds, int], None] = SortedDict()

    def __len__(self) -> int:
        return len(self._sorted)

    def add(self, deadline: Seconds, handle: int) -> None:
        self._sorted[(deadline, handle)] = None

    def discard(self, deadline: Seconds, handle: int) -> None:
        self._sorted.pop((deadline, handle), None)

    def next(self) -> Seconds | None:
        """The earliest deadline, passed or not."""
        if not self._sorted:
            return None
        deadline: Seconds = self._sorted.peekitem(0)[0][0]
        return deadline

    def passed(self, now: Seconds) -> list[int]:
        """Handles whose deadline is `now` or earlier, earliest first. Removes nothing."""
        return [handle for _, handle in self._sorted.irange(maximum=(now, 1 << 63))]

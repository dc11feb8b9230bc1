"""Holds the waiting sequences in order of priority and arrival.

Any entry can be removed in O(log n), so that an abort is cheap wherever the entry stands.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sortedcontainers import SortedDict

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pdserve.engine_core.scheduler.sequence import Sequence

__all__ = ["WaitingQueue"]


class WaitingQueue:
    """Sequences without blocks, by priority and then by arrival.

    A preempted sequence returns ahead of those that arrived later. The queue itself is unbounded;
    the scheduler bounds the submissions it takes.
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
        """The next sequence. Raises IndexError if the queue is empty."""
        sequence: Sequence = self._by_order.peekitem(0)[1]
        return sequence

    def discard(self, sequence: Sequence) -> bool:
        """Remove a sequence; False if it was not in the queue."""
        return self._by_order.pop(sequence.order, None) is not None

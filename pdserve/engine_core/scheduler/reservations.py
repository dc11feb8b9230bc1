"""Counts KV blocks reserved for prompts that another worker prefills: numbers, not block ids.

A request holds its reservation until its sequence runs here. All reservations together stay under a
limit; a single one may exceed it, since it could never be made otherwise. A reservation without
allocated blocks makes local admissions leave that many blocks free.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.engine_core.scheduler.queues import WaitingQueue

if TYPE_CHECKING:
    from pdserve.engine_core.scheduler.sequence import Sequence

__all__ = ["BlockReservations"]


class BlockReservations:
    """Counts the reserved blocks of one scheduler. Pure."""

    def __init__(self, limit: int) -> None:
        """`limit` is the most blocks that may be reserved at once."""
        self.waiting = WaitingQueue()
        """Sequences without a reservation yet."""
        self.lacking: set[int] = set()
        """Handles whose attempt found no free blocks."""
        self.unfilled = 0
        """Blocks of all reservations."""
        self.unbound = 0
        """Blocks of the reservations for which none are allocated yet."""
        self._limit = limit
        self._budgets: dict[int, int] = {}
        self._bound: set[int] = set()

    def __len__(self) -> int:
        """Number of reservations."""
        return len(self._budgets)

    def first(self) -> Sequence | None:
        """The sequence that gets the next reservation; None if none waits."""
        return self.waiting.first() if len(self.waiting) else None

    def allows(self, blocks: int) -> bool:
        """Return whether a reservation of `blocks` stays within the limit."""
        return not self._budgets or self.unfilled + blocks <= self._limit

    def give(self, sequence: Sequence, blocks: int) -> None:
        """Make the reservation of a waiting sequence."""
        self.waiting.discard(sequence)
        self._budgets[sequence.handle] = blocks
        self.unfilled += blocks
        self.unbound += blocks

    def bind(self, handle: int) -> None:
        """Take note that the reservation's blocks are allocated."""
        self.lacking.discard(handle)
        self._bound.add(handle)
        self.unbound -= self._budgets[handle]

    def unbind(self, handle: int) -> None:
        """Take note that the reservation has no blocks (any more)."""
        self.lacking.discard(handle)
        if handle in self._bound:
            self._bound.remove(handle)
            self.unbound += self._budgets[handle]

    def end(self, stem: Sequence) -> None:
        """End a sequence's reservation, or its wait for one."""
        handle = stem.handle
        self.waiting.discard(stem)
        self.unbind(handle)
        blocks = self._budgets.pop(handle, 0)
        self.unfilled -= blocks
        self.unbound -= blocks

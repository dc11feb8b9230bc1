"""Room that is set aside for prompts which are prefilled elsewhere: numbers of blocks, not blocks.

Who is admitted has a budget until its sequence goes on here. Budgets of all that are not filled
stay under a limit, but one alone may exceed it, else it could never come. As long as a budget has
no blocks, those who are admitted to be computed here leave that many over.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.engine.queues import WaitingQueue

if TYPE_CHECKING:
    from pdserve.engine.sequence import Sequence

__all__ = ["Promises"]


class Promises:
    """Pure books; the scheduler owns them."""

    def __init__(self, limit: int) -> None:
        """`limit` in blocks."""
        self.waiting = WaitingQueue()
        """Who has no budget yet."""
        self.lacking: set[int] = set()
        """Handles whose attempt found no blocks."""
        self.unfilled = 0
        """All budgets."""
        self.unbound = 0
        """Of those, what has no blocks."""
        self._limit = limit
        self._budgets: dict[int, int] = {}
        self._bound: set[int] = set()

    def __len__(self) -> int:
        """How many have a budget."""
        return len(self._budgets)

    def first(self) -> Sequence | None:
        """Who is to get a budget next."""
        return self.waiting.first() if len(self.waiting) else None

    def allows(self, blocks: int) -> bool:
        """Whether one more budget stays within the limit."""
        return not self._budgets or self.unfilled + blocks <= self._limit

    def give(self, sequence: Sequence, blocks: int) -> None:
        """Its turn has come."""
        self.waiting.discard(sequence)
        self._budgets[sequence.handle] = blocks
        self.unfilled += blocks
        self.unbound += blocks

    def bind(self, handle: int) -> None:
        """It has its blocks."""
        self.lacking.discard(handle)
        self._bound.add(handle)
        self.unbound -= self._budgets[handle]

    def unbind(self, handle: int) -> None:
        """It has none (any more)."""
        self.lacking.discard(handle)
        if handle in self._bound:
            self._bound.remove(handle)
            self.unbound += self._budgets[handle]

    def end(self, stem: Sequence) -> None:
        """It needs none any more."""
        handle = stem.handle
        self.waiting.discard(stem)
        self.unbind(handle)
        blocks = self._budgets.pop(handle, 0)
        self.unfilled -= blocks
        self.unbound -= blocks

"""Assigns tree slots (small integers) to workers and maps matches back to nodes.

A worker has several slots at a time: its events, a snapshot still loading, recent routes. Only
shown slots count in answers; where a worker has several, the longest run counts. The index owns one
of these for each tree.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pdserve.errors import Overloaded

if TYPE_CHECKING:
    from pdserve.ids import NodeId

__all__ = ["WorkerSlots"]

_MOST: Final = 1 << 16


class WorkerSlots:
    """A pool of slots; the one returned last is assigned first."""

    def __init__(self) -> None:
        self.shown: dict[int, NodeId] = {}
        """Slots that count, any number per worker."""
        self._free: list[int] = []
        self._next = 0

    def __len__(self) -> int:
        """Number of slots in use."""
        return self._next - len(self._free)

    def take(self, node: NodeId | None = None) -> int:
        """Assigns a free slot, shown for `node` if given. Raises `Overloaded` at the tree's bound,
        about 16,000 workers.
        """
        if self._free:
            slot = self._free.pop()
        elif self._next < _MOST:
            slot = self._next
            self._next += 1
        else:
            raise Overloaded("the index has no room for one more worker", retry_after=1.0)
        if node is not None:
            self.shown[slot] = node
        return slot

    def show(self, slot: int, node: NodeId) -> None:
        """Makes a slot count for `node`."""
        self.shown[slot] = node

    def hide(self, slot: int) -> None:
        """Makes a slot no longer count."""
        self.shown.pop(slot, None)

    def give(self, slot: int) -> None:
        """Returns a slot; the tree must hold nothing under it."""
        self.hide(slot)
        self._free.append(slot)

    def node(self, slot: int) -> NodeId | None:
        """The node for which a slot counts."""
        return self.shown.get(slot)

"""Small numbers that stand for workers in a tree, and whose answers they give.

A worker has several at a time: what its events say, a snapshot that is still coming in, what was
sent to it a moment ago. Only slots that are shown count in answers; where a worker has several,
the longest run counts. The index owns one of these for each tree.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pdserve.errors import Overloaded

if TYPE_CHECKING:
    from pdserve.ids import NodeId

__all__ = ["Slots"]

_MOST: Final = 1 << 16


class Slots:
    """Handed out, the one given back last first."""

    def __init__(self) -> None:
        self.shown: dict[int, NodeId] = {}
        """Those that count, any number for each worker."""
        self._free: list[int] = []
        self._next = 0

    def __len__(self) -> int:
        """In use."""
        return self._next - len(self._free)

    def take(self, node: NodeId | None = None) -> int:
        """One that is free; a further one of `node`, if it is named. Raises `Overloaded` at the
        tree's bound, which is some 16,000 workers."""
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
        """From now on it counts for `node`."""
        self.shown[slot] = node

    def hide(self, slot: int) -> None:
        """It no longer counts."""
        self.shown.pop(slot, None)

    def give(self, slot: int) -> None:
        """Nothing in the tree bears it any more."""
        self.hide(slot)
        self._free.append(slot)

    def node(self, slot: int) -> NodeId | None:
        """Whom it counts for."""
        return self.shown.get(slot)

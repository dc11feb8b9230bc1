"""Small numbers that stand for workers in a tree, and whose answers they give.

A worker has several at a time: what its events say, a snapshot that is still coming in, what was
sent to it a moment ago. Only slots that are shown count in answers; where a worker has several,
the longest run counts. The index owns one of these for each tree.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pdserve.errors import Overloaded

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdserve.ids import NodeId

__all__ = ["Slots"]

_MOST: Final = 1 << 16


class Slots:
    """Handed out, lowest numbers first used again."""

    def __init__(self) -> None:
        self.shown: dict[int, NodeId] = {}
        """Slots whose answers count, and for whom."""
        self._free: list[int] = []
        self._next = 0

    def __len__(self) -> int:
        """In use."""
        return self._next - len(self._free)

    def take(self, node: NodeId | None = None) -> int:
        """One that is free, shown for `node`. Raises `Overloaded` at the tree's bound, which is
        some 16,000 workers."""
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

    def hide(self, slot: int) -> None:
        """It no longer counts."""
        self.shown.pop(slot, None)

    def give(self, slot: int) -> None:
        """Nothing in the tree bears it any more."""
        self.hide(slot)
        self._free.append(slot)

    def by_node(self, found: Mapping[int, int]) -> dict[NodeId, int]:
        """What a tree has found, by node: the longest of its runs."""
        shown = self.shown
        best: dict[NodeId, int] = {}
        for slot, depth in found.items():
            node = shown.get(slot)
            if node is not None and depth > best.get(node, 0):
                best[node] = depth
        return best

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
    """Handed out, the one given back last first."""

    def __init__(self) -> None:
        self.main: dict[int, NodeId] = {}
        """The one slot of a worker that holds most; apart from the others because a question looks
        at each of a thousand."""
        self.more: dict[int, NodeId] = {}
        """Further slots that count: any number for each worker."""
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
            self.more[slot] = node
        return slot

    def show(self, slot: int, node: NodeId) -> None:
        """From now on it is the main one of `node`; the one before has to be given back."""
        self.main[slot] = node

    def hide(self, slot: int) -> None:
        """It no longer counts."""
        self.main.pop(slot, None)
        self.more.pop(slot, None)

    def give(self, slot: int) -> None:
        """Nothing in the tree bears it any more."""
        self.hide(slot)
        self._free.append(slot)

    def node(self, slot: int) -> NodeId | None:
        """Whom it counts for."""
        return self.main.get(slot) or self.more.get(slot)

    def by_node(self, found: Mapping[int, int]) -> dict[NodeId, int]:
        """What a tree has found, by node: the longest of its runs."""
        main, more = self.main, self.more
        best = {main[slot]: depth for slot, depth in found.items() if slot in main}
        if more and len(best) < len(found):
            for slot in more.keys() & found.keys():
                node, depth = more[slot], found[slot]
                if depth > best.get(node, 0):
                    best[node] = depth
        return best

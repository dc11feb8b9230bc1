"""Remembers which lives of nodes have ended, so that no fetch asks them. Pure."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

__all__ = ["MOST_NODES", "EndedLives"]

MOST_NODES: Final = 256
"""Nodes that are remembered; the one whose end is longest ago is forgotten."""


class EndedLives:
    """The last ended life of each node.

    A router may name a worker for some time after its end. A path to it would never be closed,
    since its end is not told again.
    """

    def __init__(self) -> None:
        self._epochs: OrderedDict[str, int] = OrderedDict()

    def add(self, node: str, epoch: int) -> None:
        """This life of a node has ended, and all before it."""
        self._epochs[node] = max(epoch, self._epochs.pop(node, epoch))
        if len(self._epochs) > MOST_NODES:
            self._epochs.popitem(last=False)

    def has(self, node: str, epoch: int) -> bool:
        """Return whether this life is known to have ended."""
        return epoch <= self._epochs.get(node, -1)

"""Chooses which members each node probes: K rings, computed alike on all nodes from the members
alone.

Each ring puts all members in another pseudo-random order, and a member watches its successor on
every ring. So each has K observers spread over the cluster, and news travels over these links in a
logarithm of steps. While there are few members, every member watches all others. For a moment after
a change views differ, and a member has K + 1 or K - 1 observers.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from functools import lru_cache
from hashlib import blake2b
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdserve.ids import NodeId

__all__ = ["ProbeRings"]


@lru_cache(maxsize=1 << 10)
def _places(node: NodeId) -> tuple[tuple[bytes, NodeId], ...]:
    """A member's position on each of up to eight rings; the name breaks ties. The cache holds about
    the members of a large cluster, one KiB each.
    """
    digest = blake2b(node.encode(), digest_size=64, person=b"pdserve-rings").digest()
    return tuple((digest[i : i + 8], node) for i in range(0, 64, 8))


class ProbeRings:
    """The rings of one view."""

    def __init__(self, rings: int, mesh_limit: int) -> None:
        self._rings: list[list[tuple[bytes, NodeId]]] = [[] for _ in range(rings)]
        self._mesh_limit = mesh_limit
        self._members: set[NodeId] = set()

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, node: NodeId) -> bool:
        return node in self._members

    def add(self, node: NodeId) -> None:
        """Adds a member; idempotent."""
        if node in self._members:
            return
        self._members.add(node)
        for ring, place in zip(self._rings, _places(node), strict=False):
            insort(ring, place)

    def remove(self, node: NodeId) -> None:
        """Removes a member; idempotent."""
        if node not in self._members:
            return
        self._members.remove(node)
        for ring, place in zip(self._rings, _places(node), strict=False):
            del ring[bisect_left(ring, place)]

    def targets(self, node: NodeId) -> tuple[NodeId, ...]:
        """The members that `node` watches, in an order that depends on the members only."""
        return self._neighbours(node, 1)

    def observers(self, node: NodeId) -> tuple[NodeId, ...]:
        """The members that watch `node`."""
        return self._neighbours(node, -1)

    def _neighbours(self, node: NodeId, step: int) -> tuple[NodeId, ...]:
        if len(self._members) <= self._mesh_limit:
            return tuple(other for _, other in self._rings[0] if other != node)
        found: dict[NodeId, None] = {}
        for ring, place in zip(self._rings, _places(node), strict=False):
            # For a node outside the view, this is the position that it would have.
            here = bisect_left(ring, place)
            after = step if node in self._members or step < 0 else 0
            found[ring[(here + after) % len(ring)][1]] = None
        return tuple(found)

"""Finds the blocks that belong to a tenant, among all that a worker has on its tiers. Pure.

A block's hash tells nobody whose it is. But a chain begins with a root hash, which tells it, and
blocks on lower tiers carry a mark of their owner. Blocks may be on different tiers, and some have
lost their mark or their ancestors. So all blocks that hang together count as one owner's if one of
them does.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from pdserve.kv.tiers.block import TierBlock

__all__ = ["owned"]


def owned(blocks: Iterable[TierBlock], names: Collection[bytes]) -> set[bytes]:
    """Hashes of the blocks whose owner's mark or chain's root is one of `names`, and of all that
    hang together with them. A block may be given once for each tier that has it. O(blocks)."""
    parents: dict[bytes, bytes] = {}
    marked: set[bytes] = set()
    for block in blocks:
        parents[block.hash] = block.parent
        if block.root in names:
            marked.add(block.hash)
    tops: dict[bytes, bytes] = {}
    chains: defaultdict[bytes, list[bytes]] = defaultdict(list)
    for block_hash in parents:
        chains[_top(block_hash, parents, tops)].append(block_hash)
    found: set[bytes] = set()
    for top, members in chains.items():
        if top in names or not marked.isdisjoint(members):
            found.update(members)
    return found


def _top(block_hash: bytes, parents: dict[bytes, bytes], tops: dict[bytes, bytes]) -> bytes:
    """The first hash above a block that is no block itself; `tops` has what is known already."""
    path = []
    at = block_hash
    while at in parents and at not in tops:
        path.append(at)
        at = parents[at]
    top = tops.get(at, at)
    for each in path:
        tops[each] = top
    return top

"""Finds hash chains in a pool: the one of a block, and those that are worth most.

A block may be held only with those before it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.messages.kv_pull import MAX_CHAINS, OfferedChain

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.engine_core.kv_fetch.ports import ServedPool
    from pdserve.kv.block_pool import BlockPool
    from pdserve.kv.tiers.cleaner import BlockUse

__all__ = ["blocks_up_to", "worth_most"]


def blocks_up_to(pool: ServedPool, block_hash: bytes) -> list[int]:
    """The block with this hash and those before it in its chain, as far as the pool has them, in
    order. Takes no reference."""
    found: list[int] = []
    while matched := pool.match((block_hash,)):
        found.append(matched[0])
        block_hash = pool.parent(matched[0])
    return found[::-1]


def worth_most(
    pool: BlockPool, most: int, use: Callable[[bytes], BlockUse]
) -> tuple[OfferedChain, ...]:
    """Chains of cached blocks, the last used one first: at most `most` blocks and `MAX_CHAINS`
    chains. `use` tells how a block was used; private ones are left out. O(cached blocks).

    In order of use a block comes after all that continue it. So in the opposite order those before
    a chain's first block are in an earlier chain, or in use.
    """
    chains: list[tuple[bytes, list[bytes]]] = []
    ends: dict[bytes, int] = {}
    """Index of the chain that ends with a hash."""
    for block, block_hash in pool.oldest(pool.counts().cached)[: -most - 1 : -1]:
        if use(block_hash).private:
            continue
        parent = pool.parent(block)
        index = ends.pop(parent, None)
        if index is None:
            if len(chains) == MAX_CHAINS:
                break
            index = len(chains)
            chains.append((parent, []))
        chains[index][1].append(block_hash)
        ends[block_hash] = index
    return tuple(_offered(pool, parent, hashes, use(hashes[-1])) for parent, hashes in chains)


def _offered(pool: BlockPool, parent: bytes, hashes: list[bytes], use: BlockUse) -> OfferedChain:
    first = len(blocks_up_to(pool, parent))
    return OfferedChain(first, parent, b"".join(hashes), use.root, use.turns)

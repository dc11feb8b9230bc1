"""Finds the blocks of a hash chain in a pool; a block may be held only with those before it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdserve.kv.block_pool import BlockPool

__all__ = ["blocks_up_to"]


def blocks_up_to(pool: BlockPool, block_hash: bytes) -> list[int]:
    """The block with this hash and those before it in its chain, as far as the pool has them, in
    order. Takes no reference."""
    found: list[int] = []
    while matched := pool.match((block_hash,)):
        found.append(matched[0])
        block_hash = pool.parent(matched[0])
    return found[::-1]

"""What tests ask a block pool that nothing else does."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdserve.kv.block_pool import BlockPool


def hash_of(pool: BlockPool, block: int) -> bytes | None:
    """The block's hash, if it has been committed."""
    return pool._hash[block]

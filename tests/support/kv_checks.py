"""What must hold of the KV of a scripted core at every moment."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.blocks.hashing import block_hashes, prompt_root
from pdserve.testing.scripted import reference_entries

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tests.support.disagg_pair import PairedCore

__all__ = ["check_contents", "check_reads", "contents_of", "evict_all", "evict_some"]


def contents_of(prompt: Sequence[int], block_size: int, secret: bytes) -> dict[bytes, bytes]:
    """The right bytes of each full block of a prompt, by its hash."""
    root = prompt_root(secret, "scripted", "")
    names = block_hashes(list(prompt), block_size, parent=root, secret=secret)
    entries = reference_entries(prompt)
    return {
        name: b"".join(entries[at * block_size : (at + 1) * block_size])
        for at, name in enumerate(names)
    }


def check_contents(end: PairedCore, contents: Mapping[bytes, bytes]) -> None:
    """A block that can be found is what it is called."""
    view, size = end.mover.region.view, end.engine.capabilities.block_bytes
    assert view is not None
    for name, block in end.core.pool._by_hash.items():
        if name in contents:
            assert view[block * size : (block + 1) * size] == contents[name], block


def check_reads(end: PairedCore) -> None:
    """What is being sent is held."""
    for delivery in end.mover._deliveries:
        for block in delivery.part.blocks:
            assert end.core.pool.references(block), f"block {block} is sent and nobody holds it"


def evict_some(end: PairedCore, most: int) -> None:
    """Evict up to so many cached blocks, those first that eviction takes first."""
    pool = end.core.pool
    counts = pool.counts()
    blocks = pool.reserve(counts.free + min(most, counts.cached))
    assert blocks is not None
    pool.release(blocks)


def evict_all(end: PairedCore) -> None:
    """Evict every block that nothing holds."""
    evict_some(end, end.core.pool.num_blocks)

"""Computes CRC-32 checksums of KV blocks, and selects the blocks of an attempt that are checked.

Sender and receiver compute it over the valid tokens only: in a partly filled block, the first
tokens of each run (layer, k|v, head). The bytes after them may differ.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Final, Literal

from pdserve.transfer.copy_plan import block_bytes, heads_of
from pdserve.transfer.copying import crc32

if TYPE_CHECKING:
    from pdserve.messages.transfer import RankKvLayout
    from pdserve.transfer.base import Region

__all__ = ["SAMPLE_BLOCKS", "checked_places", "checksum_of"]

SAMPLE_BLOCKS: Final = 4
"""Most blocks of an attempt that are checked with `verify` "sample"."""


def checked_places(
    verify: Literal["all", "sample", "off"], transfer: str, attempt: int, blocks: int
) -> frozenset[int]:
    """Indices of the attempt's blocks that get a checksum; a sample differs in each attempt."""
    if verify == "off":
        return frozenset()
    if verify == "all" or blocks <= SAMPLE_BLOCKS:
        return frozenset(range(blocks))
    digest = blake2b(f"{transfer} {attempt}".encode(), digest_size=4 * SAMPLE_BLOCKS).digest()
    words = (digest[at : at + 4] for at in range(0, len(digest), 4))
    return frozenset(int.from_bytes(word, "little") % blocks for word in words)


def checksum_of(region: Region, block: int, tokens: int) -> int:
    """CRC-32 of the first `tokens` tokens of a block. The region must have a view (host memory)."""
    assert region.view is not None
    layout = region.layout
    size = block_bytes(layout)
    whole = region.view[block * size : (block + 1) * size]
    if tokens == layout.tokens:
        return crc32(whole)
    return _of_runs(whole, layout, tokens)


def _of_runs(block: memoryview, layout: RankKvLayout, tokens: int) -> int:
    token = layout.dim * layout.itemsize
    total = 0
    for run in range(2 * layout.layers * len(heads_of(layout))):
        begin = run * layout.tokens * token
        total = crc32(block[begin : begin + tokens * token], total)
    return total

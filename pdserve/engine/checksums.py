"""CRC-32 of a block's valid bytes, and which blocks of an attempt are checked.

Sender and receiver compute it over what counts: of a partly filled block, in each of its runs
(layer, k|v, head), the first tokens. What a peer's memory holds after them is nobody's business.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Final, Literal

from pdserve.transfer.copying import crc32
from pdserve.transfer.plan import block_bytes, heads_of

if TYPE_CHECKING:
    from pdserve.messages.transfer import KvLayout
    from pdserve.transfer.base import Region

__all__ = ["SAMPLE", "checked_places", "checksum_of"]

SAMPLE: Final = 4
"""Blocks of an attempt, at most, when a sample is checked."""


def checked_places(
    verify: Literal["all", "sample", "off"], transfer: str, attempt: int, blocks: int
) -> frozenset[int]:
    """Which of so many blocks get a checksum: other ones in each attempt."""
    if verify == "off":
        return frozenset()
    if verify == "all" or blocks <= SAMPLE:
        return frozenset(range(blocks))
    digest = blake2b(f"{transfer} {attempt}".encode(), digest_size=4 * SAMPLE).digest()
    words = (digest[at : at + 4] for at in range(0, len(digest), 4))
    return frozenset(int.from_bytes(word, "little") % blocks for word in words)


def checksum_of(region: Region, block: int, tokens: int) -> int:
    """Of the first `tokens` tokens of a block; the region has a view."""
    assert region.view is not None
    layout = region.layout
    size = block_bytes(layout)
    whole = region.view[block * size : (block + 1) * size]
    if tokens == layout.tokens:
        return crc32(whole)
    return _of_runs(whole, layout, tokens)


def _of_runs(block: memoryview, layout: KvLayout, tokens: int) -> int:
    token = layout.dim * layout.itemsize
    total = 0
    for run in range(2 * layout.layers * len(heads_of(layout))):
        begin = run * layout.tokens * token
        total = crc32(block[begin : begin + tokens * token], total)
    return total

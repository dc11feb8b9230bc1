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
    from collections.abc import Sequence

    from pdserve.messages.transfer import RankKvLayout
    from pdserve.transfer.base import Region

__all__ = ["SAMPLE_BLOCKS", "checked_places", "checksum_of"]

_COPIES_DIFFER: Final = -1
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
    """CRC-32 of the first `tokens` tokens of a block. The region must have a view (host memory).

    It does not depend on how the heads are divided among ranks. If several ranks hold the same
    heads and their bytes differ, it is -1, which no CRC-32 is.
    """
    if region.ranks:
        return _of_ranks(region.ranks, block, tokens)
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


def _of_ranks(ranks: Sequence[Region], block: int, tokens: int) -> int:
    layout = ranks[0].layout
    copies = max(1, layout.tp // layout.heads)
    # Neighbouring ranks hold the same head, so each of these has all heads once, in order.
    found = {_of_heads(ranks[copy::copies], block, tokens) for copy in range(copies)}
    return found.pop() if len(found) == 1 else _COPIES_DIFFER


def _of_heads(ranks: Sequence[Region], block: int, tokens: int) -> int:
    """The checksum over ranks that hold all heads together, in the order of one rank's block."""
    total = 0
    for row in range(2 * ranks[0].layout.layers):
        for region in ranks:
            layout, view = region.layout, region.view
            assert view is not None
            head = layout.tokens * layout.dim * layout.itemsize
            used = tokens * layout.dim * layout.itemsize
            held = len(heads_of(layout))
            begin = block * block_bytes(layout) + row * held * head
            for at in range(begin, begin + held * head, head):
                total = crc32(view[at : at + used], total)
    return total

"""Computes the expected bytes of KV blocks cell by cell, independent of `transfer.copy_plan`.

Every cell of (block hash, layer, k|v, head, token) has its own bytes; a rank's block is its cells
in the order of the layout. A block hash stands for a block's content, the same on all ranks. Bytes
without an owner have a fixed pattern.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Final

from pdserve.messages.transfer import RankKvLayout

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pdserve.ids import Bytes

__all__ = ["POISON", "expected_block", "expected_pool", "held_heads", "layouts", "pattern"]

POISON: Final = 0xA5
"""Every byte of a block without an owner."""


def layouts(
    heads: int,
    tp: int,
    *,
    layers: int = 3,
    tokens: int = 4,
    dim: int = 4,
    itemsize: int = 2,
    first_layer: int = 0,
) -> tuple[RankKvLayout, ...]:
    """The layouts of all ranks of one small model."""
    return tuple(
        RankKvLayout(
            content="oracle",
            layers=layers,
            first_layer=first_layer,
            heads=heads,
            tp=tp,
            rank=rank,
            tokens=tokens,
            dim=dim,
            itemsize=itemsize,
        )
        for rank in range(tp)
    )


def held_heads(layout: RankKvLayout) -> list[int]:
    """The heads that this rank computes, by definition."""
    heads, ranks = layout.heads, layout.tp
    if ranks <= heads:
        return [head for head in range(heads) if head * ranks // heads == layout.rank]
    return [layout.rank * heads // ranks]


def _cell(name: int, layer: int, kv: int, head: int, token: int, size: Bytes) -> bytes:
    number = (((name * 1009 + layer) * 2 + kv) * 1009 + head) * 1009 + token + 1
    mixed = number * 0x9E3779B97F4A7C15F39CC0605CEDC835 & (1 << 128) - 1
    return (mixed.to_bytes(16, "little") * (size // 16 + 1))[:size]


@lru_cache(maxsize=8192)
def expected_block(layout: RankKvLayout, name: int) -> bytes:
    """The bytes of the block with this content on this rank."""
    size = layout.dim * layout.itemsize
    return b"".join(
        _cell(name, layer, kv, head, token, size)
        for layer in range(layout.first_layer, layout.first_layer + layout.layers)
        for kv in (0, 1)
        for head in held_heads(layout)
        for token in range(layout.tokens)
    )


def pattern(size: Bytes) -> bytes:
    """The pattern of memory that must not be written, of this many bytes."""
    return bytes([POISON]) * size


def expected_pool(
    layout: RankKvLayout, blocks: int, names: Mapping[int, int], layers: Iterable[int]
) -> bytes:
    """A rank's whole pool, poisoned before, after `layers` of the blocks in `names` (block to
    content) have arrived and nothing else was written."""
    size = len(expected_block(layout, 0))
    row = size // layout.layers
    pool = bytearray(pattern(blocks * size))
    for block, name in names.items():
        whole = expected_block(layout, name)
        for layer in set(layers):
            at = (layer - layout.first_layer) * row
            if 0 <= at < size:
                pool[block * size + at : block * size + at + row] = whole[at : at + row]
    return bytes(pool)

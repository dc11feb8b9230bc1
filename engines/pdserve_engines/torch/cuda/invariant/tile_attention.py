"""Computes attention over the KV pool: prompts and decoding sequences by one kernel, in one order.

A program takes a tile of queries and one KV head with all its query heads. It goes through the
sequence's keys in tiles that begin at multiples of a constant, from position 0 or the window's
first tile on, and reads them where they lie, through the block table. A tile in which a query sees
nothing leaves its sums as they are. So a query's result depends on its own keys alone. Long
sequences are not divided among programs: a single one uses a small part of the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import triton
import triton.language as tl

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from pdserve_engines.torch.cuda.decode_attention import ScoreRules

__all__ = ["TileInputs", "attend_tiles", "queries_of"]

_LEAST: Final = 16
"""Least size of a matrix product on tensor cores."""


@dataclass(frozen=True, slots=True)
class TileInputs:
    """A step's `QueryTiles` on the device, all in int32. A tile of no keys gets zeros."""

    rows: torch.Tensor
    ends: torch.Tensor
    counts: torch.Tensor
    tables: torch.Tensor
    """Block ids, in token order."""
    table_offsets: torch.Tensor


def queries_of(heads: int, kv_heads: int, itemsize: int) -> int:
    """Most queries of a tile, for numbers of so many bytes."""
    return _rows(heads // kv_heads, itemsize) // _members(heads // kv_heads)


def attend_tiles(
    qkv: torch.Tensor,
    out: torch.Tensor,
    pool: torch.Tensor,
    inputs: TileInputs,
    rules: ScoreRules,
) -> None:
    """Write the attention of every tile's queries to their rows of `out`.

    Tensors as in `decode_attention.attend_decodes`; the pool has the tiles' own tokens, too. What
    free places of a block hold, and what lies before a window, is never used.
    """
    _, _, kv_heads, block_size, head_dim = pool.shape
    heads = out.shape[1] // head_dim
    assert qkv.is_contiguous()
    assert out.is_contiguous()
    assert pool.stride()[3:] == (head_dim, 1)
    if not len(inputs.rows):
        return
    _tile_kernel[(len(inputs.rows) * kv_heads,)](
        qkv,
        out,
        pool,
        inputs.rows,
        inputs.ends,
        inputs.counts,
        inputs.tables,
        inputs.table_offsets,
        pool.stride(0),
        pool.stride(1),
        pool.stride(2),
        rules.scale * rules.kv_scales[0],
        rules.cap or 0.0,
        rules.kv_scales[1],
        (1 << 30) if rules.window is None else rules.window,
        HEADS=heads,
        KV_HEADS=kv_heads,
        GROUP=heads // kv_heads,
        DIM=head_dim,
        BLOCK_SIZE=block_size,
        CAPS=rules.cap is not None,
        **_sizes(heads // kv_heads, head_dim, qkv.itemsize, pool.itemsize),
    )


def _sizes(group: int, head_dim: int, itemsize: int, kv_itemsize: int) -> Mapping[str, int]:
    """Sizes of a program, for numbers of so many bytes in queries and in the pool. They depend on
    the model alone. Keys and values of `num_stages` tiles lie in shared memory, of which the
    smallest GPU gives a program 99 KiB; larger ones would not leave enough registers, either."""
    dims = max(_LEAST, int(triton.next_power_of_2(head_dim)))
    return {
        "MEMBERS": _members(group),
        "ROWS": _rows(group, itemsize),
        "DIMS": dims,
        "TILE": max(_LEAST, min(64, (8 << 10) // (dims * itemsize))),
        "num_warps": 4 if dims * itemsize < 512 else 8,
        # As in `decode_attention`.
        "num_stages": 1 if kv_itemsize < itemsize == 4 else 2,
    }


def _members(group: int) -> int:
    """Rows of a query: a power of two."""
    return int(triton.next_power_of_2(group))


def _rows(group: int, itemsize: int) -> int:
    # Without tensor cores every thread multiplies by itself, and has fewer registers left.
    return max(_LEAST if itemsize == 4 else 64, _members(group))


@triton.jit
def _tile_kernel(
    qkv: tl.tensor,
    out: tl.tensor,
    pool: tl.tensor,
    rows: tl.tensor,
    ends: tl.tensor,
    counts: tl.tensor,
    tables: tl.tensor,
    table_offsets: tl.tensor,
    block_stride: tl.tensor,
    kv_stride: tl.tensor,
    head_stride: tl.tensor,
    score_scale: tl.tensor,
    cap: tl.tensor,
    value_scale: tl.tensor,
    window: tl.tensor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CAPS: tl.constexpr,
    MEMBERS: tl.constexpr,
    ROWS: tl.constexpr,
    DIMS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    tile = tl.program_id(0) // KV_HEADS
    kv_head = tl.program_id(0) % KV_HEADS
    end = tl.load(ends + tile)
    count = tl.load(counts + tile)
    table = tables + tl.load(table_offsets + tile)
    query = tl.arange(0, ROWS) // MEMBERS
    member = tl.arange(0, ROWS) % MEMBERS
    dim = tl.arange(0, DIMS)
    keys = pool + kv_head * head_stride
    values = keys + kv_stride

    used = ((query < count) & (member < GROUP))[:, None] & (dim < DIM)[None, :]
    row = tl.load(rows + tile).to(tl.int64) + query
    head = kv_head * GROUP + member
    source = row * ((HEADS + 2 * KV_HEADS) * DIM) + head * DIM
    queries = tl.load(qkv + source[:, None] + dim[None, :], mask=used, other=0.0)
    last = end - count + query
    lowest = tl.maximum(last - window + 1, 0)

    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, DIMS], tl.float32)
    # Blocks before the first query's window may have other owners by now.
    oldest = tl.maximum(end - count - window + 1, 0)
    for first in range(oldest // TILE * TILE, end, TILE):
        token = first + tl.arange(0, TILE)
        known = (token < end) & (token >= oldest)
        block = tl.load(table + token // BLOCK_SIZE, mask=known, other=0).to(tl.int64)
        place = block * block_stride + token % BLOCK_SIZE * DIM
        # Free places may hold anything: what is masked is zero, and not multiplied by zero.
        key = tl.load(
            keys + place[None, :] + dim[:, None],
            mask=known[None, :] & (dim < DIM)[:, None],
            other=0.0,
        ).to(queries.dtype)
        scores = tl.dot(queries, key, input_precision="ieee") * score_scale
        if CAPS:
            # tanh(z) is 2 * sigmoid(2 z) - 1.
            scores = cap * (2.0 * tl.sigmoid(2.0 * scores / cap) - 1.0)
        seen = (token[None, :] <= last[:, None]) & (token[None, :] >= lowest[:, None])
        scores = tl.where(seen, scores * 1.4426950408889634, float("-inf"))
        found = tl.maximum(best, tl.max(scores, axis=1))
        # Before a query's first key all scores are infinite: they then weigh nothing.
        base = tl.where(found == float("-inf"), 0.0, found)
        shrink = tl.exp2(best - base)
        weight = tl.exp2(scores - base[:, None])
        total = total * shrink + tl.sum(weight, axis=1)
        value = tl.load(
            values + place[:, None] + dim[None, :],
            mask=known[:, None] & (dim < DIM)[None, :],
            other=0.0,
        ).to(queries.dtype)
        mixed = mixed * shrink[:, None]
        mixed = tl.dot(weight.to(queries.dtype), value, mixed, input_precision="ieee")
        best = found

    share = tl.where(total > 0.0, value_scale / total, 0.0)
    target = out + (row * (HEADS * DIM) + head * DIM)[:, None] + dim[None, :]
    tl.store(target, (mixed * share[:, None]).to(out.dtype.element_ty), mask=used)

"""Computes the attention of decoding sequences over the KV pool, several programs per sequence.

A program takes one segment of one sequence's keys and one KV head with all its query heads. It
reads keys and values where they lie, through the sequence's block table. Segments of the same
sequence are merged by a second kernel, in their order. Programs of neighbouring heads run next to
each other: their blocks are in the same pages of memory. `decode_plan` lists the work.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import torch
import triton
import triton.language as tl

from pdserve_engines.torch.cuda.decode_plan import SEGMENT

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["DecodeInputs", "ScoreRules", "attend_decodes"]

_LEAST: Final = 16
"""Least size of a matrix product on tensor cores: smaller groups of query heads are padded."""
_MERGED: Final = 16
"""Segments that are merged at a time."""


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """A step's decoding sequences on the device, all in int32. `n` sequences, `N` work items."""

    rows: torch.Tensor
    """`[n]` the sequences' rows in the batch."""
    lengths: torch.Tensor
    """`[n]` keys of each, the own token's included."""
    tables: torch.Tensor
    """Block ids, in token order."""
    table_offsets: torch.Tensor
    """`[n]` where each sequence's block ids begin in `tables`."""
    items: torch.Tensor
    """`[N, 2]` as in `decode_plan.WorkItems`."""
    first_items: torch.Tensor
    """`[n + 1]`."""
    count: torch.Tensor
    """`[1]` how many of `items` there are; what follows them is not read."""
    splits: bool = field(kw_only=True)
    """Whether items must be merged."""
    programs: int | None = field(default=None, kw_only=True)
    """Most programs for a KV head, each of which takes several items if there are more; None: one
    for each of `N`."""


@dataclass(frozen=True, slots=True)
class ScoreRules:
    """What is done to scores."""

    scale: float
    """Factor of the products of queries and keys."""
    window: int | None = None
    """Keys that a query sees, its own included; None: all."""
    cap: float | None = None
    """Bound that scores approach, by a tanh; None: none."""
    kv_scales: tuple[float, float] = (1.0, 1.0)
    """What stored keys and values are multiplied by; other than 1 only for an FP8 pool."""


def attend_decodes(
    qkv: torch.Tensor,
    out: torch.Tensor,
    pool: torch.Tensor,
    inputs: DecodeInputs,
    rules: ScoreRules,
) -> None:
    """Write the attention of every decoding sequence to its row of `out`.

    `qkv`: `[T, (heads + 2 * kv_heads) * head_dim]`, of which the queries are read. `out`: `[T,
    heads * head_dim]`. Both are contiguous. `pool`: one layer's `[blocks, 2, kv_heads, block_size,
    head_dim]`, contiguous in the last two; it has the sequences' own tokens, too. What free places
    of a block hold is never used.
    """
    _, _, kv_heads, block_size, head_dim = pool.shape
    heads = out.shape[1] // head_dim
    assert qkv.is_contiguous()
    assert out.is_contiguous()
    assert pool.stride()[3:] == (head_dim, 1)
    count, items = len(inputs.rows), len(inputs.items)
    if not items:
        return
    programs = items if inputs.programs is None else min(items, inputs.programs)
    sums = torch.empty((items, heads, head_dim), dtype=torch.float32, device=out.device)
    weights = torch.empty((items, heads), dtype=torch.float32, device=out.device)
    _segment_kernel[(programs * kv_heads,)](
        qkv,
        out,
        sums,
        weights,
        pool,
        inputs.rows,
        inputs.lengths,
        inputs.tables,
        inputs.table_offsets,
        inputs.items,
        inputs.first_items,
        inputs.count,
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
        SEGMENT=SEGMENT,
        **_tiles(heads // kv_heads, head_dim, qkv.itemsize, pool.itemsize),
    )
    if inputs.splits:
        _merge_kernel[(count * heads,)](
            sums,
            weights,
            out,
            inputs.rows,
            inputs.first_items,
            HEADS=heads,
            DIM=head_dim,
            DIMS=_padded(head_dim),
            TILE=_MERGED,
            num_warps=4,
        )


def _tiles(group: int, head_dim: int, itemsize: int, kv_itemsize: int) -> Mapping[str, int]:
    """Sizes of a program, for numbers of so many bytes in queries and in the pool. Keys and values
    of `num_stages` tiles lie in shared memory, of which the smallest GPU gives a program 99 KiB.
    `TILE` is a divisor of `SEGMENT`."""
    dims, rows = _padded(head_dim), max(_LEAST, int(triton.next_power_of_2(group)))
    tile = min(64, (16 << 10) // (dims * itemsize))
    # Numbers are widened in registers, and without tensor cores multiplied from there. Tiles that
    # are loaded ahead would take more of them.
    widens, multiplies = kv_itemsize < itemsize, itemsize == 4
    many = rows > _LEAST and (widens or multiplies)
    if many:
        tile = _LEAST if multiplies else tile // 2
    return {
        "ROWS": rows,
        "DIMS": dims,
        "TILE": tile,
        "num_warps": 8 if many else 4,
        "num_stages": 1 if widens and multiplies else 2 if many else 3,
    }


def _padded(head_dim: int) -> int:
    """Dimensions of a tile: a power of two, and enough for a matrix product."""
    return max(_LEAST, int(triton.next_power_of_2(head_dim)))


@triton.jit
def _segment_kernel(
    qkv: tl.tensor,
    out: tl.tensor,
    sums: tl.tensor,
    weights: tl.tensor,
    pool: tl.tensor,
    rows: tl.tensor,
    lengths: tl.tensor,
    tables: tl.tensor,
    table_offsets: tl.tensor,
    items: tl.tensor,
    first_items: tl.tensor,
    count: tl.tensor,
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
    SEGMENT: tl.constexpr,
    ROWS: tl.constexpr,
    DIMS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    kv_head = tl.program_id(0) % KV_HEADS
    first_item = tl.program_id(0) // KV_HEADS
    member = tl.arange(0, ROWS)
    dim = tl.arange(0, DIMS)
    head = kv_head * GROUP + member
    used = (member < GROUP)[:, None] & (dim < DIM)[None, :]
    keys = pool + kv_head * head_stride
    values = keys + kv_stride
    # One turn each, but in a graph, whose number of programs is that of its capture.
    for item in range(first_item, tl.load(count), tl.num_programs(0) // KV_HEADS):
        sequence = tl.load(items + 2 * item)
        begin = tl.load(items + 2 * item + 1)
        length = tl.load(lengths + sequence)
        table = tables + tl.load(table_offsets + sequence)
        lowest = tl.maximum(length - window, 0)

        row = tl.load(rows + sequence).to(tl.int64)
        source = qkv + row * ((HEADS + 2 * KV_HEADS) * DIM) + head[:, None] * DIM + dim[None, :]
        queries = tl.load(source, mask=used, other=0.0)

        best = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        mixed = tl.zeros([ROWS, DIMS], tl.float32)
        # The first tile has a visible key, so that `best` is finite from then on.
        start = tl.maximum(begin, lowest // TILE * TILE)
        for first in range(start, tl.minimum(begin + SEGMENT, length), TILE):
            token = first + tl.arange(0, TILE)
            seen = (token < length) & (token >= lowest)
            block = tl.load(table + token // BLOCK_SIZE, mask=seen, other=0).to(tl.int64)
            place = block * block_stride + token % BLOCK_SIZE * DIM
            # Free places may hold anything: what is masked is zero, and not multiplied by zero.
            key = tl.load(
                keys + place[None, :] + dim[:, None],
                mask=seen[None, :] & (dim < DIM)[:, None],
                other=0.0,
            ).to(queries.dtype)
            scores = tl.dot(queries, key, input_precision="ieee") * score_scale
            if CAPS:
                # tanh(z) is 2 * sigmoid(2 z) - 1.
                scores = cap * (2.0 * tl.sigmoid(2.0 * scores / cap) - 1.0)
            scores = tl.where(seen[None, :], scores * 1.4426950408889634, float("-inf"))
            found = tl.maximum(best, tl.max(scores, axis=1))
            shrink = tl.exp2(best - found)
            weight = tl.exp2(scores - found[:, None])
            total = total * shrink + tl.sum(weight, axis=1)
            value = tl.load(
                values + place[:, None] + dim[None, :],
                mask=seen[:, None] & (dim < DIM)[None, :],
                other=0.0,
            ).to(queries.dtype)
            mixed = mixed * shrink[:, None]
            mixed += tl.dot(weight.to(queries.dtype), value, input_precision="ieee")
            best = found

        mixed = mixed * (value_scale / total)[:, None]
        alone = tl.load(first_items + sequence + 1) - tl.load(first_items + sequence) == 1
        if alone:
            target = out + row * (HEADS * DIM) + head[:, None] * DIM + dim[None, :]
            tl.store(target, mixed.to(out.dtype.element_ty), mask=used)
        else:
            place = head.to(tl.int64) + item * HEADS
            tl.store(sums + place[:, None] * DIM + dim[None, :], mixed, mask=used)
            tl.store(weights + place, best + tl.log2(total), mask=member < GROUP)


@triton.jit
def _merge_kernel(
    sums: tl.tensor,
    weights: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    first_items: tl.tensor,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIMS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Sums one head's segments, each weighted by the power of two that is its softmax's total."""
    sequence = tl.program_id(0) // HEADS
    head = tl.program_id(0) % HEADS
    begin = tl.load(first_items + sequence)
    end = tl.load(first_items + sequence + 1)
    if end - begin < 2:
        return
    dim = tl.arange(0, DIMS)
    segment = tl.arange(0, TILE)
    best = float("-inf")
    total = 0.0
    mixed = tl.zeros([DIMS], tl.float32)
    for first in range(begin, end, TILE):
        known = first + segment < end
        place = (first + segment).to(tl.int64) * HEADS + head
        power = tl.load(weights + place, mask=known, other=float("-inf"))
        found = tl.maximum(best, tl.max(power, axis=0))
        shrink = tl.exp2(best - found)
        weight = tl.exp2(power - found)
        part = tl.load(
            sums + place[:, None] * DIM + dim[None, :],
            mask=known[:, None] & (dim < DIM)[None, :],
            other=0.0,
        )
        mixed = mixed * shrink + tl.sum(part * weight[:, None], axis=0)
        total = total * shrink + tl.sum(weight, axis=0)
        best = found
    row = tl.load(rows + sequence).to(tl.int64)
    target = out + row * (HEADS * DIM) + head * DIM + dim
    tl.store(target, (mixed / total).to(out.dtype.element_ty), mask=dim < DIM)

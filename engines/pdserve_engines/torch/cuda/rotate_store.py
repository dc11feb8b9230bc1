"""Turns queries and keys by the rotary embedding, and stores keys and values in the KV pool.

One launch per layer for all tokens of a step, their norms of q and k included. The layer's pool is
`[block][k|v][head][token][dim]`, read by its strides: the blocks of a layer are not contiguous.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    import torch

__all__ = ["HeadNorms", "rotate_store"]

_TILE = 8
"""Heads of a program."""


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMS norms of each head of q and k, computed before the rotary embedding."""

    query: torch.Tensor
    key: torch.Tensor
    """Both `[head_dim]`."""
    eps: float


def rotate_store(
    qkv: torch.Tensor,
    table: torch.Tensor | None,
    positions: torch.Tensor,
    blocks: torch.Tensor,
    pool: torch.Tensor,
    norms: HeadNorms | None = None,
    kv_scales: tuple[float, float] = (1.0, 1.0),
) -> None:
    """Turn the queries of `qkv` in place, and write its turned keys and its values to `pool`.

    `qkv`: `[T, (heads + 2 * kv_heads) * head_dim]`, contiguous: queries, then keys, then values.
    `table`: a rope table `[positions, 2, head_dim / 2]` in float32; None turns nothing.
    `positions`, `blocks`: `[T]` int32; a block of -1 is padding: nothing is stored for that row.
    `pool`: one layer's `[blocks, 2, kv_heads, block_size, head_dim]`, contiguous in the last two.
    `kv_scales`: what stored keys and values are divided by; other than 1 only for an FP8 pool.
    """
    _, _, kv_heads, block_size, head_dim = pool.shape
    tokens, heads = qkv.shape[0], qkv.shape[1] // head_dim - 2 * kv_heads
    assert qkv.is_contiguous()
    assert pool.stride()[3:] == (head_dim, 1)
    tiles = triton.cdiv(heads + 2 * kv_heads, _TILE)
    if not tokens:
        return
    _rotate_store_kernel[(tokens * tiles,)](
        qkv,
        positions if table is None else table,
        positions,
        blocks,
        pool,
        qkv if norms is None else norms.query,
        qkv if norms is None else norms.key,
        pool.stride(0),
        pool.stride(1),
        pool.stride(2),
        0.0 if norms is None else norms.eps,
        kv_scales[0],
        kv_scales[1],
        HEADS=heads,
        KV_HEADS=kv_heads,
        HALF=head_dim // 2,
        PAIRS=triton.next_power_of_2(head_dim // 2),
        BLOCK_SIZE=block_size,
        TILE=_TILE,
        TILES=tiles,
        TURNS=table is not None,
        NORMS=norms is not None,
        SCALES=kv_scales != (1.0, 1.0),
        num_warps=4,
    )


@triton.jit
def _rotate_store_kernel(
    qkv: tl.tensor,
    table: tl.tensor,
    positions: tl.tensor,
    blocks: tl.tensor,
    pool: tl.tensor,
    query_norm: tl.tensor,
    key_norm: tl.tensor,
    block_stride: tl.tensor,
    kv_stride: tl.tensor,
    head_stride: tl.tensor,
    eps: tl.tensor,
    key_scale: tl.tensor,
    value_scale: tl.tensor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    TURNS: tl.constexpr,
    NORMS: tl.constexpr,
    SCALES: tl.constexpr,
) -> None:
    token = (tl.program_id(0) // TILES).to(tl.int64)
    head = tl.program_id(0) % TILES * TILE + tl.arange(0, TILE)
    pair = tl.arange(0, PAIRS)
    inside = (head < HEADS + 2 * KV_HEADS)[:, None] & (pair < HALF)[None, :]
    is_query = (head < HEADS)[:, None]
    turned = (head < HEADS + KV_HEADS)[:, None]
    position = tl.load(positions + token)
    block = tl.load(blocks + token).to(tl.int64)

    row = qkv + token * ((HEADS + 2 * KV_HEADS) * 2 * HALF)
    source = row + head[:, None] * (2 * HALF) + pair[None, :]
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    if NORMS:
        squares = tl.sum(first * first + second * second, axis=1)
        factor = tl.rsqrt(squares / (2 * HALF) + eps)[:, None]
        weight = _norm_weights(query_norm, key_norm, is_query, pair, HALF)
        normed = (first * factor * weight).to(qkv.dtype.element_ty).to(tl.float32)
        first = tl.where(turned, normed, first)
        weight = _norm_weights(query_norm + HALF, key_norm + HALF, is_query, pair, HALF)
        normed = (second * factor * weight).to(qkv.dtype.element_ty).to(tl.float32)
        second = tl.where(turned, normed, second)
    if TURNS:
        angle = table + position.to(tl.int64) * (2 * HALF) + pair
        cosine = tl.load(angle, mask=pair < HALF, other=0.0)[None, :]
        sine = tl.load(angle + HALF, mask=pair < HALF, other=0.0)[None, :]
        left = first * cosine - second * sine
        right = second * cosine + first * sine
        first = tl.where(turned, left, first)
        second = tl.where(turned, right, second)

    kept = inside & is_query
    tl.store(source, first.to(qkv.dtype.element_ty), mask=kept)
    tl.store(source + HALF, second.to(qkv.dtype.element_ty), mask=kept)

    is_value = head >= HEADS + KV_HEADS
    if SCALES:
        scale = tl.where(is_value, value_scale, key_scale)[:, None]
        first = first / scale
        second = second / scale
    kv_head = tl.where(is_value, head - HEADS - KV_HEADS, head - HEADS)
    place = tl.where(is_value, kv_stride, 0) + kv_head * head_stride
    cell = pool + block * block_stride + position % BLOCK_SIZE * (2 * HALF)
    target = cell + place[:, None] + pair[None, :]
    stored = inside & (head >= HEADS)[:, None] & (block >= 0)
    tl.store(target, first.to(pool.dtype.element_ty), mask=stored)
    tl.store(target + HALF, second.to(pool.dtype.element_ty), mask=stored)


@triton.jit
def _norm_weights(
    query_norm: tl.tensor,
    key_norm: tl.tensor,
    is_query: tl.tensor,
    pair: tl.tensor,
    HALF: tl.constexpr,
) -> tl.tensor:
    """Each head's weights in float32: the queries' or the keys'."""
    query = tl.load(query_norm + pair, mask=pair < HALF, other=0.0).to(tl.float32)
    key = tl.load(key_norm + pair, mask=pair < HALF, other=0.0).to(tl.float32)
    return tl.where(is_query, query[None, :], key[None, :])

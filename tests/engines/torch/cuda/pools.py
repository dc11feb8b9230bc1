"""Pools of KV as tests of kernels need them: whatever nobody wrote is NaN."""

from __future__ import annotations

import mmap
import random
from dataclasses import dataclass

import torch

_MAP_NORESERVE = 0x4000
"""Of Linux: memory need not be there before it is written. Python 3.13 has the name."""


@dataclass(frozen=True)
class Shape:
    """Heads of a model, and tokens of a block."""

    heads: int
    kv_heads: int
    head_dim: int
    block_size: int = 16


@dataclass
class Paged:
    """Sequences with keys and values in one layer of a pool, which has two layers."""

    pool: torch.Tensor
    """`[blocks, 2, kv_heads, block_size, head_dim]`, a view of the layer."""
    tables: list[list[int]]
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    """`[length, kv_heads, head_dim]` of each sequence."""


def empty_pool(shape: Shape, blocks: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """The second of two layers, full of NaN."""
    whole = (blocks, 2, 2, shape.kv_heads, shape.block_size, shape.head_dim)
    return torch.full(whole, torch.nan, device=device, dtype=dtype)[:, 1]


def far_pool(shape: Shape, device: torch.device) -> torch.Tensor:
    """Four blocks in float16, of which the last begins beyond 2^31 elements. On the CPU only what
    is written takes memory."""
    apart = 1 << 30
    elements = 3 * apart + 2 * shape.kv_heads * shape.block_size * shape.head_dim
    if device.type == "cpu":
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        memory = mmap.mmap(-1, 2 * elements, flags=flags | _MAP_NORESERVE)
        flat = torch.frombuffer(memory, dtype=torch.float16)
    else:
        flat = torch.empty(elements, dtype=torch.float16, device=device)
    row = shape.block_size * shape.head_dim
    strides = (apart, shape.kv_heads * row, row, shape.head_dim, 1)
    size = (4, 2, shape.kv_heads, shape.block_size, shape.head_dim)
    return flat.as_strided(size, strides).fill_(torch.nan)


def paged(
    shape: Shape,
    lengths: list[int],
    device: torch.device,
    dtype: torch.dtype,
    seed: int,
    pool: torch.Tensor | None = None,
) -> Paged:
    """Random sequences of these lengths in blocks of random order, with free blocks between;
    `pool`: where they lie, if not in a pool of their own."""
    counts = [-(-length // shape.block_size) for length in lengths]
    ids = list(range(sum(counts) + 3 if pool is None else len(pool)))
    random.Random(seed).shuffle(ids)
    if pool is None:
        pool = empty_pool(shape, len(ids), device, dtype)
    made = Paged(pool, [], [], [])
    generator = torch.Generator().manual_seed(seed)
    for length, count in zip(lengths, counts, strict=True):
        table, ids = ids[:count], ids[count:]
        kv = torch.randn(2, length, shape.kv_heads, shape.head_dim, generator=generator)
        kv = kv.to(device=device, dtype=dtype)
        for position in range(length):
            block = made.pool[table[position // shape.block_size]]
            block[:, :, position % shape.block_size] = kv[:, position]
        made.tables.append(table)
        made.keys.append(kv[0])
        made.values.append(kv[1])
    return made


def attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    window: int | None = None,
    cap: float | None = None,
) -> torch.Tensor:
    """The attention of one query `[heads, dim]` over `[length, kv_heads, dim]`, in float64."""
    groups = query.shape[0] // keys.shape[1]
    seen = slice(None) if window is None else slice(-window, None)
    keys, values = (part[seen].double().repeat_interleave(groups, 1) for part in (keys, values))
    scores = torch.einsum("hd,lhd->hl", query.double(), keys) * scale
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    return torch.einsum("hl,lhd->hd", scores.softmax(-1), values)

"""The engine's own kernels by themselves, beside the rate of a copy.

Each moves a known number of bytes and computes little. A measurement launches the kernel once for
each of several layers, whose data together are more than the caches hold, as one CUDA graph: so the
host's time does not count.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from bench.gpu import limits
from pdserve_engines.torch.cuda.add_norm import add_norm
from pdserve_engines.torch.cuda.decode_attention import DecodeInputs, ScoreRules, attend_decodes
from pdserve_engines.torch.cuda.decode_plan import list_items
from pdserve_engines.torch.cuda.gated_activation import gated_activation
from pdserve_engines.torch.cuda.rotate_store import rotate_store
from pdserve_engines.torch.models.upload import upload_packed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from bench.gpu.shapes import Shape

__all__ = ["KernelRun", "kernel_runs", "seconds_of"]

BLOCK = 32
ITEM = 2
"""Bytes of a number in bfloat16."""
LAYERS = 8
ROWS = (1, 64, 2048)
"""Tokens of a step, for kernels that take all of them."""
CONTEXTS = ((1, 2048), (8, 2048), (64, 2048), (256, 512))
"""Decoding sequences, and the keys of each."""
MIXED = (64, 256, 2048)
"""Decoding sequences whose lengths differ, and the shortest and the longest."""


@dataclass(frozen=True, slots=True)
class KernelRun:
    """A kernel at one size."""

    what: str
    launch: Callable[[int], None]
    """Launches it on the data of this layer."""
    moved: int
    """Bytes that one launch reads and writes at least."""
    rows: int
    """Tokens that one launch computes."""


def kernel_runs(shape: Shape, device: torch.device, *, few: bool = False) -> Iterator[KernelRun]:
    """All that is measured with the sizes of `shape`; `few`: only small sizes."""
    for rows in ROWS[:1] if few else ROWS:
        yield _norm(shape, device, rows)
        yield _activation(shape, device, rows)
        yield _storing(shape, device, rows)
    for batch, keys in ((2, 40),) if few else CONTEXTS:
        yield _attention(shape, device, f"attention {batch} × {keys}", [keys] * batch)
    if not few:
        batch, shortest, longest = MIXED
        lengths = torch.linspace(shortest, longest, batch).long().tolist()
        yield _attention(shape, device, f"attention {batch} × {shortest} to {longest}", lengths)


def seconds_of(run: KernelRun, device: torch.device) -> float:
    """The median time of one launch."""

    def all_layers() -> None:
        for layer in range(LAYERS):
            run.launch(layer)

    work = all_layers
    if device.type == "cuda":
        all_layers()  # compiled before it is captured
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            all_layers()
        work = graph.replay
    return statistics.median(limits.timed(work, device)) / LAYERS


def _drawn(device: torch.device, *size: int) -> torch.Tensor:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return torch.randn(size, device=device).to(dtype)


def _norm(shape: Shape, device: torch.device, rows: int) -> KernelRun:
    x, delta = (_drawn(device, LAYERS, rows, shape.hidden) for _ in range(2))
    weight = _drawn(device, shape.hidden)

    def launch(layer: int) -> None:
        add_norm(x[layer], delta[layer], weight, 1e-5)

    return KernelRun(f"norm of {rows}", launch, 4 * ITEM * rows * shape.hidden, rows)


def _activation(shape: Shape, device: torch.device, rows: int) -> KernelRun:
    gate_up = _drawn(device, LAYERS, rows, 2 * shape.inner)

    def launch(layer: int) -> None:
        gated_activation(gate_up[layer])

    return KernelRun(f"activation of {rows}", launch, 3 * ITEM * rows * shape.inner, rows)


def _storing(shape: Shape, device: torch.device, rows: int) -> KernelRun:
    """Turns queries and keys, and stores keys and values."""
    width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    qkv = _drawn(device, LAYERS, rows, width)
    pool = _pool(shape, device, -(-rows // BLOCK))
    table = torch.randn(rows, 2, shape.head_dim // 2, device=device)
    positions = np.arange(rows, dtype=np.int32)
    places, blocks = upload_packed([positions, positions // BLOCK], device)

    def launch(layer: int) -> None:
        rotate_store(qkv[layer], table, places, blocks, pool[:, layer])

    return KernelRun(f"rotating and storing {rows}", launch, 2 * ITEM * rows * width, rows)


def _attention(shape: Shape, device: torch.device, what: str, lengths: Sequence[int]) -> KernelRun:
    counts = [-(-length // BLOCK) for length in lengths]
    pool = _pool(shape, device, sum(counts))
    listed = list_items(np.array(lengths, np.int32), None)
    shuffled = np.random.default_rng(1).permutation(sum(counts))
    arrays = [np.arange(len(lengths)), np.array(lengths), shuffled, np.cumsum([0, *counts])[:-1]]
    arrays += [listed.items, listed.first_items, listed.count]
    inputs = upload_packed([each.astype(np.int32) for each in arrays], device)
    decodes = DecodeInputs(*inputs, splits=listed.splits)
    width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    qkv = _drawn(device, len(lengths), width)
    out = _drawn(device, len(lengths), shape.heads * shape.head_dim)
    rules = ScoreRules(shape.head_dim**-0.5)

    def launch(layer: int) -> None:
        attend_decodes(qkv, out, pool[:, layer], decodes, rules)

    moved = ITEM * sum(lengths) * 2 * shape.kv_heads * shape.head_dim
    return KernelRun(what, launch, moved, len(lengths))


def _pool(shape: Shape, device: torch.device, blocks: int) -> torch.Tensor:
    """`[blocks, layers, k|v, heads, tokens, dim]`, as the engine's."""
    return _drawn(device, blocks, LAYERS, 2, shape.kv_heads, BLOCK, shape.head_dim)

"""How fast the device reads: long runs, and one layer after the other of a pool of blocks."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from bench.gpu.probes.base import Row, guarded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from bench.gpu.probes.base import Probe

POOL = 1 << 34
"""Bytes of the pool: 64 sequences of 2048 tokens of Llama-3.1-8B."""
LAYERS = 32
TOKEN = 4096
"""Bytes of one token's keys and values in one layer."""
ITEM = 4
"""Bytes of the numbers that the kernel reads."""
PIECES = (2048, 8192)
"""Numbers that one program reads."""


def ask_reading(probe: Probe) -> Iterator[Row]:
    """Bytes per second of reductions, which write next to nothing."""
    numbers = torch.empty(probe.size(1 << 30, 1 << 12), device=probe.device).normal_()
    works: dict[str, Callable[[int], object]] = {
        "torch.sum": lambda number: numbers.sum(),
        "torch.amax": lambda number: numbers.amax(),
        "torch.mv": lambda number: torch.mv(numbers.view(-1, 1024), numbers[:1024]),
    }
    for what, work in works.items():
        seconds = probe.device_seconds(work, probe.size(5, 1))
        yield Row(f"reading by {what}", numbers.nbytes / seconds / 1e9, "GB/s")


def ask_pages(probe: Probe) -> Iterator[Row]:
    """Reading a pool layer by layer through a block table, beside reading it from end to end."""
    probe.require_cuda()
    pool = torch.empty(POOL // ITEM, dtype=torch.int32, device=probe.device).random_()
    yield from guarded("index_select", lambda: _gathered(probe, pool))
    for piece in PIECES:
        yield from guarded("long runs", partial(_contiguous, probe, pool, piece))
        for tokens in (16, 32, 64):
            what = f"blocks of {tokens} tokens"
            yield from guarded(what, partial(_pages, probe, pool, tokens, piece))


def _gathered(probe: Probe, pool: torch.Tensor) -> Iterator[Row]:
    """The engine's way without kernels of its own: it reads, and writes what it has read."""
    part = 32 * TOKEN // ITEM
    rows = pool.view(-1, part)
    blocks = torch.randperm(len(rows) // LAYERS, device=probe.device) * LAYERS
    out = torch.empty(len(blocks), part, dtype=torch.int32, device=probe.device)
    seconds = probe.device_seconds(
        lambda number: torch.index_select(rows, 0, blocks + number % LAYERS, out=out), LAYERS
    )
    note = "read and written; blocks of 32 tokens"
    yield Row("index_select, layer by layer", 2 * out.nbytes / seconds / 1e9, "GB/s", note)


def _contiguous(probe: Probe, pool: torch.Tensor, piece: int) -> Iterator[Row]:
    layer = pool.numel() // LAYERS
    table = torch.arange(layer // piece, dtype=torch.int32, device=probe.device)
    rate = _read(probe, pool, table, piece, piece, layer)
    yield Row(f"long runs, {piece * ITEM >> 10} KiB a program", rate / 1e9, "GB/s")


def _pages(probe: Probe, pool: torch.Tensor, tokens: int, piece: int) -> Iterator[Row]:
    part = tokens * TOKEN // ITEM
    block = part * LAYERS
    table = torch.randperm(pool.numel() // block, device=probe.device).to(torch.int32)
    rate = _read(probe, pool, table, piece, block, part)
    what = f"blocks of {tokens} tokens, {piece * ITEM >> 10} KiB a program"
    yield Row(what, rate / 1e9, "GB/s", "layer by layer, shuffled")


def _read(
    probe: Probe, pool: torch.Tensor, table: torch.Tensor, piece: int, stride: int, layer: int
) -> float:
    """Returns bytes per second. `layer`: numbers from one layer to the next."""
    from bench.gpu.probes.kernels import read_pieces

    pieces = pool.numel() // LAYERS // len(table) // piece
    out = torch.empty(len(table) * pieces, dtype=torch.int32, device=probe.device)

    def read(number: int) -> None:
        start = number % LAYERS * layer
        read_pieces[(len(out),)](pool, table, out, start, stride, pieces, PIECE=piece)

    return pool.nbytes / LAYERS / probe.device_seconds(read, LAYERS)

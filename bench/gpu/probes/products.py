"""Products of Llama-3.1-8B at several numbers of rows.

The weights rotate over copies that together exceed the cache, as those of a model's layers do.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from bench.gpu.probes.base import Row, guarded

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bench.gpu.probes.base import Probe

SHAPES = {
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate_up": (28672, 4096),
    "down": (4096, 14336),
    "head": (128256, 4096),
}
"""Outputs and inputs."""
ROWS = (1, 8, 16, 64, 512, 2048)
TOGETHER = 1 << 29
"""Bytes of all copies of a weight; ten times the cache."""


def ask_products(probe: Probe) -> Iterator[Row]:
    """Bytes and operations per second of each shape at each number of rows."""
    for name, shape in SHAPES.items():
        yield from guarded(name, partial(_shape, probe, name, *shape))


def _shape(probe: Probe, name: str, outputs: int, inputs: int) -> Iterator[Row]:
    if probe.dry:
        outputs, inputs = outputs // 64, inputs // 64
    size = 2 * outputs * inputs
    copies = probe.size(max(3, -(-TOGETHER // size)), 2)
    weights = [_random(probe, outputs, inputs) for _ in range(copies)]
    for rows in ROWS[: 2 if probe.dry else None]:
        x = _random(probe, rows, inputs)
        work = partial(_multiply, x, weights)
        seconds = probe.device_seconds(work, probe.size(max(copies, 16), copies))
        moved = (size + 2 * rows * (inputs + outputs)) / seconds / 1e9
        rate = 2 * rows * outputs * inputs / seconds / 1e12
        what = f"{name} × {rows} rows"
        yield Row(what, seconds * 1e6, "µs", f"{moved:,.0f} GB/s, {rate:,.1f} TFLOP/s")


def _multiply(x: torch.Tensor, weights: list[torch.Tensor], number: int) -> torch.Tensor:
    return functional.linear(x, weights[number % len(weights)])


def _random(probe: Probe, rows: int, columns: int) -> torch.Tensor:
    made = torch.empty(rows, columns, dtype=torch.bfloat16, device=probe.device)
    return made.normal_(0.0, 0.02)

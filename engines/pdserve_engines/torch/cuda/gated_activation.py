"""Computes a feed-forward layer's gate: the activation of one half of a row times the other."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    import torch

__all__ = ["gated_activation"]

_BLOCK = 1024
"""Columns of a program."""


def gated_activation(gate_up: torch.Tensor, *, gelu: bool = False) -> torch.Tensor:
    """`[rows, 2 * size]`, contiguous, to `[rows, size]`: SiLU of the first half times the second.

    `gelu`: GELU in its tanh form instead of SiLU. Computed in float32 and rounded once.
    """
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.is_contiguous()
    out = gate_up.new_empty((rows, size))
    tiles = triton.cdiv(size, _BLOCK)
    if rows:
        _gated_activation_kernel[(rows * tiles,)](
            gate_up, out, size, tiles, GELU=gelu, BLOCK=_BLOCK, num_warps=4
        )
    return out


@triton.jit
def _gated_activation_kernel(
    gate_up: tl.tensor,
    out: tl.tensor,
    size: tl.tensor,
    tiles: tl.tensor,
    GELU: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = (tl.program_id(0) // tiles).to(tl.int64) * size
    column = tl.program_id(0) % tiles * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    source = gate_up + 2 * row + column
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source + size, mask=inside, other=0.0).to(tl.float32)
    if GELU:
        # (1 + tanh(z)) / 2 is the sigmoid of 2 z.
        slope = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        active = gate * tl.sigmoid(slope)
    else:
        active = gate * tl.sigmoid(gate)
    tl.store(out + row + column, (active * up).to(out.dtype.element_ty), mask=inside)

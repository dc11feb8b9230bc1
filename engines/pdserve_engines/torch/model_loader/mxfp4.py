"""Reads weights in MXFP4: four bits each, in blocks of 32 that share a scale.

The format is that of the OCP Microscaling specification: a value is E2M1, two of them are in a
byte, the first in its low half, and a scale is a power of two (E8M0). All of them are bfloat16
numbers, so nothing is lost.
"""

from __future__ import annotations

from typing import Final

import torch

__all__ = ["BLOCK", "BLOCK_BYTES", "dequantise"]

BLOCK: Final = 32
"""Weights that share a scale."""
BLOCK_BYTES: Final = BLOCK // 2

_POSITIVE: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of the codes without the sign bit."""
_BIAS: Final = 127
"""Of the scales' exponents."""


def dequantise(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """`[rows, n, 16]` bytes and `[rows, n]` scales to `[rows, n * 32]` bfloat16."""
    pairs = _pairs().index_select(0, blocks.reshape(-1).int())
    factors = _factors().index_select(0, scales.reshape(-1).int())
    values = pairs.view(len(factors), BLOCK).mul_(factors[:, None])
    return values.view(len(blocks), -1)


def _pairs() -> torch.Tensor:
    """The two values of every byte: `[256, 2]`."""
    values = torch.tensor(_POSITIVE, dtype=torch.bfloat16)
    values = torch.cat((values, -values))
    codes = torch.arange(256)
    return torch.stack((values[codes % 16], values[codes // 16]), dim=1)


def _factors() -> torch.Tensor:
    """The factor of every scale: `[256]`. The last one stands for no number, and is infinite."""
    return torch.ldexp(torch.ones(256), torch.arange(256) - _BIAS).to(torch.bfloat16)

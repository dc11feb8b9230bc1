"""Rounds weights to MXFP4, for checkpoints of tests."""

from __future__ import annotations

import torch

_VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def quantise(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`[..., n * 32]` to blocks `[..., n, 16]` and scales `[..., n]`: each value becomes the
    nearest one, where the largest of a block lies between four and eight times its scale."""
    blocks = weights.float().unflatten(-1, (-1, 32))
    largest = blocks.abs().amax(-1).clamp(min=2.0**-120)
    exponents = torch.floor(torch.log2(largest)) - 2
    scaled = blocks / torch.exp2(exponents)[..., None]
    codes = (scaled.abs()[..., None] - _VALUES).abs().argmin(-1)
    codes += 8 * scaled.signbit()
    packed = codes[..., ::2] + 16 * codes[..., 1::2]
    return packed.to(torch.uint8), (exponents + 127).to(torch.uint8)

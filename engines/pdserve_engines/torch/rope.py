"""The rotary embedding's table: cosine and sine of every position, computed once.

Only frequencies and angles; applying them is the forward pass's work.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from pdserve_engines.torch.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Radians per position of each pair of dimensions: `[head_dim / 2]`, float32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _llama3(frequencies, rope)
    return frequencies


def _llama3(frequencies: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    wavelengths = 2 * math.pi / frequencies
    turns = rope.original_max_positions / wavelengths
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * frequencies / rope.factor + blend * frequencies


def rope_table(rope: RopeConfig, head_dim: int, positions: int) -> torch.Tensor:
    """Cosines, then sines: `[positions, 2, head_dim / 2]`, float32 on the CPU."""
    angles = torch.outer(
        torch.arange(positions, dtype=torch.float32), inverse_frequencies(rope, head_dim)
    )
    return torch.stack((angles.cos(), angles.sin()), dim=1)

"""Computes the rotary embedding's table: cosine and sine of every position.

The forward pass applies it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from pdserve_engines.torch.model_loader.rope_config import RopeConfig, YarnConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Radians per position of each pair of dimensions: `[head_dim / 2]`, float32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _llama3(frequencies, rope)
    if rope.yarn is not None:
        return _yarn(frequencies, rope, rope.yarn, head_dim)
    return frequencies


def _llama3(frequencies: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    wavelengths = 2 * math.pi / frequencies
    turns = rope.original_max_positions / wavelengths
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * frequencies / rope.factor + blend * frequencies


def _yarn(
    frequencies: torch.Tensor, rope: RopeConfig, yarn: YarnConfig, head_dim: int
) -> torch.Tensor:
    """Slowly turning pairs are stretched by `factor`, fast ones kept, those between blended by
    their place."""

    def place(turns: float) -> float:
        """The dimension of the pair that turns this often in the original context."""
        span = rope.original_max_positions / (turns * 2 * math.pi)
        return head_dim * math.log(span) / (2 * math.log(rope.theta))

    low, high = place(yarn.beta_fast), place(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        # This avoids a division by zero.
        high += 0.001
    pairs = torch.arange(head_dim // 2, dtype=torch.float32)
    blend = ((pairs - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies / rope.factor * blend + frequencies * (1 - blend)


def rope_table(rope: RopeConfig, head_dim: int, positions: int) -> torch.Tensor:
    """Cosines, then sines: `[positions, 2, head_dim / 2]`, float32 on the CPU."""
    angles = torch.outer(
        torch.arange(positions, dtype=torch.float32), inverse_frequencies(rope, head_dim)
    )
    scale = 1.0 if rope.yarn is None else rope.yarn.attention_factor
    return torch.stack((angles.cos() * scale, angles.sin() * scale), dim=1)

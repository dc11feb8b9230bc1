"""Computes the rotary embedding's table: cosine and sine of every position.

The forward pass applies it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import torch

from pdserve.errors import ConfigError, UnsupportedCheckpoint
from pdserve.limits.sizes import approximate_size

if TYPE_CHECKING:
    from pdserve.limits.memory import MemoryBound
    from pdserve_engines.torch.model_loader.rope_config import RopeConfig, YarnConfig


_COPIES: Final = 4
"""Times its own size that a table takes while it is made."""


def check_rope(rope: RopeConfig, head_dim: int, positions: int, room: MemoryBound) -> None:
    """Raise `UnsupportedCheckpoint` if the settings give no frequencies, and `ConfigError` if the
    table of so many positions does not fit the memory. Nothing large is allocated."""
    needed = _COPIES * positions * head_dim * torch.float32.itemsize
    if needed > room.free:
        raise ConfigError(
            f"a context of {positions} tokens needs {approximate_size(needed)} for its rotary "
            f"embedding, and {approximate_size(room.free)} are free ({room.name}); set "
            "--max-model-len to a shorter one"
        )
    try:
        frequencies = inverse_frequencies(rope.for_context(positions), head_dim)
    except (ArithmeticError, ValueError):
        frequencies = torch.tensor(math.nan)
    if not frequencies.isfinite().all():
        raise UnsupportedCheckpoint(
            f"config.json: the settings of the rotary embedding ({rope.kind}) give no finite "
            "frequencies"
        )


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Radians per position of each pair of dimensions that is turned: `[dims / 2]`, float32."""
    dims = rope.dims or head_dim
    exponents = torch.arange(0, dims, 2, dtype=torch.float32) / dims
    wavelengths = _theta(rope, dims) ** exponents
    if rope.longrope is not None:
        return 1.0 / (torch.tensor(rope.longrope.long, dtype=torch.float32) * wavelengths)
    frequencies = 1.0 / wavelengths
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _llama3(frequencies, rope)
    if rope.yarn is not None:
        return _yarn(frequencies, rope, rope.yarn, dims)
    return frequencies


def _theta(rope: RopeConfig, dims: int) -> float:
    """With `dynamic`, larger the longer the context: the slowest pair turns no further in it than
    in the original one."""
    if rope.kind != "dynamic" or rope.context <= rope.original_max_positions:
        return rope.theta
    stretch = rope.factor * rope.context / rope.original_max_positions - (rope.factor - 1)
    return float(rope.theta * stretch ** (dims / (dims - 2)))


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
    """Cosines, then sines, for a context of so many positions: `[positions, 2, head_dim / 2]`,
    float32 on the CPU. Pairs that are not turned come last (`RopeConfig.head_order`)."""
    rope = rope.for_context(positions)
    angles = torch.outer(
        torch.arange(positions, dtype=torch.float32), inverse_frequencies(rope, head_dim)
    )
    scaled = rope.yarn or rope.longrope
    scale = 1.0 if scaled is None else scaled.attention_factor
    table = torch.stack((angles.cos() * scale, angles.sin() * scale), dim=1)
    still = table.new_tensor([1.0, 0.0]).view(1, 2, 1)
    return torch.cat((table, still.expand(positions, 2, head_dim // 2 - angles.shape[1])), dim=2)

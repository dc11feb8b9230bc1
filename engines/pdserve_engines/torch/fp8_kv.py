"""Rounds keys and values to FP8 (E4M3), and widens them again, in torch operations.

A byte times the layer's scale is the number that is meant. Larger numbers than FP8 has become its
largest one; what is no number stays none. Rounding depends on the number and its scale alone, so
blocks mean the same wherever they were computed.
"""

from __future__ import annotations

from typing import Final

import torch

__all__ = ["FP8", "round_rows", "widen"]

FP8: Final = torch.float8_e4m3fn
_LARGEST: Final = torch.finfo(FP8).max


def round_rows(rows: torch.Tensor, scales: tuple[float, float]) -> torch.Tensor:
    """`[T, 2 * kv_heads, dim]`, keys before values, to bytes of the same shape. `scales`: of keys
    and of values."""
    halves = [part.float() / scale for part, scale in zip(rows.chunk(2, 1), scales, strict=True)]
    return torch.cat(halves, dim=1).clamp_(-_LARGEST, _LARGEST).to(FP8).view(torch.uint8)


def widen(stored: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """Bytes to the numbers that are meant."""
    numbers = stored.view(FP8).to(dtype)
    return numbers if scale == 1.0 else numbers.mul_(scale)

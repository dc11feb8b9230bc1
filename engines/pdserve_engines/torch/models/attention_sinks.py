"""Gives torch's attention kernels a sink for each head, which they do not have.

A sink is a score without a key. It takes part in the softmax and adds nothing to the output. Here
it is one more key before all others, whose value is zero: queries and keys get further dimensions,
in which only a query and that key are not zero. So the mask is the same for all heads, and causal
kernels show the key to every query.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from torch.nn import functional

if TYPE_CHECKING:
    import torch

__all__ = ["WIDER", "with_sink_key", "with_sinks"]

WIDER: Final = 8
"""Further dimensions of a head; kernels need a multiple of eight."""


def with_sinks(queries: torch.Tensor, sinks: torch.Tensor, scale: float) -> torch.Tensor:
    """`[T, heads, dim]` queries, with what `scale` makes the head's sink."""
    wide = functional.pad(queries, (0, WIDER))
    wide[..., queries.shape[-1]] = sinks / scale
    return wide


def with_sink_key(keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`[n, kv_heads, length, dim]` keys and values, with the sinks' key and its value before
    them."""
    wide_keys = functional.pad(keys, (0, WIDER, 1, 0))
    wide_keys[:, :, 0, keys.shape[-1]] = 1
    return wide_keys, functional.pad(values, (0, WIDER, 1, 0))

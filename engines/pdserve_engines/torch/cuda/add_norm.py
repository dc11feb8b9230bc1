"""Adds a layer's output to the residual and computes the RMS norm, in one pass over each row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["add_norm"]


def add_norm(
    x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Add `delta` to `x` in place, and return the RMS norm of the sum times `weight`.

    `x`, `delta` and the result: `[rows, size]`, contiguous, of one dtype; `weight`: `[size]`. The
    sum is rounded to the dtype before it is normed. All else is computed in float32.
    """
    rows, size = x.shape
    assert x.is_contiguous()
    assert delta is None or delta.is_contiguous()
    out = torch.empty_like(x)
    if rows:
        block = triton.next_power_of_2(size)
        _add_norm_kernel[(rows,)](
            x,
            x if delta is None else delta,
            weight,
            out,
            size,
            eps,
            ADDS=delta is not None,
            BLOCK=block,
            num_warps=min(16, max(1, block // 512)),
        )
    return out


@triton.jit
def _add_norm_kernel(
    x: tl.tensor,
    delta: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    size: tl.tensor,
    eps: tl.tensor,
    ADDS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    # Rows times columns pass 2^31 in steps of many tokens.
    row = tl.program_id(0).to(tl.int64) * size
    column = tl.arange(0, BLOCK)
    inside = column < size
    value = tl.load(x + row + column, mask=inside, other=0.0)
    if ADDS:
        added = tl.load(delta + row + column, mask=inside, other=0.0)
        value = (value.to(tl.float32) + added.to(tl.float32)).to(value.dtype)
        tl.store(x + row + column, value, mask=inside)
    wide = value.to(tl.float32)
    factor = tl.rsqrt(tl.sum(wide * wide, axis=0) / size + eps)
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row + column, (wide * factor * scale).to(value.dtype), mask=inside)

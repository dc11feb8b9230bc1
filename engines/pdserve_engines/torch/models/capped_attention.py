"""Computes attention whose scores are bounded by a tanh (soft-capping), which torch's kernels lack.

Queries are taken in slices, so that the scores in memory stay few. It knows no blocks.
"""

from __future__ import annotations

from typing import Final

import torch

SCORES_AT_ONCE: Final = 16 << 20
"""Most scores in memory, unless one query of each head has more. `kv_budget` counts them."""


def attend_capped(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    cap: float,
) -> torch.Tensor:
    """Like `scaled_dot_product_attention` on `[n, heads, rows, dim]`. `mask` has all rows: True
    where a query may look, or what is added to its scores; None: it may look everywhere."""
    n, heads, rows, _ = queries.shape
    step = max(1, SCORES_AT_ONCE // (n * heads * keys.shape[2]))
    keys = keys.transpose(2, 3)
    out = torch.empty_like(queries)
    for begin in range(0, rows, step):
        part = slice(begin, begin + step)
        scores = torch.matmul(queries[:, :, part], keys).float()
        scores.mul_(scale / cap).tanh_().mul_(cap)
        if mask is not None and mask.dtype == torch.bool:
            scores.masked_fill_(~mask[:, :, part], -torch.inf)
        elif mask is not None:
            scores += mask[:, :, part]
        out[:, :, part] = torch.matmul(scores.softmax(-1).to(values.dtype), values)
    return out

"""Computes a mixture-of-experts layer: each token goes through the few experts its router chooses.

It computes one expert after the other, each over all tokens that chose it. No token is ever
dropped, so a token's result does not depend on the batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdserve_engines.torch.model_loader.config import ExpertsConfig


def feed_experts(
    config: ExpertsConfig, layer: Mapping[str, torch.Tensor], x: torch.Tensor
) -> torch.Tensor:
    """`[T, hidden]` to the same shape: the weighted sum of every token's experts."""
    shares, chosen = route_experts(config, layer["router"], x)
    gates_and_ups = layer["experts_gate_up"].view(config.count, -1, x.shape[1])
    downs = layer["experts_down"].view(config.count, x.shape[1], -1)
    out = torch.zeros_like(x)
    for expert in sorted(set(chosen.flatten().tolist())):
        rows, places = torch.where(chosen == expert)
        gate, up = functional.linear(x[rows], gates_and_ups[expert]).chunk(2, dim=-1)
        fed = functional.linear(functional.silu(gate).mul_(up), downs[expert])
        out.index_add_(0, rows, (fed * shares[rows, places, None]).to(x.dtype))
    return out


def route_experts(
    config: ExpertsConfig, router: torch.Tensor, x: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights (float32) and numbers of the experts of each token: `[T, per_token]` both."""
    likely = functional.linear(x, router).float().softmax(-1)
    shares, chosen = likely.topk(config.per_token, dim=-1)
    if config.normalized:
        shares = shares / shares.sum(-1, keepdim=True)
    return shares, chosen

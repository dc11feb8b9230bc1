"""Computes a mixture-of-experts layer: each token goes through the few experts its router chooses.

It computes one expert after the other, each over all tokens that chose it. No token is ever
dropped, so a token's result does not depend on the batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pdserve_engines.torch.model_loader.config import ExpertsConfig, SwigluConfig


def feed_experts(
    config: ExpertsConfig, layer: Mapping[str, torch.Tensor], x: torch.Tensor
) -> torch.Tensor:
    """`[T, hidden]` to the same shape: the weighted sum of every token's experts."""
    shares, chosen = route_experts(config, layer["router"], x, layer.get("router_bias"))
    gates_and_ups = layer["experts_gate_up"].view(config.count, -1, x.shape[1])
    downs = layer["experts_down"].view(config.count, x.shape[1], -1)
    gate_up_biases = _by_expert(config, layer.get("experts_gate_up_bias"))
    down_biases = _by_expert(config, layer.get("experts_down_bias"))
    out = torch.zeros_like(x)
    for expert in sorted(set(chosen.flatten().tolist())):
        rows, places = torch.where(chosen == expert)
        product = functional.linear(x[rows], gates_and_ups[expert], gate_up_biases[expert])
        active = _activate(config.swiglu, *product.chunk(2, dim=-1))
        fed = functional.linear(active, downs[expert], down_biases[expert])
        out.index_add_(0, rows, (fed * shares[rows, places, None]).to(x.dtype))
    return out


def _by_expert(
    config: ExpertsConfig, biases: torch.Tensor | None
) -> Sequence[torch.Tensor] | Sequence[None]:
    return [None] * config.count if biases is None else biases.chunk(config.count)


def _activate(swiglu: SwigluConfig | None, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    if swiglu is None:
        return functional.silu(gate).mul_(up)
    gate, up = gate.clamp(max=swiglu.limit), up.clamp(-swiglu.limit, swiglu.limit)
    return gate * torch.sigmoid(gate * swiglu.alpha) * (up + 1)


def route_experts(
    config: ExpertsConfig,
    router: torch.Tensor,
    x: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights (float32) and numbers of the experts of each token: `[T, per_token]` both."""
    likely = functional.linear(x, router, bias).float().softmax(-1)
    shares, chosen = likely.topk(config.per_token, dim=-1)
    if config.normalized:
        shares = shares / shares.sum(-1, keepdim=True)
    return shares, chosen

"""Computes a mixture-of-experts layer: each token goes through the few experts its router chooses.

`feed_experts` computes one expert after the other, each over all tokens that chose it; the host
reads which those are. `feed_few` is for a GPU's decode steps: it waits for nothing, and its shapes
depend on the number of tokens alone. No token is ever dropped, so a token's result does not depend
on the batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pdserve_engines.torch.model_loader.config import ExpertsConfig, SwigluConfig


MOST_FEW: Final = 512
"""Most tokens of `feed_few`. Prompts have more, and are worth a wait."""
_ROWS: Final = 128
"""Tokens that all experts compute at one time; it bounds the memory for their results."""
_GATHERING: Final = 3
"""Times that a gathered matrix is moved: read, written and read again."""
_MOST_GATHERED: Final = 128 << 20
"""Most bytes of gathered matrices."""


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
        active = activate(config.swiglu, *product.chunk(2, dim=-1))
        fed = functional.linear(active, downs[expert], down_biases[expert])
        out.index_add_(0, rows, (fed * shares[rows, places, None]).to(x.dtype))
    return out


def feed_few(
    config: ExpertsConfig, layer: Mapping[str, torch.Tensor], x: torch.Tensor
) -> torch.Tensor:
    """The same for up to `MOST_FEW` tokens. A decode step reads weights longer than it computes, so
    every expert computes every token if most experts have some anyway."""
    shares, chosen = route_experts(config, layer["router"], x, layer.get("router_bias"))
    rows = len(x) * config.per_token
    gathered = rows * 2 * config.intermediate_size * x.shape[1] * x.itemsize
    if _GATHERING * rows <= config.count and gathered <= _MOST_GATHERED:
        return _feed_gathered(config, layer, x, shares, chosen)
    parts = [
        _feed_all(config, layer, *part)
        for part in zip(*(torch.split(each, _ROWS) for each in (x, shares, chosen)), strict=True)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _feed_gathered(
    config: ExpertsConfig,
    layer: Mapping[str, torch.Tensor],
    x: torch.Tensor,
    shares: torch.Tensor,
    chosen: torch.Tensor,
) -> torch.Tensor:
    """Copy the matrices of each token's experts, then multiply."""
    experts, count, hidden = chosen.flatten(), config.count, x.shape[1]
    inputs = x.repeat_interleave(config.per_token, dim=0).unsqueeze(2)
    product = torch.bmm(layer["experts_gate_up"].view(count, -1, hidden)[experts], inputs)
    product = product.squeeze(2)
    if config.bias:
        product = product + layer["experts_gate_up_bias"].view(count, -1)[experts]
    active = activate(config.swiglu, *product.chunk(2, dim=-1)).unsqueeze(2)
    fed = torch.bmm(layer["experts_down"].view(count, hidden, -1)[experts], active).squeeze(2)
    if config.bias:
        fed = fed + layer["experts_down_bias"].view(count, -1)[experts]
    summed = (fed.view(*chosen.shape, hidden) * shares.unsqueeze(2)).sum(1)
    return summed.to(x.dtype)


def _feed_all(
    config: ExpertsConfig,
    layer: Mapping[str, torch.Tensor],
    x: torch.Tensor,
    shares: torch.Tensor,
    chosen: torch.Tensor,
) -> torch.Tensor:
    """Let every expert compute every token; those that a token did not choose have no share."""
    count, hidden = config.count, x.shape[1]
    all_shares = torch.zeros((len(x), count), dtype=shares.dtype, device=x.device)
    all_shares = all_shares.scatter(1, chosen, shares)
    product = functional.linear(x, layer["experts_gate_up"], layer.get("experts_gate_up_bias"))
    active = activate(config.swiglu, *product.view(len(x), count, -1).chunk(2, dim=-1))
    # One that overflows without being chosen would make 0 * inf of its share.
    active = active.masked_fill(all_shares.unsqueeze(2) == 0, 0)
    downs = layer["experts_down"].view(count, hidden, -1)
    fed = torch.bmm(active.transpose(0, 1), downs.transpose(1, 2))
    summed = torch.einsum("eth,te->th", fed.float(), all_shares)
    if config.bias:
        summed = summed + all_shares @ layer["experts_down_bias"].view(count, -1).float()
    return summed.to(x.dtype)


def _by_expert(
    config: ExpertsConfig, biases: torch.Tensor | None
) -> Sequence[torch.Tensor] | Sequence[None]:
    return [None] * config.count if biases is None else biases.chunk(config.count)


def activate(swiglu: SwigluConfig | None, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """The product of both halves, of which the first goes through the activation; it may overwrite
    them."""
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

"""Computes a mixture-of-experts layer without a wait, each token in an order of its own.

The host reads nothing: tokens are sorted by expert on the device, into groups whose number depends
on the number of tokens alone. A token adds up its experts in the order of their likelihood.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from pdserve_engines.torch.cuda.gated_activation import gated_activation
from pdserve_engines.torch.cuda.invariant.linear import ROWS, ExpertRows, linear, linear_by_expert
from pdserve_engines.torch.models.experts import activate

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdserve_engines.torch.model_loader.config import ExpertsConfig

__all__ = ["add_experts", "choose_experts", "feed_routed", "group_by_expert"]

_COLUMNS = 1024
"""Columns of a program that adds up experts."""


def feed_routed(
    config: ExpertsConfig, layer: Mapping[str, torch.Tensor], x: torch.Tensor
) -> torch.Tensor:
    """`[T, hidden]` to the same shape: the weighted sum of every token's experts."""
    if not len(x):
        return torch.empty_like(x)
    count, hidden = config.count, x.shape[1]
    scores = linear(x, layer["router"], layer.get("router_bias"))
    shares, chosen = choose_experts(scores, config.per_token, normalized=config.normalized)
    routed = group_by_expert(chosen, count)

    def product(x: torch.Tensor, name: str, per_token: int) -> torch.Tensor:
        bias = layer.get(f"{name}_bias")
        return linear_by_expert(
            x,
            layer[name].view(count, -1, x.shape[1]),
            None if bias is None else bias.view(count, -1),
            routed,
            per_token,
        )

    both = product(x, "experts_gate_up", config.per_token)
    if config.swiglu is None:
        active = gated_activation(both)
    else:
        active = activate(config.swiglu, *both.chunk(2, dim=-1))
    fed = product(active, "experts_down", 1)
    return add_experts(fed.view(len(x), -1, hidden), shares)


def choose_experts(
    scores: torch.Tensor, per_token: int, *, normalized: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Shares (float32) and numbers (int32) of the likeliest experts of each token, `[T, per_token]`
    both, the likeliest first; of equal ones the first. `scores`: `[T, experts]`."""
    tokens, count = scores.shape
    shares = torch.empty((tokens, per_token), dtype=torch.float32, device=scores.device)
    chosen = torch.empty((tokens, per_token), dtype=torch.int32, device=scores.device)
    _choose_kernel[(tokens,)](
        scores,
        shares,
        chosen,
        COUNT=count,
        CHOSEN=per_token,
        NORMALIZED=normalized,
        BLOCK=triton.next_power_of_2(count),
        PLACES=triton.next_power_of_2(per_token),
        num_warps=1,
    )
    return shares, chosen


def group_by_expert(chosen: torch.Tensor, count: int) -> ExpertRows:
    """The results of `[T, per_token]` experts, grouped by expert. Plain operations on integers, and
    shapes that depend on `T` alone."""
    flat = chosen.flatten().long()
    pairs, device = len(flat), chosen.device
    ordered, source = flat.sort(stable=True)
    counts = torch.zeros(count, dtype=torch.long, device=device)
    counts = counts.scatter_add(0, flat, torch.ones_like(flat))
    groups = (counts + ROWS - 1) // ROWS
    ends = groups.cumsum(0)
    begins = (ends - groups) * ROWS - (counts.cumsum(0) - counts)
    most = min(pairs, count) + pairs // ROWS
    places = torch.full((most * ROWS,), -1, dtype=torch.int32, device=device)
    where = begins[ordered] + torch.arange(pairs, device=device)
    places = places.scatter(0, where, source.int())
    experts = torch.searchsorted(ends, torch.arange(most, device=device), right=True)
    return ExpertRows(places, experts.clamp_max(count - 1).int())


def add_experts(fed: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """The sum of each token's results times their shares: `[T, per_token, hidden]` to `[T,
    hidden]`."""
    tokens, per_token, hidden = fed.shape
    out = fed.new_empty((tokens, hidden))
    tiles = triton.cdiv(hidden, _COLUMNS)
    _add_kernel[(tokens * tiles,)](
        fed, shares, out, hidden, tiles, CHOSEN=per_token, BLOCK=_COLUMNS, num_warps=4
    )
    return out


@triton.jit
def _choose_kernel(
    scores: tl.tensor,
    shares: tl.tensor,
    chosen: tl.tensor,
    COUNT: tl.constexpr,
    CHOSEN: tl.constexpr,
    NORMALIZED: tl.constexpr,
    BLOCK: tl.constexpr,
    PLACES: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    score = tl.load(scores + token * COUNT + expert, mask=expert < COUNT, other=float("-inf"))
    score = score.to(tl.float32)
    power = tl.exp(score - tl.max(score, axis=0))
    likely = power / tl.sum(power, axis=0)
    likely = tl.where(expert < COUNT, likely, -1.0)
    place = tl.arange(0, PLACES)
    numbers = tl.zeros([PLACES], tl.int32)
    parts = tl.zeros([PLACES], tl.float32)
    for turn in tl.static_range(CHOSEN):
        # Without a number among the scores, any expert is as good.
        best = tl.minimum(tl.argmax(likely, axis=0), COUNT - 1)
        numbers = tl.where(place == turn, best, numbers)
        parts = tl.where(place == turn, tl.max(likely, axis=0), parts)
        likely = tl.where(expert == best, -1.0, likely)
    if NORMALIZED:
        parts = parts / tl.sum(parts, axis=0)
    tl.store(shares + token * CHOSEN + place, parts, mask=place < CHOSEN)
    tl.store(chosen + token * CHOSEN + place, numbers, mask=place < CHOSEN)


@triton.jit
def _add_kernel(
    fed: tl.tensor,
    shares: tl.tensor,
    out: tl.tensor,
    hidden: tl.tensor,
    tiles: tl.tensor,
    CHOSEN: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    token = (tl.program_id(0) // tiles).to(tl.int64)
    column = tl.program_id(0) % tiles * BLOCK + tl.arange(0, BLOCK)
    inside = column < hidden
    total = tl.zeros([BLOCK], tl.float32)
    for turn in tl.static_range(CHOSEN):
        pair = token * CHOSEN + turn
        part = tl.load(fed + pair * hidden + column, mask=inside, other=0.0)
        total += tl.load(shares + pair) * part.to(tl.float32)
    tl.store(out + token * hidden + column, total.to(out.dtype.element_ty), mask=inside)

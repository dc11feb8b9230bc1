"""Mixtures of experts on the device: against the plain ones, and to the bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pdserve_engines.torch.cuda.invariant.experts import (
    choose_experts,
    feed_routed,
    group_by_expert,
)
from pdserve_engines.torch.cuda.invariant.linear import ROWS
from pdserve_engines.torch.model_loader.config import ExpertsConfig, SwigluConfig
from pdserve_engines.torch.models.experts import feed_experts, route_experts

HIDDEN, INNER, COUNT = 24, 16, 4
CONFIG = ExpertsConfig(COUNT, 3, INNER, normalized=True, dense_layers=())
CLAMPED = replace(CONFIG, bias=True, swiglu=SwigluConfig(alpha=1.702, limit=0.8))


def layer_of(config: ExpertsConfig, device: torch.device) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes: dict[str, tuple[int, ...]] = {
        "router": (COUNT, HIDDEN),
        "experts_gate_up": (COUNT * 2 * INNER, HIDDEN),
        "experts_down": (COUNT * HIDDEN, INNER),
    }
    if config.bias:
        shapes |= {f"{name}_bias": shape[:1] for name, shape in shapes.items()}
    return {
        name: torch.randn(shape, generator=generator).to(device) * 0.3
        for name, shape in shapes.items()
    }


def rows_of(count: int, device: torch.device) -> torch.Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(2)).to(device)


@pytest.mark.parametrize("config", [CONFIG, replace(CONFIG, normalized=False), CLAMPED])
def test_the_sum_is_that_of_torch(device: torch.device, config: ExpertsConfig) -> None:
    layer, x = layer_of(config, device), rows_of(5, device)
    expected = feed_experts(config, layer, x)
    torch.testing.assert_close(feed_routed(config, layer, x), expected, atol=1e-5, rtol=1e-5)


def test_a_token_has_the_same_bits_in_any_company(device: torch.device) -> None:
    """Also where an expert gets more tokens than a group holds."""
    layer, x = layer_of(CONFIG, device), rows_of(3, device)
    alone = torch.cat([feed_routed(CONFIG, layer, row.unsqueeze(0)) for row in x])
    for size in (2, 3):
        assert torch.equal(feed_routed(CONFIG, layer, x[:size]), alone[:size])
    crowd = torch.cat((x[:1].expand(ROWS, -1), x))
    assert torch.equal(feed_routed(CONFIG, layer, crowd)[-3:], alone)


@pytest.mark.parametrize("count", [4, 60, 128])
def test_the_likeliest_experts_are_chosen(device: torch.device, count: int) -> None:
    config = replace(CONFIG, count=count)
    scores = torch.randn(9, count, generator=torch.Generator().manual_seed(3)).to(device)
    shares, chosen = choose_experts(scores, 3, normalized=True)
    expected = route_experts(config, torch.eye(count, device=device), scores)
    assert chosen.tolist() == expected[1].tolist()
    torch.testing.assert_close(shares, expected[0])


def test_of_equal_experts_the_first_is_chosen(device: torch.device) -> None:
    _, chosen = choose_experts(torch.zeros(2, 60, device=device), 3, normalized=True)
    assert chosen.tolist() == [[0, 1, 2]] * 2


def test_a_token_without_numbers_chooses_something(device: torch.device) -> None:
    """Its request fails, and the others go on."""
    scores = torch.tensor([[torch.nan] * 6, [0.0, 1, 2, 3, 4, 5]], device=device)
    _, chosen = choose_experts(scores, 3, normalized=True)
    assert 0 <= int(chosen.min()) <= int(chosen.max()) < 6
    assert chosen[1].tolist() == [5, 4, 3]


def test_every_result_is_in_one_group_of_its_expert(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(4)
    for tokens in (1, 5, 3 * ROWS):
        chosen = torch.stack([torch.randperm(9, generator=generator)[:2] for _ in range(tokens)])
        chosen[: tokens // 2, 0] = 8
        routed = group_by_expert(chosen.int().to(device), 9)
        groups = routed.places.view(-1, ROWS).tolist()
        found: dict[int, int] = {}
        for places, expert in zip(groups, routed.experts.tolist(), strict=True):
            assert places[0] >= 0 or max(places) < 0, "a group without rows begins so"
            assert 0 <= expert < 9
            found |= dict.fromkeys([place for place in places if place >= 0], expert)
        assert [found[place] for place in range(2 * tokens)] == chosen.flatten().tolist()

"""Which experts a token gets and with which weights, and that its company does not matter."""

from __future__ import annotations

import pytest
import torch

from pdserve_engines.torch.model_loader.config import ExpertsConfig, SwigluConfig
from pdserve_engines.torch.models.experts import feed_experts, route_experts

HIDDEN, INNER, COUNT = 6, 4, 5


@pytest.mark.parametrize("normalized", [True, False])
def test_the_likeliest_experts_are_chosen_and_weighted(normalized: bool) -> None:
    config = ExpertsConfig(3, 2, INNER, normalized, ())
    router = torch.tensor([[0.0], [2.0], [1.0]])
    shares, chosen = route_experts(config, router, torch.tensor([[1.0], [-1.0]]))
    assert chosen.tolist() == [[1, 2], [0, 2]]
    likely = torch.tensor([0.0, 2.0, 1.0]).softmax(0)
    expected = likely[[1, 2]]
    if normalized:
        expected = expected / expected.sum()
    assert torch.allclose(shares[0], expected)


def test_a_token_gets_the_same_alone_and_in_a_crowd() -> None:
    """Also where nearly all want one expert: nobody is turned away."""
    generator = torch.Generator().manual_seed(3)
    config = ExpertsConfig(COUNT, 2, INNER, normalized=True, dense_layers=())
    layer = {
        "router": torch.randn(COUNT, HIDDEN, generator=generator),
        "experts_gate_up": torch.randn(COUNT * 2 * INNER, HIDDEN, generator=generator),
        "experts_down": torch.randn(COUNT * HIDDEN, INNER, generator=generator),
    }
    x = torch.randn(40, HIDDEN, generator=generator)
    x[5:35] = x[5] + torch.randn(30, HIDDEN, generator=generator) * 0.01
    together = feed_experts(config, layer, x)
    alone = torch.cat([feed_experts(config, layer, row[None]) for row in x])
    assert torch.allclose(together, alone, atol=1e-5)
    assert len(set(route_experts(config, layer["router"], x)[1][5:35].flatten().tolist())) < COUNT


def test_clamped_experts_with_biases_are_those_of_their_formula() -> None:
    swiglu = SwigluConfig(alpha=1.702, limit=0.8)
    config = ExpertsConfig(COUNT, 2, INNER, True, (), bias=True, swiglu=swiglu)
    generator = torch.Generator().manual_seed(5)
    shapes = {
        "router": (COUNT, HIDDEN),
        "router_bias": (COUNT,),
        "experts_gate_up": (COUNT * 2 * INNER, HIDDEN),
        "experts_gate_up_bias": (COUNT * 2 * INNER,),
        "experts_down": (COUNT * HIDDEN, INNER),
        "experts_down_bias": (COUNT * HIDDEN,),
    }
    layer = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    x = torch.randn(1, HIDDEN, generator=generator)
    logits = layer["router"] @ x[0] + layer["router_bias"]
    best = logits.topk(2)
    expected = torch.zeros(HIDDEN)
    for share, expert in zip(best.values.softmax(0), best.indices, strict=True):
        matrix = layer["experts_gate_up"].view(COUNT, 2, INNER, HIDDEN)[expert]
        gate, up = matrix @ x[0] + layer["experts_gate_up_bias"].view(COUNT, 2, INNER)[expert]
        assert (gate > 0.8).any() or (up.abs() > 0.8).any(), "the limit matters"
        gate, up = gate.clamp(max=0.8), up.clamp(-0.8, 0.8)
        fed = (up + 1) * gate * torch.sigmoid(1.702 * gate)
        down = layer["experts_down"].view(COUNT, HIDDEN, INNER)[expert] @ fed
        expected += share * (down + layer["experts_down_bias"].view(COUNT, HIDDEN)[expert])
    torch.testing.assert_close(feed_experts(config, layer, x)[0], expected)

"""Which experts a token gets and with which weights, and that its company does not matter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from pdserve_engines.torch.model_loader.config import ExpertsConfig, SwigluConfig
from pdserve_engines.torch.models import experts
from pdserve_engines.torch.models.experts import MOST_FEW, feed_experts, feed_few, route_experts

if TYPE_CHECKING:
    from collections.abc import Callable

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


@pytest.mark.parametrize("tokens", [1, 2, 3, 40, 128, 129, MOST_FEW])
@pytest.mark.parametrize("swiglu", [None, SwigluConfig(alpha=1.702, limit=0.8)])
def test_few_tokens_get_the_same_without_a_wait(
    tokens: int, swiglu: SwigluConfig | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gathered, and computed by all experts."""
    count, bias = 16, swiglu is not None
    config = ExpertsConfig(count, 2, INNER, True, (), bias=bias, swiglu=swiglu)
    generator = torch.Generator().manual_seed(tokens)
    shapes: dict[str, tuple[int, ...]] = {
        "router": (count, HIDDEN),
        "experts_gate_up": (count * 2 * INNER, HIDDEN),
        "experts_down": (count * HIDDEN, INNER),
    }
    if bias:
        shapes |= {
            "router_bias": (count,),
            "experts_gate_up_bias": (count * 2 * INNER,),
            "experts_down_bias": (count * HIDDEN,),
        }
    layer = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    x = torch.randn(tokens, HIDDEN, generator=generator)
    expected = feed_experts(config, layer, x)
    ways: list[str] = []

    def noted(name: str, whole: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def compute(*args: Any) -> torch.Tensor:
            ways.append(name)
            return whole(*args)

        return compute

    for name in ("_feed_gathered", "_feed_all"):
        monkeypatch.setattr(experts, name, noted(name, getattr(experts, name)))
    torch.testing.assert_close(feed_few(config, layer, x), expected, atol=1e-5, rtol=1e-5)
    all_compute = ["_feed_all"] * -(-tokens // 128)
    assert ways == (["_feed_gathered"] if tokens <= 2 else all_compute)


def test_an_expert_that_nobody_chose_may_overflow() -> None:
    config = ExpertsConfig(3, 1, 2, True, ())
    layer = {
        "router": torch.tensor([[5.0], [0.0], [0.0]]),
        "experts_gate_up": torch.tensor([1.0] * 4 + [1e38] * 8).view(-1, 1),
        "experts_down": torch.ones(3, 2),
    }
    x = torch.full((9, 1), 30.0)
    found = feed_few(config, layer, x)
    assert torch.isfinite(found).all()
    torch.testing.assert_close(found, feed_experts(config, layer, x))

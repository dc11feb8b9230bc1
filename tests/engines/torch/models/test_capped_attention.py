"""Bounded scores against their formula, in any slices."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from pdserve_engines.torch.models import capped_attention
from pdserve_engines.torch.models.capped_attention import attend_capped


def by_formula(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor, cap: float
) -> torch.Tensor:
    scores = queries @ keys.transpose(2, 3) * 0.3
    return ((scores / cap).tanh() * cap + bias).softmax(-1) @ values


@pytest.mark.parametrize("at_once", [1, 6 * 21 * 3, 1 << 20])
@pytest.mark.parametrize("form", ["mask", "bias", "nothing"])
def test_scores_are_bounded(monkeypatch: pytest.MonkeyPatch, at_once: int, form: str) -> None:
    monkeypatch.setattr(capped_attention, "SCORES_AT_ONCE", at_once)
    generator = torch.Generator().manual_seed(1)
    queries, keys, values = (
        torch.randn(3, 2, rows, 16, generator=generator) * 3 for rows in (7, 21, 21)
    )
    mask = torch.rand(3, 1, 7, 21, generator=generator) < 0.7
    bias = torch.zeros(3, 1, 7, 21)
    if form != "nothing":
        bias.masked_fill_(~mask, -torch.inf)
    given = {"mask": mask, "bias": bias, "nothing": None}[form]
    found = attend_capped(queries, keys, values, given, 0.3, 5.0)
    torch.testing.assert_close(found, by_formula(queries, keys, values, bias, 5.0))
    plain = functional.scaled_dot_product_attention(queries, keys, values, bias, scale=0.3)
    assert (found - plain).abs().max() > 0.1, "the bound matters"
    wide = attend_capped(queries, keys, values, given, 0.3, 1e5)
    torch.testing.assert_close(wide, plain, atol=1e-3, rtol=1e-3)

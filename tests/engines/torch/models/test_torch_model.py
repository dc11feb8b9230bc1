"""The rotary embedding in few operations has the bits of its formula."""

from __future__ import annotations

import pytest
import torch

from pdserve_engines.torch.models.torch_model import _angles, _rotate


def by_formula(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Each half of a head by itself, in float32."""
    first, second = x.float().chunk(2, dim=-1)
    halves = (first * cosines - second * sines, second * cosines + first * sines)
    return torch.cat(halves, dim=-1).to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 5])
def test_heads_are_turned_in_place_to_the_bit(dtype: torch.dtype, tokens: int) -> None:
    generator = torch.Generator().manual_seed(tokens)
    heads = torch.randn(tokens, 10, 64, generator=generator).to(dtype)
    table = torch.randn(tokens, 2, 32, generator=generator)
    turned, rest = heads[:, :8], heads[:, 8:].clone()
    expected = by_formula(turned, *table.unsqueeze(1).unbind(2))
    _rotate(turned, *_angles(table), out=turned)
    assert torch.equal(turned, expected)
    assert torch.equal(heads[:, 8:], rest)


def test_heads_that_were_normed_are_written_where_the_values_are() -> None:
    heads = torch.randn(3, 6, 16)
    normed, table = torch.randn(3, 4, 16), torch.randn(3, 2, 8)
    kept = normed.clone()
    _rotate(normed, *_angles(table), out=heads[:, :4])
    assert torch.equal(heads[:, :4], by_formula(kept, *table.unsqueeze(1).unbind(2)))
    assert torch.equal(normed, kept)

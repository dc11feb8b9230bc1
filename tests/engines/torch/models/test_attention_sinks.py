"""Sinks as one more key, against the softmax that they are defined by."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from pdserve_engines.torch.models.attention_sinks import with_sink_key, with_sinks

HEADS, ROWS, LENGTH, DIM = 6, 5, 13, 16
SCALE = 0.3


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def by_definition(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, sinks: torch.Tensor
) -> torch.Tensor:
    """The last of the queries sees all keys, each before it one less."""
    seen = torch.arange(LENGTH) <= torch.arange(LENGTH - ROWS, LENGTH)[:, None]
    scores = (queries @ keys.transpose(1, 2) * SCALE).masked_fill(~seen, -torch.inf)
    column = sinks[:, None, None].expand(HEADS, ROWS, 1)
    return torch.cat((scores, column), dim=-1).softmax(-1)[..., :-1] @ values


@pytest.mark.filterwarnings("ignore:.*")  # the CPU has no causal kernel, and torch says so
@pytest.mark.parametrize("form", ["mask", "causal"])
def test_a_sink_takes_its_part_of_the_weights(form: str) -> None:
    # Imports torch's compiler, which collecting the tests would take a second longer for.
    from torch.nn.attention.bias import causal_lower_right

    queries, keys, values = (
        drawn(seed, HEADS, rows, DIM) for seed, rows in enumerate((ROWS, LENGTH, LENGTH))
    )
    sinks = drawn(9, HEADS) * 3
    wide = with_sinks(queries.transpose(0, 1), sinks, SCALE).transpose(0, 1)
    wide_keys, wide_values = with_sink_key(keys[None], values[None])
    mask: Any = causal_lower_right(ROWS, LENGTH + 1)
    if form == "mask":
        seen = torch.arange(LENGTH) <= torch.arange(LENGTH - ROWS, LENGTH)[:, None]
        mask = functional.pad(seen, (1, 0), value=True)
    found = functional.scaled_dot_product_attention(
        wide[None], wide_keys, wide_values, attn_mask=mask, scale=SCALE
    )[0]
    expected = by_definition(queries, keys, values, sinks)
    torch.testing.assert_close(found[..., :DIM], expected)
    assert not found[..., DIM:].any()
    plain = by_definition(queries, keys, values, torch.full((HEADS,), -torch.inf))
    assert (expected - plain).abs().max() > 0.1, "the sinks matter"

"""Both ways to find a nucleus are one: by sorting, and by counting, which a device can do alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pdserve.messages.request import SamplingParams
from pdserve_engines.torch.sampling import filters
from pdserve_engines.torch.sampling.filters import (
    border_by_counting,
    border_by_sorting,
    filter_,
)
from pdserve_engines.torch.sampling.row_params import RowFilters

CPU = torch.device("cpu")
SHARES = [0.05, 0.3, 0.5, 0.75, 0.9, 0.95, 0.999, 1.0 - 2**-24]


@given(
    st.lists(st.integers(0, 8).map(lambda n: 2.0 ** (-n - 3) if n else 0.0), min_size=2).filter(
        any
    ),
    st.sampled_from([0.125, 0.25, 0.5, 0.75, 0.9375, 2**-20]),
)
def test_borders_are_equal_where_sums_are_exact(row: list[float], share: float) -> None:
    """Ties, zeros, and shares that a prefix covers exactly."""
    probabilities, shares = torch.tensor([row]), torch.tensor([[share]])
    expected = border_by_sorting(probabilities, shares)
    assert torch.equal(border_by_counting(probabilities, shares), expected)


@pytest.mark.parametrize("vocab", [3, 130, 5000])
def test_borders_are_equal_but_for_the_rounding_of_sums(vocab: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed % 2**63)
    spread = torch.tensor([0.0, 0.01, 0.3, 1.0, 3.0, 10.0, 40.0])[:, None, None]
    logits = torch.randn(7, len(SHARES), vocab, generator=generator) * spread
    probabilities = logits.flatten(0, 1).softmax(-1)
    shares = torch.tensor(SHARES).repeat(7)[:, None]
    found = border_by_counting(probabilities, shares)
    expected = border_by_sorting(probabilities, shares)
    for row, low, high in zip(
        probabilities.double(),
        torch.minimum(found, expected),
        torch.maximum(found, expected),
        strict=True,
    ):
        between = row[(row >= low) & (row < high)]
        assert float(between.sum()) <= 2**-24 + between.numel() * 2**-60
    assert int((found != expected).sum()) <= 2
    assert torch.isin(found, probabilities).all()


def test_a_border_is_that_of_the_row_alone(seed: int) -> None:
    """To the last bit, and in whatever order the row lies: integers are summed."""
    generator = torch.Generator().manual_seed(seed % 2**63)
    probabilities = (torch.randn(6, 3000, generator=generator) * 2).softmax(-1)
    shares = torch.tensor(SHARES[:6])[:, None]
    together = border_by_counting(probabilities, shares)
    order = torch.randperm(3000, generator=generator)
    for row in range(6):
        one = probabilities[row : row + 1][:, order]
        assert torch.equal(border_by_counting(one, shares[row : row + 1])[0], together[row])


def test_a_row_without_numbers_spoils_no_other() -> None:
    probabilities = torch.full((3, 40), 1 / 40)
    probabilities[1] = torch.nan
    borders = border_by_counting(probabilities, torch.full((3, 1), 0.5))
    assert borders[0] == borders[2] == probabilities[0, 0]


@pytest.mark.parametrize("rows", [[True, True], [True, False]])
def test_a_device_filters_the_same(monkeypatch: pytest.MonkeyPatch, rows: list[bool]) -> None:
    """After min_p and top_k have left less than the whole, and in some rows only."""
    params = [
        SamplingParams(max_tokens=1, min_p=0.001, top_k=30, top_p=0.8 if wants else 1.0)
        for wants in rows
    ]
    torch.manual_seed(1)
    host = torch.randn(2, 200).softmax(-1)
    device = host.clone()
    filter_(host, RowFilters.of(params, CPU, 200))
    monkeypatch.setattr(filters, "border_by_sorting", border_by_counting)
    filter_(device, RowFilters.of(params, CPU, 200))
    assert torch.equal(host, device)
    assert 0 < int((host[0] > 0).sum()) < 30

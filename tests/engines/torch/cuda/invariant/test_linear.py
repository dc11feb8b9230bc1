"""A row by a matrix: the same bits alone, in any company and at any place."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from pdserve_engines.torch.cuda.invariant.linear import (
    ROWS,
    ExpertRows,
    linear,
    linear_by_expert,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3}
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16])


def drawn(*size: int, device: torch.device, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, generator=generator).to(device=device, dtype=dtype)


def check_rows(product: Product, x: torch.Tensor, weight: torch.Tensor) -> None:
    """Rows alone, in batches of 2, 3 and 8, and at every place of a batch."""
    alone = torch.cat([product(x[row : row + 1], weight) for row in range(8)])
    for size in (2, 3, 8, len(x)):
        assert torch.equal(product(x[:size], weight)[:8], alone[:size])
    for place in range(8):
        assert torch.equal(product(x[:8].roll(place, 0), weight), alone.roll(place, 0))


@DTYPES
def test_a_product_is_that_of_float64(device: torch.device, dtype: torch.dtype) -> None:
    """Sizes that fill no tile, with a bias and without."""
    for rows, columns, depth in ((1, 5, 40), (ROWS + 3, 70, 200)):
        x, weight, bias = (
            drawn(*size, device=device, dtype=dtype)
            for size in ((rows, depth), (columns, depth), (columns,))
        )
        for added in (None, bias):
            expected = x.double() @ weight.double().T / depth
            found = linear(x, weight, added).double() / depth
            expected += 0 if added is None else added.double() / depth
            assert (found - expected).abs().max() < TOLERANCE[dtype]


@DTYPES
def test_a_row_has_the_same_bits_in_any_company(device: torch.device, dtype: torch.dtype) -> None:
    x = drawn(ROWS + 7, 200, device=device, dtype=dtype)
    check_rows(linear, x, drawn(40, 200, device=device, dtype=dtype, seed=1))


def test_a_row_has_the_same_bits_wherever_it_lies_in_memory(device: torch.device) -> None:
    x, weight = (drawn(4, 33, device=device, dtype=torch.float32, seed=seed) for seed in (0, 1))
    expected = linear(x, weight)
    for row in range(4):
        assert torch.equal(linear(x[row : row + 1], weight), expected[row : row + 1])
    assert torch.equal(linear(x.T.contiguous().T, weight), expected)


def test_a_sum_that_is_divided_in_small_batches_is_found(device: torch.device) -> None:
    """As split-K does, for more programs than a few rows have."""

    def divided(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if len(x) > 2:
            return linear(x, weight)
        half = x.shape[1] // 2
        first, second = (
            linear(x[:, part].contiguous(), weight[:, part].contiguous())
            for part in (slice(0, half), slice(half, None))
        )
        return first + second

    x, weight = (drawn(9, 200, device=device, dtype=torch.float32, seed=seed) for seed in (0, 1))
    check_rows(linear, x, weight)
    with pytest.raises(AssertionError):
        check_rows(divided, x, weight)


@DTYPES
def test_each_result_has_the_matrix_of_its_expert(device: torch.device, dtype: torch.dtype) -> None:
    """Also where a group has no rows, and its expert means nothing."""
    x, weight, bias = (
        drawn(*size, device=device, dtype=dtype) for size in ((3, 40), (4, 6, 40), (4, 6))
    )
    places = torch.full((3 * ROWS,), -1, dtype=torch.int32, device=device)
    places[:2] = torch.tensor([4, 1])
    places[2 * ROWS : 2 * ROWS + 4] = torch.tensor([0, 2, 3, 5])
    experts = torch.tensor([3, 99, 1], dtype=torch.int32, device=device)
    found = linear_by_expert(x, weight, bias, ExpertRows(places, experts), 2)
    for result, expert in enumerate((1, 3, 1, 1, 3, 1)):
        expected = linear(x[result // 2 :][:1], weight[expert], bias[expert])
        assert torch.equal(found[result], expected[0])


def test_no_rows_are_no_work(device: torch.device) -> None:
    weight = torch.empty(3, 8, device=device)
    assert linear(weight[:0], weight).shape == (0, 3)

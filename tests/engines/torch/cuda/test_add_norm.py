"""The sum and its norm, against torch's."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from pdserve_engines.torch.cuda.add_norm import add_norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("size", [16, 72, 130])
def test_a_sum_is_kept_and_normed(device: torch.device, dtype: torch.dtype, size: int) -> None:
    x, delta = torch.randn(2, 5, size, device=device, dtype=dtype)
    weight = torch.rand(size, device=device, dtype=dtype)
    total = x + delta
    found = add_norm(x, delta, weight, 1e-3)
    assert torch.equal(x, total)
    expected = functional.rms_norm(total.float(), (size,), weight.float(), 1e-3)
    torch.testing.assert_close(found, expected.to(dtype))
    # A sum that is normed before it is rounded differs in the last bit of every other number.
    assert (found - expected.to(dtype) == 0).float().mean() > (0.8 if dtype.itemsize == 2 else 0)


def test_without_a_sum_the_input_stays(device: torch.device) -> None:
    x, weight = torch.randn(3, 40, device=device), torch.rand(40, device=device)
    kept = x.clone()
    torch.testing.assert_close(
        add_norm(x, None, weight, 0.5), functional.rms_norm(kept, (40,), weight, 0.5)
    )
    assert torch.equal(x, kept)


def test_weights_may_be_wider_than_rows(device: torch.device) -> None:
    """Gemma's are float32, and one is added to them: rounding them would lose what they say."""
    x = torch.randn(3, 40, device=device, dtype=torch.float16)
    weight = 1 + torch.rand(40, device=device) / 1000
    found = add_norm(x, None, 300 * weight, 1e-6)
    expected = functional.rms_norm(x.float(), (40,), 300 * weight, 1e-6).half()
    assert torch.equal(found, expected)


def test_no_rows(device: torch.device) -> None:
    assert add_norm(
        torch.empty(0, 40, device=device), None, torch.ones(40, device=device), 0.1
    ).shape == (0, 40)

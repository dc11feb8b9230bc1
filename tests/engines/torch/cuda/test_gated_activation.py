"""The feed-forward's gate, against torch's."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from pdserve_engines.torch.cuda import gated_activation as module
from pdserve_engines.torch.cuda.gated_activation import gated_activation


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize("size", [32, 70])
def test_the_first_half_gates_the_second(
    device: torch.device,
    dtype: torch.dtype,
    gelu: bool,
    size: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_BLOCK", 32)  # one tile, and three of which the last is partial
    gate_up = 4 * torch.randn(5, 2 * size, device=device, dtype=dtype)
    gate, up = gate_up.float().chunk(2, dim=-1)
    active = functional.gelu(gate, approximate="tanh") if gelu else functional.silu(gate)
    torch.testing.assert_close(gated_activation(gate_up, gelu=gelu), (active * up).to(dtype))


def test_no_rows(device: torch.device) -> None:
    assert gated_activation(torch.empty(0, 64, device=device)).shape == (0, 32)

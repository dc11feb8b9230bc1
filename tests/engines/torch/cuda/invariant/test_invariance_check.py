"""The comparison while an engine loads: silent if rows are alone, and it names what mixes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pdserve_engines.torch.cuda.invariant import invariance_check
from pdserve_engines.torch.cuda.invariant.invariance_check import varying_kernel
from pdserve_engines.torch.model_loader.config import parse_config
from pdserve_engines.torch.settings import TorchSettings
from tests.engines.torch.cuda.test_kernel_model import FAMILIES

CONFIG = parse_config(
    FAMILIES["mixtral"] | {"hidden_size": 16, "head_dim": 8, "intermediate_size": 16}
)
PLAIN = parse_config(FAMILIES["llama"])


@pytest.fixture(autouse=True)
def few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes seconds for some hundred tokens."""
    monkeypatch.setattr(invariance_check, "_LENGTH", 18)


def settings_of(device: torch.device) -> TorchSettings:
    return TorchSettings(device, torch.float32, 1, 600, "invariant")


def test_kernels_that_compute_rows_alone_pass(device: torch.device) -> None:
    assert varying_kernel(CONFIG, settings_of(device)) is None


@pytest.mark.parametrize(
    ("name", "kernel"),
    [("linear", "products"), ("feed_routed", "experts"), ("attend_tiles", "attention")],
)
def test_a_kernel_that_mixes_rows_is_named(
    device: torch.device, name: str, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One number, by the last bit or so, in batches of some size."""
    whole = getattr(invariance_check, name)

    def mixing(*args: Any) -> Any:
        found = whole(*args)
        rows = args[1] if name == "attend_tiles" else found
        if name != "attend_tiles" or len(args[3].rows) < 18:
            rows[-1, -1] *= 1 + 1e-6 * (len(rows) > 1)
        return found

    monkeypatch.setattr(invariance_check, name, mixing)
    found = varying_kernel(CONFIG, settings_of(device))
    assert found == f"the kernel for {kernel} computes a row otherwise beside other rows"


def test_a_kernel_that_does_not_compile_is_named(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: Any) -> Any:
        raise RuntimeError("PassManager::run failed")

    monkeypatch.setattr(invariance_check, "linear", fails)
    found = varying_kernel(PLAIN, settings_of(device))
    assert found == "the kernel for products fails: RuntimeError: PassManager::run failed"

"""The comparison while an engine loads: silent if the kernels are right, and it names one that is
not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pdserve_engines.torch.cuda import decode_attention, decode_plan, kernel_check
from pdserve_engines.torch.cuda.kernel_check import failing_kernel
from pdserve_engines.torch.model_loader.config import parse_config
from pdserve_engines.torch.settings import TorchSettings
from tests.engines.torch.cuda.test_kernel_model import LLAMA

CONFIG = parse_config(LLAMA)


@pytest.fixture(autouse=True)
def few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes seconds for some hundred tokens."""
    monkeypatch.setattr(decode_plan, "SEGMENT", 16)
    monkeypatch.setattr(decode_attention, "SEGMENT", 16)
    monkeypatch.setattr(kernel_check, "_LENGTHS", (1, 19))
    monkeypatch.setattr(decode_attention, "_tiles", lambda *sizes: TILES, raising=True)


TILES = {"ROWS": 16, "DIMS": 32, "TILE": 16, "num_warps": 4, "num_stages": 3}


def settings_of(device: torch.device) -> TorchSettings:
    return TorchSettings(device, torch.float32, 1, 600)


def test_right_kernels_pass(device: torch.device) -> None:
    assert failing_kernel(CONFIG, settings_of(device)) is None


@pytest.mark.parametrize(
    ("name", "kernel"),
    [
        ("add_norm", "norm"),
        ("gated_activation", "activation"),
        ("rotate_store", "attention"),
        ("attend_decodes", "attention"),
    ],
)
def test_a_wrong_kernel_is_named(
    device: torch.device, name: str, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(*args: Any, **kwargs: Any) -> Any:
        return args[0][..., : CONFIG.intermediate_size] if name == "gated_activation" else args[0]

    monkeypatch.setattr(kernel_check, name, wrong)
    found = failing_kernel(CONFIG, settings_of(device))
    assert found is not None
    assert found.startswith(f"the kernel for {kernel} ")


def test_a_kernel_that_does_not_compile_is_named(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("PassManager::run failed")

    monkeypatch.setattr(kernel_check, "rotate_store", fails)
    found = failing_kernel(CONFIG, settings_of(device))
    assert found == "the kernel for attention fails: RuntimeError: PassManager::run failed"

"""Which models the kernels compute. `test_kernel_model.py` shows that they do."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest

from pdserve_engines.torch.cuda.support import unsupported_reason
from pdserve_engines.torch.model_loader.config import ModelConfig, parse_config
from tests.engines.torch.cuda.test_kernel_model import LLAMA

CONFIG = parse_config(LLAMA)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (replace(CONFIG, sinks=True), "they know no sinks, which llama has"),
        (replace(CONFIG, layer_norms=True), "they know no layer_norms, which llama has"),
        (replace(CONFIG, whole_qk_norm=True), "they know no whole_qk_norm, which llama has"),
        (replace(CONFIG, parallel=True), "they know no parallel, which llama has"),
        (replace(CONFIG, head_dim=258), "its heads have more than 256 dimensions"),
        (
            replace(CONFIG, num_heads=66, kv_heads=2),
            "more than 32 of its query heads share a KV head",
        ),
        (replace(CONFIG, head_dim=256, sliding_window=9, embed_scale=3.0), None),
    ],
)
def test_what_they_do_not_know_is_named(config: ModelConfig, reason: str | None) -> None:
    assert unsupported_reason(config) == reason


def test_without_triton_there_are_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert unsupported_reason(CONFIG) == "Triton is not installed"

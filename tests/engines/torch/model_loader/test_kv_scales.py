"""Scales of keys and values under the names of two tools."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import save_file

from pdserve.errors import UnsupportedCheckpoint
from pdserve_engines.torch.model_loader.kv_scales import KvScales, take_kv_scales
from pdserve_engines.torch.model_loader.safetensors_reader import Checkpoint

if TYPE_CHECKING:
    from pathlib import Path

PLAIN = ("k_scale", "v_scale")
MODELOPT = ("k_proj.k_scale", "v_proj.v_scale")


def taken(directory: Path, tensors: dict[str, torch.Tensor]) -> tuple[KvScales, list[str]]:
    """The scales of a model of two layers, and the names of the tensors that are left."""
    rest = {"model.norm.weight": torch.ones(2)}
    named = {f"model.layers.{name}": tensor for name, tensor in tensors.items()}
    save_file(rest | named, directory / "model.safetensors")
    with Checkpoint(directory) as checkpoint:
        return take_kv_scales(checkpoint, 2), list(checkpoint.entries)


@pytest.mark.parametrize("names", [PLAIN, MODELOPT])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_scales_are_taken_out(
    tmp_path: Path, names: tuple[str, str], shape: tuple[int, ...]
) -> None:
    tensors = {
        f"{layer}.self_attn.{name}": torch.full(shape, 1.5 + 2 * layer + part)
        for layer in range(2)
        for part, name in enumerate(names)
    }
    found, left = taken(tmp_path, tensors)
    assert found == ((1.5, 2.5), (3.5, 4.5))
    assert left == ["model.norm.weight"]


def test_most_checkpoints_have_none(tmp_path: Path) -> None:
    assert taken(tmp_path, {}) == ((), ["model.norm.weight"])


@pytest.mark.parametrize(
    "bad", [torch.zeros(1), torch.tensor(torch.inf), torch.ones(4), torch.ones(0)]
)
def test_a_scale_is_one_positive_number(tmp_path: Path, bad: torch.Tensor) -> None:
    tensors = {f"{layer}.self_attn.{name}": torch.ones(1) for layer in range(2) for name in PLAIN}
    with pytest.raises(UnsupportedCheckpoint, match=r"layers.1.self_attn.k_scale: a scale of keys"):
        taken(tmp_path, tensors | {"1.self_attn.k_scale": bad})


def test_all_layers_have_scales_or_none(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedCheckpoint, match=r"layers.0.self_attn.v_scale is missing"):
        taken(tmp_path, {"0.self_attn.k_scale": torch.ones(1)})

"""Experts stored as one tensor per layer: in bfloat16 or float32 as they are, or in MXFP4."""

from __future__ import annotations

import functools
import json
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pdserve.errors import UnsupportedCheckpoint
from pdserve_engines.torch.executor import TorchExecutor
from pdserve_engines.torch.model_loader.mxfp4 import dequantise
from pdserve_engines.torch.model_loader.stacked_experts import StackedExperts
from tests.engines.torch.checkpoints import Tiny, build, checkpoint, kernels_of, oracle_generate
from tests.engines.torch.driver import Driver, loaded, spec
from tests.engines.torch.mxfp4 import quantise

if TYPE_CHECKING:
    from collections.abc import Callable

Tensors = dict[str, torch.Tensor]
EXPERTS = "model.layers.1.mlp.experts."
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "head_dim": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 12,
}


@functools.cache
def quantised() -> tuple[Path, Any]:
    """(directory, `transformers` model) of a checkpoint in MXFP4, as OpenAI's are; the model has
    what the format leaves of its weights."""
    model = build(Tiny("GptOss", SIZES, seed=4))
    directory = Path(_home().name)
    model.save_pretrained(directory)
    tensors = load_file(directory / "model.safetensors")
    weights = model.state_dict()
    for name in [name for name in tensors if name.endswith("_proj") and "experts" in name]:
        rows = tensors.pop(name).transpose(1, 2).contiguous()
        blocks, scales = quantise(rows)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        made = torch.stack([dequantise(*pair) for pair in zip(blocks, scales, strict=True)])
        weights[name].copy_(made.transpose(1, 2))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    change_config(directory, quantization_config={"quant_method": "mxfp4"})
    return directory, model


@functools.cache
def _home() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="pdserve-test-")


def change_config(directory: Path, **fields: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def output(directory: Path, kernels: str, prompt: list[int]) -> list[int]:
    executor = loaded(directory, options={"kernels": kernels})
    driver = Driver(executor)
    sequence = driver.add(prompt)
    driver.finish([sequence], 12, chunk=9)
    executor.close()
    return sequence.output


@pytest.mark.parametrize("kernels", kernels_of("gpt_oss"))
def test_quantised_experts_give_the_tokens_of_transformers(kernels: str) -> None:
    directory, model = quantised()
    prompt = [(7 * place) % 160 for place in range(40)]
    assert output(directory, kernels, prompt) == oracle_generate(model, prompt, 12)


def changed(tmp_path: Path, change: Callable[[Tensors], object], **config: Any) -> Path:
    """A copy of the quantised checkpoint with its tensors edited."""
    directory = tmp_path / "changed"
    shutil.copytree(quantised()[0], directory)
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    change_config(directory, **config)
    return directory


@pytest.mark.parametrize(
    ("change", "config", "complaint"),
    [
        (lambda t: t.pop(f"{EXPERTS}gate_up_proj_scales"), {}, "gate_up_proj_scales is missing"),
        (
            lambda t: t.update({f"{EXPERTS}down_proj_blocks": torch.zeros(4, 64, 2, 16).byte()}),
            {},
            "down_proj_blocks has shape [4, 64, 2, 16], expected [4, 64, 3, 16]",
        ),
        (
            lambda t: t.update({f"{EXPERTS}down_proj_scales": torch.zeros(4, 64, 3)}),
            {},
            "down_proj_scales has dtype F32, supported are U8",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(64).byte()}),
            {},
            "model.norm.weight has dtype U8, supported are F32, BF16, F16",
        ),
        (lambda _: None, {"quantization_config": {"quant_method": "awq"}}, "(awq)"),
        (lambda _: None, {"quantization_config": None}, "MXFP4"),
        (lambda _: None, {"intermediate_size": 80}, "80 is no multiple of MXFP4's 32"),
    ],
)
def test_what_does_not_fit_is_named(
    tmp_path: Path, change: Callable[[Tensors], object], config: dict[str, Any], complaint: str
) -> None:
    executor = TorchExecutor()
    with pytest.raises(UnsupportedCheckpoint) as error:
        executor.load(spec(changed(tmp_path, change, **config)), lambda stage, fraction: None)
    assert complaint in error.value.message


def test_a_directory_in_bfloat16_is_read_as_it_is(tmp_path: Path) -> None:
    """The same tokens as from the numbers that bfloat16 leaves, in float32."""
    directories = []
    for name, dtype in (("short", torch.bfloat16), ("long", torch.float32)):
        directory = tmp_path / name
        shutil.copytree(checkpoint("gpt_oss")[0], directory)
        tensors = load_file(directory / "model.safetensors")
        rounded = {key: value.bfloat16().to(dtype) for key, value in tensors.items()}
        save_file(rounded, directory / "model.safetensors", metadata={"format": "pt"})
        directories.append(directory)
    short, long = (output(directory, "auto", list(range(30))) for directory in directories)
    assert short == long


def test_experts_are_read_one_by_one_in_the_order_of_the_parts() -> None:
    stacked = StackedExperts("e.gate_up", 3, rows=4, cols=2, paired=True, interleaved=True)
    whole = torch.arange(24.0).view(3, 2, 4)
    parts = list(stacked.read({"e.gate_up": whole}.__getitem__))
    assert [tuple(part.shape) for part in parts] == [shape for _, shape in stacked.parts]
    assert len({name for name, _ in stacked.parts}) == 6
    assert parts[2].tolist() == [[8, 12], [10, 14]]
    assert parts[3].tolist() == [[9, 13], [11, 15]]
    biases = replace(stacked, name="e.gate_up_bias", cols=0)
    read = list(biases.read({"e.gate_up_bias": torch.arange(12.0).view(3, 4)}.__getitem__))
    assert [part.tolist() for part in read[2:4]] == [[4, 6], [5, 7]]


@pytest.mark.parametrize("by_rows", [False, True])
def test_the_second_matrix_may_follow_the_first(by_rows: bool) -> None:
    stacked = StackedExperts("e.gate_up", 3, rows=4, cols=2, paired=True, by_rows=by_rows)
    ((name, shape),) = stacked.stored.items()
    assert shape == ((3, 4, 2) if by_rows else (3, 2, 4))
    parts = list(stacked.read({name: torch.arange(24.0).view(shape)}.__getitem__))
    assert [tuple(part.shape) for part in parts] == [shape for _, shape in stacked.parts]
    first, second = parts[2].tolist(), parts[3].tolist()
    assert first == ([[8, 9], [10, 11]] if by_rows else [[8, 12], [9, 13]])
    assert second == ([[12, 13], [14, 15]] if by_rows else [[10, 14], [11, 15]])

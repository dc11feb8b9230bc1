"""FP8 checkpoints that compressed-tensors writes, against its own forward pass; and by hand."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pdserve.errors import UnsupportedCheckpoint
from pdserve_engines.torch.executor import TorchExecutor
from pdserve_engines.torch.model_loader.safetensors_reader import Checkpoint
from pdserve_engines.torch.model_loader.weight_formats.float8 import (
    Float8,
    dequantise,
    parse_compressed_tensors,
    parse_fp8,
)
from tests.engines.torch.checkpoints import TINY, Tiny, build, oracle_logprobs
from tests.engines.torch.driver import spec
from tests.engines.torch.full_logprobs import full_logprobs

if TYPE_CHECKING:
    from pathlib import Path

PROMPT = [7 * n % 150 + 1 for n in range(30)]
WEIGHTS = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
ACTIVATIONS = WEIGHTS | {"strategy": "token", "dynamic": True}
BLOCK = [16, 20]
"""It divides neither all rows nor all columns."""
STRATEGIES: dict[str, dict[str, Any]] = {
    "tensor": {},
    "channel": {},
    "group": {"group_size": 24},
    "block": {"block_structure": BLOCK},
}


def written(directory: Path, tiny: Tiny, strategy: str) -> Any:
    """Write a checkpoint with compressed-tensors, and return its decompressed model. Scales come
    from the weights alone; the first layer's attention and the output layer stay as they are."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, disable_quantization
    from compressed_tensors.quantization.lifecycle import apply_quantization_config
    from tqdm import tqdm

    tqdm.monitor_interval = 0  # its bars would come with a thread that outlives the test
    model = build(tiny)
    group = {
        "targets": ["Linear"],
        "weights": WEIGHTS | {"strategy": strategy} | STRATEGIES[strategy],
        "input_activations": ACTIVATIONS if strategy in ("channel", "block") else None,
    }
    config = QuantizationConfig(
        config_groups={"group_0": group}, ignore=["lm_head", r"re:.*layers\.0\.self_attn.*"]
    )
    apply_quantization_config(model, config)
    for module in model.modules():
        if getattr(module, "quantization_scheme", None) is not None:
            set_scales(module)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(directory)
    compressor.update_config(str(directory))
    compressor.decompress_model(model)
    model.apply(disable_quantization)  # of activations, which the engine never rounds
    return model


def set_scales(module: Any) -> None:
    """Scales by which the largest weight of each part becomes FP8's largest number."""
    scale, weight = module.weight_scale, module.weight
    grid = scale.shape if scale.dim() == 2 else (1, 1)
    rows, columns = weight.shape
    height, width = -(-rows // grid[0]), -(-columns // grid[1])
    if module.quantization_scheme.weights.strategy == "block":
        height, width = BLOCK
    for row in range(grid[0]):
        for column in range(grid[1]):
            part = weight[row * height : (row + 1) * height, column * width : (column + 1) * width]
            scale.data.view(grid)[row, column] = part.abs().max() / 448


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_logits_are_those_of_compressed_tensors(tmp_path: Path, strategy: str) -> None:
    tiny = Tiny("Llama", {"num_attention_heads": 6}, seed=len(strategy))
    model = written(tmp_path, tiny, strategy)
    stored = {tensor.dtype for tensor in load_file(tmp_path / "model.safetensors").values()}
    assert torch.float8_e4m3fn in stored
    expected = oracle_logprobs(model, PROMPT)[-1]
    for kernels in ("auto", "torch"):
        found = full_logprobs(tmp_path, PROMPT, options={"kernels": kernels})
        assert (found - expected).abs().max() < 1e-3
    plain = oracle_logprobs(build(tiny), PROMPT)[-1]
    assert (found - plain).abs().max() > 1e-2, "rounding to FP8 has to show"


def quantise_by_hand(directory: Path, model: Any, block: tuple[int, int]) -> None:
    """Write `model` by the method `fp8` of transformers: all projections of its layers by blocks.
    The model gets the weights that the checkpoint stands for."""
    scales: dict[str, torch.Tensor] = {}
    values: dict[str, torch.Tensor] = {}
    model.save_pretrained(directory)
    tensors = load_file(directory / "model.safetensors")
    for name, weight in tensors.items():
        if ".layers." not in name or weight.dim() != 2 or name.endswith("gate.weight"):
            continue
        grid = (-(-weight.shape[0] // block[0]), -(-weight.shape[1] // block[1]))
        scales[f"{name}_scale_inv"] = scale = torch.rand(grid) / 500 + 1e-3
        wide = scale.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
        wide = wide[: weight.shape[0], : weight.shape[1]]
        values[name] = (weight / wide).clamp(-448, 448).to(torch.float8_e4m3fn)
        tensors[name] = values[name].float() * wide
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    plain = type(model).from_pretrained(directory)
    model.load_state_dict(plain.state_dict())
    save_file(tensors | values | scales, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": list(block)}
    (directory / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("family", ["qwen3", "mixtral"])
def test_the_method_fp8_has_other_names(tmp_path: Path, family: str) -> None:
    """Experts, too, which are matrices of their own in the files."""
    model = build(TINY[family])
    quantise_by_hand(tmp_path, model, (16, 20))
    found = full_logprobs(tmp_path, PROMPT)
    assert (found - oracle_logprobs(model, PROMPT)[-1]).abs().max() < 1e-3


def test_a_scale_belongs_to_its_rows_and_columns() -> None:
    weight = torch.ones(5, 7).to(torch.float8_e4m3fn)
    scale = torch.arange(1.0, 7.0).view(3, 2)
    found = dequantise(weight, scale, (2, 4))
    for row in range(5):
        for column in range(7):
            assert found[row, column] == scale[row // 2, column // 4]
    assert weight.float().eq(1).all(), "what is stored is not written to"


CONFIG: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS}},
}


def with_group(**fields: Any) -> dict[str, Any]:
    return CONFIG | {"config_groups": {"g": CONFIG["config_groups"]["group_0"] | fields}}


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        (CONFIG | {"format": "pack-quantized"}, "format 'pack-quantized'"),
        (CONFIG | {"format": "int-quantized"}, "format 'int-quantized'"),
        (
            CONFIG | {"sparsity_config": {"format": "sparse-24-bitmask"}},
            "sparsity_config.format 'sparse-24-bitmask'",
        ),
        (CONFIG | {"sparsity_config": ["dense"]}, "sparsity_config ['dense']"),
        (CONFIG | {"transform_config": {"config_groups": {}}}, "transform_config"),
        (CONFIG | {"config_groups": None}, "config_groups is no object"),
        (with_group(weights=WEIGHTS | {"num_bits": 4}), "g.weights: 4 bits of type float"),
        (with_group(weights=WEIGHTS | {"symmetric": False}), "type float, asymmetric"),
        (with_group(weights=None), "g.weights: None"),
        (with_group(format="nvfp4-pack-quantized"), "g.format 'nvfp4-pack-quantized'"),
        (
            with_group(input_activations=ACTIVATIONS | {"type": "int"}),
            "g.input_activations: 8 bits of type int",
        ),
        *(
            (with_group(weights=WEIGHTS | {"block_structure": bad}), f"block_structure [{bad!r}]")
            for bad in ("no", 128, [[1], [2]], [0, 1], [1.5, 2], {"rows": 1}, [])
        ),
    ],
)
def test_other_schemes_are_refused_by_name(changed: dict[str, Any], complaint: str) -> None:
    assert parse_compressed_tensors(CONFIG) == Float8("compressed-tensors", None)
    with pytest.raises(UnsupportedCheckpoint) as error:
        parse_compressed_tensors(changed)
    assert complaint in error.value.message
    assert "serve the checkpoint that it was made from" in error.value.message


def test_the_method_fp8_may_say_its_block() -> None:
    assert parse_fp8({}) == Float8("fp8", None)
    assert parse_fp8({"fmt": "e4m3", "weight_block_size": [128, 64]}).block == (128, 64)
    for settings in ({"fmt": "e5m2"}, {"weight_block_size": [128]}, {"weight_block_size": 128}):
        with pytest.raises(UnsupportedCheckpoint, match=r"fp8\): (fmt|weight_block_size)"):
            parse_fp8(settings)


def stored(directory: Path, **tensors: torch.Tensor) -> Checkpoint:
    save_file(tensors, directory / "model.safetensors")
    return Checkpoint(directory)


def test_only_scales_that_fit_are_taken(tmp_path: Path) -> None:
    weight = torch.ones(4, 6).to(torch.float8_e4m3fn)
    with stored(tmp_path, weight=weight) as checkpoint, pytest.raises(UnsupportedCheckpoint) as bad:
        Float8("fp8", None).join(checkpoint.entries)
    assert "tensor weight: FP8 without a tensor weight_scale" in bad.value.message
    for shape in ([3], [4, 4], [2, 6], [4, 6, 1]):
        fits = stored(tmp_path, weight=weight, weight_scale=torch.ones(shape))
        with fits as checkpoint, pytest.raises(UnsupportedCheckpoint) as bad:
            Float8("fp8", (3, 3)).join(checkpoint.entries)
        assert f"weight_scale: shape {shape} does not fit" in bad.value.message


@pytest.mark.parametrize("bad", [0.0, -1.0, torch.nan, torch.inf])
def test_a_scale_is_a_positive_number(tmp_path: Path, bad: float) -> None:
    weight, scale = torch.ones(4, 6).to(torch.float8_e4m3fn), torch.ones(4, 1)
    scale[2] = bad
    with stored(tmp_path, weight=weight, weight_scale=scale) as checkpoint:
        checkpoint.entries = Float8("fp8", None).join(checkpoint.entries)
        with pytest.raises(UnsupportedCheckpoint, match="weight_scale: a scale is no positive"):
            checkpoint.tensor("weight")


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32])
def test_a_scale_in_another_dtype_is_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    """Bytes are exponents, for the tools that write them."""
    weight, scale = torch.ones(4, 6).to(torch.float8_e4m3fn), torch.ones(4, 1).to(dtype)
    held = stored(tmp_path, weight=weight, weight_scale=scale)
    with held as checkpoint, pytest.raises(UnsupportedCheckpoint, match=r"weight_scale has dtype"):
        Float8("fp8", None).join(checkpoint.entries)


def test_a_block_may_be_larger_than_the_weight(tmp_path: Path) -> None:
    weight, scale = torch.ones(4, 6).to(torch.float8_e4m3fn), torch.tensor([[2.0], [3.0]])
    with stored(tmp_path, weight=weight, weight_scale=scale) as checkpoint:
        checkpoint.entries = Float8("fp8", (2, 1 << 50)).join(checkpoint.entries)
        assert checkpoint.tensor("weight")[:, 5].tolist() == [2.0, 2.0, 3.0, 3.0]


def test_a_checkpoint_is_told_apart_by_its_scales(tmp_path: Path) -> None:
    """By the weights alone, workers with other scales would exchange keys and values."""
    found = set()
    for scale in (1.0, 2.0):
        weight = torch.ones(4, 6).to(torch.float8_e4m3fn)
        with stored(tmp_path, weight=weight, weight_scale=torch.tensor(scale)) as checkpoint:
            checkpoint.entries = Float8("fp8", None).join(checkpoint.entries)
            found.add(checkpoint.identity(["weight"]))
            assert checkpoint.tensor("weight").eq(scale).all()
    assert len(found) == 2


def test_the_log_says_what_reading_costs(tmp_path: Path) -> None:
    written(tmp_path, Tiny("Llama"), "tensor")
    said: list[str] = []
    executor = TorchExecutor()
    executor.load(spec(tmp_path), lambda stage, fraction: said.append(stage))
    executor.close()
    assert [line for line in said if "FP8 (compressed-tensors) is read into float32" in line]

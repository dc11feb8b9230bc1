"""Quantised checkpoints are called that, wherever it shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pdserve.errors import UnsupportedCheckpoint
from pdserve_engines.torch.model_loader.architectures import VLLM_SERVES_IT
from pdserve_engines.torch.model_loader.config import parse_config, read_config
from pdserve_engines.torch.model_loader.quantization import refuse_quantised_tensors
from pdserve_engines.torch.model_loader.safetensors_reader import TensorEntry
from tests.engines.torch.model_loader.test_config import GEMMA3, LLAMA

ORIGINAL = "serve the checkpoint that it was made from"


@pytest.mark.parametrize(
    ("written", "method", "by_vllm"),
    [
        ({"quant_method": "awq", "bits": 4}, "awq", True),
        ({"quant_method": "mxfp8"}, "mxfp8", True),
        ({"quant_method": "mxfp4"}, "mxfp4", True),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "modelopt", True),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes", False),
        ({"load_in_8bit": True}, "bitsandbytes", False),
        ({"quant_method": "aqlm"}, "aqlm", False),
        ({"bits": 3}, "unknown", False),
        ("4 bits", "unknown", False),
    ],
)
@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
def test_a_method_in_the_configuration_is_named(
    key: str, written: Any, method: str, by_vllm: bool
) -> None:
    with pytest.raises(UnsupportedCheckpoint) as error:
        parse_config(LLAMA | {key: written})
    assert f"config.json: {key} ({method}" in error.value.message
    assert "quantised weights are not supported by the torch engine" in error.value.message
    assert (VLLM_SERVES_IT in error.value.message) == by_vllm
    assert ORIGINAL in error.value.message


@pytest.mark.parametrize("method", ["compressed-tensors", "fp8", "gptq"])
def test_the_first_releases_key_is_refused_for_every_method(method: str) -> None:
    """Their formats are not those of today."""
    with pytest.raises(UnsupportedCheckpoint, match=rf"compression_config \({method}\)"):
        parse_config(LLAMA | {"compression_config": {"quant_method": method, "bits": 4}})


@pytest.mark.parametrize("outside", [True, False])
def test_a_text_part_may_say_it_or_the_whole_model(outside: bool) -> None:
    quantised = {"quantization_config": {"quant_method": "awq"}}
    raw = GEMMA3 | {"text_config": {} if outside else quantised}
    with pytest.raises(UnsupportedCheckpoint, match=r"\(awq\)"):
        parse_config(raw | (quantised if outside else {}))


@pytest.mark.parametrize(
    ("name", "written", "called"),
    [
        ("hf_quant_config.json", {"quantization": {"quant_algo": "NVFP4"}}, "ModelOpt NVFP4"),
        ("quantize_config.json", {"bits": 4}, "GPTQ"),
        ("quant_config.json", {"w_bit": 4}, "AWQ"),
    ],
)
def test_a_file_of_a_quantising_tool_is_enough(
    tmp_path: Path, name: str, written: dict[str, Any], called: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / name).write_text(json.dumps(written))
    with pytest.raises(UnsupportedCheckpoint) as error:
        read_config(tmp_path)
    assert f"{name}: {called}: quantised" in error.value.message
    assert VLLM_SERVES_IT in error.value.message
    assert ORIGINAL in error.value.message


def test_what_the_configuration_says_counts_more_than_a_file(tmp_path: Path) -> None:
    said = {"quantization_config": {"quant_method": "gptq", "bits": 8}}
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | said))
    (tmp_path / "quantize_config.json").write_text("{}")
    assert read_config(tmp_path).family == "llama"


def test_modelopt_may_have_quantised_the_kv_cache_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    written = tmp_path / "hf_quant_config.json"
    written.write_text('{"quantization": {"quant_algo": null, "kv_cache_quant_algo": "FP8"}}')
    assert read_config(tmp_path).family == "llama"
    for nonsense in ("nonsense", "[]", '{"quantization": 3}'):
        written.write_text(nonsense)
        with pytest.raises(UnsupportedCheckpoint, match=r"hf_quant_config\.json: not valid"):
            read_config(tmp_path)


def entry(name: str, dtype: str) -> TensorEntry:
    return TensorEntry(name, dtype, (4, 4), Path("model.safetensors"), 0, 16)


@pytest.mark.parametrize(
    ("name", "dtype", "called"),
    [
        ("q_proj.qweight", "I32", "AWQ or GPTQ"),
        ("q_proj.weight_packed", "I32", "compressed-tensors"),
        ("q_proj.weight.absmax", "U8", "bitsandbytes"),
        ("q_proj.SCB", "F32", "bitsandbytes"),
        ("q_proj.weight_scale_2", "F32", "NVFP4"),
        ("experts.gate_up_proj_blocks", "U8", "MXFP4"),
        ("q_proj.weight_scale_inv", "F32", "FP8"),
        ("q_proj.weight", "F8_E4M3", "dtype F8_E4M3: FP8"),
        ("q_proj.weight", "F8_E5M2", "dtype F8_E5M2: FP8"),
        ("q_proj.weight", "I8", "INT8"),
    ],
)
def test_tensors_show_it_where_no_file_says_so(name: str, dtype: str, called: str) -> None:
    entries = {"embed_tokens.weight": entry("embed_tokens.weight", "BF16")}
    refuse_quantised_tensors(entries)
    full = f"model.layers.0.{name}"
    with pytest.raises(UnsupportedCheckpoint) as error:
        refuse_quantised_tensors(entries | {full: entry(full, dtype)})
    assert f"tensor {full}" in error.value.message
    assert f"{called}: quantised weights are not supported" in error.value.message
    assert ORIGINAL in error.value.message
    assert VLLM_SERVES_IT not in error.value.message, "it would not know the method either"

"""Recognises quantised checkpoints that this engine does not read: by `config.json`, by files of
quantising tools, or by tensors.

The error names the method, and the engine that serves it. `mxfp4` and `weight_formats` have what is
read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from pdserve.errors import UnsupportedCheckpoint
from pdserve_engines.torch.model_loader.architectures import VLLM_SERVES_IT
from pdserve_engines.torch.model_loader.config_keys import parse_json

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from pathlib import Path

    from pdserve_engines.torch.model_loader.config_keys import Json
    from pdserve_engines.torch.model_loader.safetensors_reader import Entry

_ORIGINAL: Final = "serve the checkpoint that it was made from, in bfloat16 or float32"

_CONFIG_KEYS: Final = ("quantization_config", "compression_config")
"""Keys of `config.json`; the first releases of compressed-tensors wrote the second one."""

_FILES: Final[Mapping[str, str]] = {
    "hf_quant_config.json": "ModelOpt",
    "quantize_config.json": "GPTQ",
    "quant_config.json": "AWQ",
}
"""Files in which tools say that they quantised, and say nothing in `config.json`."""

_BY_VLLM: Final = (
    "awq",
    "gptq",
    "fp8",
    "compressed-tensors",
    "mxfp4",
    "mxfp8",
    "modelopt",
    "modelopt_fp4",
    "quark",
    "torchao",
)
"""Methods that vLLM loads, as configurations name them."""

_BY_NAME: Final[Mapping[str, str]] = {
    ".qzeros": "AWQ or GPTQ",
    ".qweight": "AWQ or GPTQ",
    ".weight_packed": "compressed-tensors",
    ".absmax": "bitsandbytes",
    ".SCB": "bitsandbytes",
    ".weight_scale_2": "NVFP4",
    "_proj_blocks": "MXFP4",
    ".weight_scale_inv": "FP8",
    ".weight_scale": "FP8 or INT8",
    ".input_scale": "FP8",
}
"""Ends of tensor names, the most telling first."""

_BY_DTYPE: Final[Mapping[str, str]] = {
    "F8_E4M3": "FP8",
    "F8_E5M2": "FP8",
    "F8_E8M0": "MXFP4 or MXFP8",
    "F4": "FP4",
    "I8": "INT8",
}


def refuse_quantised_config(raw: Json, read: Collection[str] = ()) -> None:
    """Raise `UnsupportedCheckpoint` if `config.json` says that the weights are quantised. `read`:
    methods that are none the less supported, in the first of the keys."""
    for key in _CONFIG_KEYS:
        if raw.get(key) and not (key == _CONFIG_KEYS[0] and _method(raw[key]) in read):
            method = _method(raw[key])
            raise _refusal(f"config.json: {key} ({method})", method.lower() in _BY_VLLM)


def refused_scheme(method: str, what: str) -> UnsupportedCheckpoint:
    """The error for settings that are not read, of a method that is."""
    return UnsupportedCheckpoint(
        f"config.json: quantization_config ({method}): {what}: not supported by the torch engine: "
        f"{VLLM_SERVES_IT}; or {_ORIGINAL}"
    )


def refuse_quantised_files(directory: Path, raw: Json) -> None:
    """Raise `UnsupportedCheckpoint` if a quantising tool left a file that says so. What
    `config.json` says, `raw`, counts more."""
    if any(raw.get(key) for key in _CONFIG_KEYS):
        return
    for name, tool in _FILES.items():
        path = directory / name
        if not path.exists():
            continue
        method = f"{tool} {_algorithm(path)}" if tool == "ModelOpt" else tool
        # ModelOpt's file without an algorithm: only the KV cache is quantised.
        if method != "ModelOpt None":
            raise _refusal(f"{name}: {method}", by_vllm=True)


def refuse_quantised_tensors(entries: Mapping[str, Entry]) -> None:
    """Raise `UnsupportedCheckpoint` if names or dtypes show it, whatever the files say."""
    for end, method in _BY_NAME.items():
        for name in entries:
            if name.endswith(end):
                raise _refusal(f"tensor {name}: {method}")
    for name, entry in entries.items():
        if entry.dtype in _BY_DTYPE:
            raise _refusal(f"tensor {name} of dtype {entry.dtype}: {_BY_DTYPE[entry.dtype]}")


def _method(written: Any) -> str:
    if not isinstance(written, dict):
        return "unknown"
    if written.get("load_in_4bit") or written.get("load_in_8bit"):
        return "bitsandbytes"
    return str(written.get("quant_method") or "unknown")


def _algorithm(path: Path) -> Any:
    try:
        return parse_json(path.read_bytes())["quantization"].get("quant_algo")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnsupportedCheckpoint(f"{path}: not valid: {error!r}") from error


def _refusal(what: str, by_vllm: bool = False) -> UnsupportedCheckpoint:
    """`by_vllm`: whether vLLM loads this. It needs a file that says so, tensors are not enough."""
    remedy = _ORIGINAL
    if by_vllm:
        remedy = f"{VLLM_SERVES_IT}; or {remedy}"
    return UnsupportedCheckpoint(
        f"{what}: quantised weights are not supported by the torch engine: {remedy}"
    )

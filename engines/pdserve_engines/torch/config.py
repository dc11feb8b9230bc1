"""What a checkpoint's `config.json` says about its architecture, or why it cannot be served.

Reads JSON only; it knows no tensors and no devices. Everything a checkpoint needs and this engine
lacks is refused here by name, before any weight is read.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from pdserve.errors import UnsupportedCheckpoint

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

Family = Literal["llama", "qwen2", "qwen3", "mistral"]

ARCHITECTURES: Mapping[str, Family] = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "MistralForCausalLM": "mistral",
}

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding. The fields after `theta` matter only to the kinds that name them."""

    kind: Literal["default", "linear", "llama3"]
    theta: float
    factor: float = 1.0
    """`linear`, `llama3`: how much longer the context is than the one first trained on."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_positions: int = 0
    """`llama3`: the context first trained on, in tokens."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Everything that fixes the computation, in this engine's words."""

    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    kv_heads: int
    head_dim: int
    rms_eps: float
    rope: RopeConfig
    max_positions: int
    """Longest sequence the checkpoint was made for, in tokens."""
    tied: bool
    """The output layer is the embedding."""
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    """RMS norm over each head of q and k, before the rotary embedding."""
    sliding_window: int | None
    """Tokens a query may look back; None: all of them."""
    dtype: str | None
    """The dtype the checkpoint says it has."""
    eos_token_ids: tuple[int, ...]

    @property
    def groups(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.kv_heads


def read_config(directory: Path) -> ModelConfig:
    """The configuration of the checkpoint in `directory`.

    Errors: `UnsupportedCheckpoint`, naming the file or the key at fault.
    """
    raw = _read_json(directory / "config.json")
    generation = directory / "generation_config.json"
    return parse_config(raw, _read_json(generation) if generation.exists() else {})


def parse_config(raw: Json, generation: Json | None = None) -> ModelConfig:
    """`read_config` for JSON already at hand."""
    family = _family(raw)
    _refuse_the_unbuilt(raw)
    hidden, heads = _positive(raw, "hidden_size"), _positive(raw, "num_attention_heads")
    kv_heads = _positive(raw, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise UnsupportedCheckpoint(
            f"config.json: num_attention_heads {heads} is no multiple of "
            f"num_key_value_heads {kv_heads}"
        )
    head_dim = _head_dim(raw, hidden, heads)
    bias = _flag(raw, "attention_bias")
    return ModelConfig(
        family=family,
        vocab_size=_positive(raw, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_positive(raw, "intermediate_size"),
        num_layers=_positive(raw, "num_hidden_layers"),
        num_heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rms_eps=_number(raw, "rms_norm_eps", 1e-6),
        rope=_rope(raw),
        max_positions=_positive(raw, "max_position_embeddings"),
        tied=_flag(raw, "tie_word_embeddings"),
        # Qwen2 has the three biases and no key that says so; Mistral has none and ignores the key.
        qkv_bias=family == "qwen2" or (bias and family != "mistral"),
        o_bias=bias and family in ("llama", "qwen3"),
        mlp_bias=_flag(raw, "mlp_bias") and family == "llama",
        qk_norm=family == "qwen3",
        sliding_window=_sliding_window(raw, family),
        dtype=raw.get("dtype") or raw.get("torch_dtype"),
        eos_token_ids=_eos_token_ids(raw, generation or {}),
    )


def check_window(config: ModelConfig, max_model_len: int) -> None:
    """Refuse a sliding window that would matter: full attention is all this engine computes."""
    window = config.sliding_window
    if window is not None and window < max_model_len:
        raise UnsupportedCheckpoint(
            f"config.json: sliding_window {window} is not supported; sequences up to {window} "
            f"tokens do not need it, so --max-model-len {window} would serve this checkpoint"
        )


def _read_json(path: Path) -> Json:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise UnsupportedCheckpoint(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        raise UnsupportedCheckpoint(f"{path}: {error}") from error
    if not isinstance(value, dict):
        raise UnsupportedCheckpoint(f"{path}: not a JSON object")
    return value


def _family(raw: Json) -> Family:
    names = raw.get("architectures") or []
    for name in names:
        if name in ARCHITECTURES:
            return ARCHITECTURES[name]
    found = ", ".join(map(str, names)) or "none"
    raise UnsupportedCheckpoint(
        f"config.json: architecture {found} is not supported; served are "
        + ", ".join(ARCHITECTURES)
    )


def _refuse_the_unbuilt(raw: Json) -> None:
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unknown")
        raise UnsupportedCheckpoint(f"config.json: quantization_config ({method}) is not supported")
    act = raw.get("hidden_act", "silu")
    if act not in ("silu", "swish"):
        raise UnsupportedCheckpoint(f"config.json: hidden_act {act!r} is not supported, only silu")
    if _number(raw, "partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedCheckpoint("config.json: partial_rotary_factor is not supported")
    for key in ("num_experts", "num_local_experts", "n_routed_experts"):
        if raw.get(key):
            raise UnsupportedCheckpoint(f"config.json: {key}: experts are not supported")


def _head_dim(raw: Json, hidden: int, heads: int) -> int:
    if raw.get("head_dim") is None and hidden % heads:
        raise UnsupportedCheckpoint(
            f"config.json: hidden_size {hidden} is no multiple of num_attention_heads {heads} "
            "and there is no head_dim"
        )
    head_dim = _positive(raw, "head_dim", hidden // heads)
    if head_dim % 2:
        raise UnsupportedCheckpoint(f"config.json: head_dim {head_dim} is odd")
    return head_dim


def _rope(raw: Json) -> RopeConfig:
    """Both spellings: `rope_parameters` (newer), or `rope_theta` beside `rope_scaling`."""
    rope: Json = dict(raw.get("rope_scaling") or {}) | dict(raw.get("rope_parameters") or {})
    kind = rope.get("rope_type") or rope.get("type") or "default"
    theta = _number(rope, "rope_theta", _number(raw, "rope_theta", 10000.0))
    if "mrope_section" in rope or _number(rope, "partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedCheckpoint(
            "config.json: rope with mrope_section or partial_rotary_factor is not supported"
        )
    if kind == "default":
        return RopeConfig("default", theta)
    if kind == "linear":
        return RopeConfig("linear", theta, factor=_number(rope, "factor"))
    if kind == "llama3":
        return RopeConfig(
            "llama3",
            theta,
            factor=_number(rope, "factor"),
            low_freq_factor=_number(rope, "low_freq_factor"),
            high_freq_factor=_number(rope, "high_freq_factor"),
            original_max_positions=_positive(rope, "original_max_position_embeddings"),
        )
    raise UnsupportedCheckpoint(
        f"config.json: rope type {kind!r} is not supported, only default, linear and llama3"
    )


def _sliding_window(raw: Json, family: Family) -> int | None:
    """The window, where any layer uses one."""
    # A Mistral configuration without the key means the family's default.
    window = raw.get("sliding_window", 4096 if family == "mistral" else None)
    if window is None or not _windowed_layers(raw, family):
        return None
    return _positive({"sliding_window": window}, "sliding_window")


def _windowed_layers(raw: Json, family: Family) -> bool:
    if family in ("llama", "mistral"):
        return family == "mistral"
    if not _flag(raw, "use_sliding_window"):
        return False
    layers = raw.get("layer_types")
    if layers is not None:
        return "sliding_attention" in layers
    # Without a list, layers from `max_window_layers` on have the window.
    return _positive(raw, "max_window_layers", 28) < _positive(raw, "num_hidden_layers")


def _eos_token_ids(raw: Json, generation: Json) -> tuple[int, ...]:
    """The union, what `generation_config.json` lists first."""
    ids: list[int] = []
    for source, name in ((generation, "generation_config.json"), (raw, "config.json")):
        value = source.get("eos_token_id")
        for token in value if isinstance(value, list) else [value]:
            if token is None:
                continue
            if type(token) is not int or token < 0:
                raise UnsupportedCheckpoint(f"{name}: eos_token_id {token!r} is no token id")
            ids.append(token)
    return tuple(dict.fromkeys(ids))


def _positive(raw: Json, key: str, default: int | None = None) -> int:
    value = raw.get(key)
    if value is None:
        value = default
    if type(value) is not int or value < 1:
        raise UnsupportedCheckpoint(f"config.json: {key} must be a positive integer, is {value!r}")
    return value


def _number(raw: Json, key: str, default: float | None = None) -> float:
    value = raw.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UnsupportedCheckpoint(f"config.json: {key} must be a number, is {value!r}")
    return float(value)


def _flag(raw: Json, key: str) -> bool:
    value = raw.get(key)
    if value is not None and not isinstance(value, bool):
        raise UnsupportedCheckpoint(f"config.json: {key} must be true or false, is {value!r}")
    return bool(value)

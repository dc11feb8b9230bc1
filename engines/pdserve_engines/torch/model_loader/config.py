"""Reads the architecture from a checkpoint's `config.json`, or refuses it with the reason.

Reads JSON only; it knows no tensors and no devices. What this engine does not support is refused
here by name, before any weight is read.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from pdserve.errors import UnsupportedCheckpoint
from pdserve_engines.torch.model_loader.config_keys import Json, flag, number, positive
from pdserve_engines.torch.model_loader.rope_config import (
    RopeConfig,
    max_positions,
    parse_local_rope,
    parse_rope,
)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

ModelFamily = Literal["llama", "qwen2", "qwen3", "mistral", "mixtral", "qwen3_moe", "gemma3"]

ARCHITECTURES: Mapping[str, ModelFamily] = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Gemma3ForCausalLM": "gemma3",
    "Gemma3ForConditionalGeneration": "gemma3",
}

HEADLESS_ARCHITECTURES: Mapping[str, ModelFamily] = {
    "LlamaModel": "llama",
    "Qwen2Model": "qwen2",
    "Qwen3Model": "qwen3",
    "MistralModel": "mistral",
}
"""Architecture names of embedding models, which have no output layer after the final norm."""

_UNQUANTISED = "serve the checkpoint that it was made from, in bfloat16 or float32"

_GEMMA3_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "eos_token_id": 1,
}
"""Keys that published configurations of this family leave out: multimodal ones say little about
their text part."""


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """Mixture-of-experts layers, in which every token uses a few experts."""

    count: int
    per_token: int
    intermediate_size: int
    normalized: bool
    """Whether the weights of a token's experts are scaled to add up to one."""
    dense_layers: tuple[int, ...]
    """Layers with one ordinary feed-forward instead."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """All settings that determine the computation, under this engine's names."""

    family: ModelFamily
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
    """Whether the output layer is the embedding."""
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    """Whether each head of q and k gets an RMS norm before the rotary embedding."""
    sliding_window: int | None
    """Tokens that a query sees, itself included, in the layers with a window; None: no layer has
    one."""
    dtype: str | None
    """The dtype that the checkpoint names."""
    eos_token_ids: tuple[int, ...]
    # The fields below are at their defaults in most families; see `model_info.compat_hash`.
    full_layers: tuple[int, ...] = ()
    """Layers without a window in a model where others have one."""
    local_rope: RopeConfig | None = None
    """Rotary embedding of the layers with a window; None: the same as in the others."""
    experts: ExpertsConfig | None = None
    gelu: bool = False
    """Whether the feed-forward uses GELU (tanh form) instead of SiLU."""
    float_norms: bool = False
    """Whether norms are computed in float32, with their weights plus one."""
    out_norms: bool = False
    """Whether the outputs of attention and feed-forward are normalised, too."""
    embed_scale: float = 1.0
    query_scalar: float | None = None
    """Attention scores are divided by its root; None: by that of `head_dim`."""
    headless: bool = False
    """Whether the output layer may be missing, and, once the tensors are known, whether it is: the
    model then makes embeddings, not text, and `tied` is set."""

    @property
    def groups(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.kv_heads

    def window(self, layer: int) -> int | None:
        """Tokens that a query of `layer` sees; None: all before it."""
        return None if layer in self.full_layers else self.sliding_window

    def rope_of(self, layer: int) -> RopeConfig:
        """The rotary embedding of `layer`."""
        local = self.local_rope if self.window(layer) is not None else None
        return local or self.rope


def read_config(directory: Path) -> ModelConfig:
    """Read the configuration of the checkpoint in `directory`.

    Raises `UnsupportedCheckpoint`, which names the file or the key at fault.
    """
    raw = _read_json(directory / "config.json")
    _refuse_quantised(directory / "hf_quant_config.json")
    generation = directory / "generation_config.json"
    return parse_config(raw, _read_json(generation) if generation.exists() else {})


def parse_config(raw: Json, generation: Json | None = None) -> ModelConfig:
    """`read_config` for JSON that is already read."""
    family = _family(raw)
    if family == "gemma3":
        raw = _gemma3_text(raw)
    _refuse_the_unbuilt(raw, family)
    hidden, heads = positive(raw, "hidden_size"), positive(raw, "num_attention_heads")
    kv_heads = positive(raw, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise UnsupportedCheckpoint(
            f"config.json: num_attention_heads {heads} is no multiple of "
            f"num_key_value_heads {kv_heads}"
        )
    head_dim = _head_dim(raw, hidden, heads)
    bias = flag(raw, "attention_bias")
    layers = positive(raw, "num_hidden_layers")
    window, full_layers = _windows(raw, family, layers)
    rope = parse_rope(raw, family)
    gemma3 = family == "gemma3"
    return ModelConfig(
        family=family,
        vocab_size=positive(raw, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=positive(raw, "intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rms_eps=number(raw, "rms_norm_eps", 1e-6),
        rope=rope,
        max_positions=max_positions(raw, rope),
        tied=flag(raw, "tie_word_embeddings"),
        # Qwen2 has the three biases and no key that says so; Mistral has none and ignores the key.
        qkv_bias=family == "qwen2" or (bias and family not in ("mistral", "mixtral")),
        o_bias=bias and family in ("llama", "qwen3", "qwen3_moe", "gemma3"),
        mlp_bias=flag(raw, "mlp_bias") and family == "llama",
        qk_norm=family in ("qwen3", "qwen3_moe", "gemma3"),
        sliding_window=window,
        dtype=raw.get("dtype") or raw.get("torch_dtype"),
        eos_token_ids=_eos_token_ids(raw, generation or {}),
        full_layers=full_layers,
        local_rope=parse_local_rope(raw) if gemma3 else None,
        experts=_experts(raw, family, layers),
        gelu=gemma3,
        float_norms=gemma3,
        out_norms=gemma3,
        embed_scale=math.sqrt(hidden) if gemma3 else 1.0,
        query_scalar=number(raw, "query_pre_attn_scalar") if gemma3 else None,
        headless=not HEADLESS_ARCHITECTURES.keys().isdisjoint(raw.get("architectures") or ()),
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


def _refuse_quantised(written: Path) -> None:
    """Refuse a checkpoint quantised by ModelOpt, which writes that to a file of its own."""
    if not written.exists():
        return
    quantization = _read_json(written).get("quantization")
    method = quantization.get("quant_algo") if isinstance(quantization, dict) else "unknown"
    # Without a method only the KV cache is quantised.
    if method is not None:
        raise UnsupportedCheckpoint(
            f"{written.name}: quantised weights ({method}) are not supported: {_UNQUANTISED}"
        )


def _family(raw: Json) -> ModelFamily:
    names = raw.get("architectures") or []
    for name in names:
        family = ARCHITECTURES.get(name) or HEADLESS_ARCHITECTURES.get(name)
        if family is not None:
            return family
    found = ", ".join(map(str, names)) or "none"
    raise UnsupportedCheckpoint(
        f"config.json: architecture {found} is not supported; served are "
        + ", ".join(ARCHITECTURES)
    )


def _gemma3_text(raw: Json) -> Json:
    """The text part; the rest of a multimodal model is not served."""
    text = raw.get("text_config", raw)
    if not isinstance(text, dict):
        raise UnsupportedCheckpoint("config.json: text_config is not a JSON object")
    shared = ("quantization_config", "eos_token_id", "dtype", "torch_dtype")
    merged = dict(_GEMMA3_DEFAULTS) | text | {key: raw[key] for key in shared if key in raw}
    if flag(merged, "use_bidirectional_attention"):
        raise UnsupportedCheckpoint("config.json: use_bidirectional_attention is not supported")
    for key in ("final_logit_softcapping", "attn_logit_softcapping"):
        if merged.get(key) is not None:
            raise UnsupportedCheckpoint(f"config.json: {key} is not supported")
    return merged


def _refuse_the_unbuilt(raw: Json, family: ModelFamily) -> None:
    if raw.get("is_causal") is False or flag(raw, "use_bidirectional_attention"):
        raise UnsupportedCheckpoint(
            "config.json: its tokens see those after them (is_causal, use_bidirectional_attention),"
            " which is not supported"
        )
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unknown")
        raise UnsupportedCheckpoint(
            f"config.json: quantization_config ({method}) is not supported: {_UNQUANTISED}"
        )
    key, possible = "hidden_act", ["silu", "swish"]
    if family == "gemma3":
        key, possible = "hidden_activation", ["gelu_pytorch_tanh"]
    act = raw.get(key, possible[0])
    if act not in possible:
        raise UnsupportedCheckpoint(
            f"config.json: {key} {act!r} is not supported, only {possible[0]}"
        )
    if number(raw, "partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedCheckpoint("config.json: partial_rotary_factor is not supported")
    for key in ("num_experts", "num_local_experts", "n_routed_experts"):
        if raw.get(key) and family not in _EXPERTS:
            raise UnsupportedCheckpoint(f"config.json: {key}: experts are not supported")


def _head_dim(raw: Json, hidden: int, heads: int) -> int:
    if raw.get("head_dim") is None and hidden % heads:
        raise UnsupportedCheckpoint(
            f"config.json: hidden_size {hidden} is no multiple of num_attention_heads {heads} "
            "and there is no head_dim"
        )
    head_dim = positive(raw, "head_dim", hidden // heads)
    if head_dim % 2:
        raise UnsupportedCheckpoint(f"config.json: head_dim {head_dim} is odd")
    return head_dim


def _windows(raw: Json, family: ModelFamily, layers: int) -> tuple[int | None, tuple[int, ...]]:
    """The window, None if no layer uses one, and the layers that do not."""
    # A configuration without the key means the family's default.
    window = raw.get("sliding_window", None if family == "mixtral" else 4096)
    windowed = _windowed_layers(raw, family, layers)
    if not any(windowed) or (window is None and family != "gemma3"):
        return None, ()
    full = tuple(index for index, has in enumerate(windowed) if not has)
    return positive({"sliding_window": window}, "sliding_window"), full


def _windowed_layers(raw: Json, family: ModelFamily, layers: int) -> list[bool]:
    if family in ("mistral", "mixtral"):
        return [True] * layers
    if family == "llama" or (family != "gemma3" and not flag(raw, "use_sliding_window")):
        return [False] * layers
    if family == "qwen3_moe":
        return [True] * layers
    if raw.get("layer_types") is not None:
        return _layer_types(raw["layer_types"], layers)
    if family == "gemma3":
        pattern = positive(raw, "sliding_window_pattern", 6)
        return [(index + 1) % pattern != 0 for index in range(layers)]
    # Zero: every layer has the window.
    first = 0 if raw.get("max_window_layers") == 0 else positive(raw, "max_window_layers", 28)
    return [index >= first for index in range(layers)]


def _layer_types(types: Any, layers: int) -> list[bool]:
    names = {"full_attention": False, "sliding_attention": True}
    if not isinstance(types, list) or len(types) != layers:
        raise UnsupportedCheckpoint(f"config.json: layer_types must name {layers} layers")
    for name in types:
        if name not in names:
            raise UnsupportedCheckpoint(f"config.json: layer_types: {name!r} is not supported")
    return [names[name] for name in types]


_EXPERTS = ("mixtral", "qwen3_moe")


def _experts(raw: Json, family: ModelFamily, layers: int) -> ExpertsConfig | None:
    if family not in _EXPERTS:
        return None
    mixtral = family == "mixtral"
    # Tools write one or the other of these two keys.
    count = positive(raw, "num_local_experts" if "num_local_experts" in raw else "num_experts")
    per_token = positive(raw, "num_experts_per_tok")
    if per_token > count:
        raise UnsupportedCheckpoint(
            f"config.json: num_experts_per_tok {per_token} is more than the {count} experts"
        )
    return ExpertsConfig(
        count=count,
        per_token=per_token,
        intermediate_size=positive(
            raw, "intermediate_size" if mixtral else "moe_intermediate_size"
        ),
        normalized=mixtral or flag(raw, "norm_topk_prob"),
        dense_layers=() if mixtral else _dense_layers(raw, layers),
    )


def _dense_layers(raw: Json, layers: int) -> tuple[int, ...]:
    step, listed = positive(raw, "decoder_sparse_step", 1), raw.get("mlp_only_layers") or []
    if not isinstance(listed, list):
        raise UnsupportedCheckpoint("config.json: mlp_only_layers must be a list")
    return tuple(index for index in range(layers) if index in listed or (index + 1) % step)


def _eos_token_ids(raw: Json, generation: Json) -> tuple[int, ...]:
    """The union of both files' ids; those of `generation_config.json` come first."""
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

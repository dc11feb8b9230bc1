"""Says by which options each family's layers differ from a Llama's, from the family's own keys.

Reads JSON only. `config.py` reads what all families have in common, and `layer_patterns.py` what
differs from layer to layer. A new family is a reader here, its norms in `weights.py`, and a row in
the tests' `checkpoints.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pdserve.errors import UnsupportedCheckpoint
from pdserve_engines.torch.model_loader.config_keys import Json, flag, number, section
from pdserve_engines.torch.model_loader.rope_config import parse_local_rope

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pdserve_engines.torch.model_loader.architectures import ModelFamily

Fields = dict[str, Any]
"""Fields of `ModelConfig`."""


@dataclass(frozen=True, slots=True)
class FamilyReader:
    """How one family's `config.json` is read."""

    fields: Callable[[Json], Fields]
    """Reads the fields of `ModelConfig` in which this family is not like the others."""
    defaults: Json = field(default_factory=dict)
    """Keys that configurations of this family leave out."""


def _biases(raw: Json, *where: str) -> Fields:
    """Biases by the key `attention_bias` at q, k, v (`qkv`) and the output (`o`), and by `mlp_bias`
    in the feed-forward (`mlp`); other families ignore these keys."""
    return {
        f"{place}_bias": flag(raw, "mlp_bias" if place == "mlp" else "attention_bias")
        for place in where
    }


def _llama(raw: Json) -> Fields:
    return _biases(raw, "qkv", "o", "mlp")


def _qwen2(raw: Json) -> Fields:
    # It has these three biases and no key that says so.
    return {"qkv_bias": True}


def _qwen3(raw: Json) -> Fields:
    return {"qk_norm": True} | _biases(raw, "qkv", "o")


def _mistral(raw: Json) -> Fields:
    return {}


def _phi3(raw: Json) -> Fields:
    return {"fused_qkv": True, "fused_gate_up": True}


def _glm(raw: Json) -> Fields:
    return _biases(raw, "qkv") | {"fused_gate_up": True}


def _glm4(raw: Json) -> Fields:
    return _glm(raw) | {"out_norms": True}


def _ernie(raw: Json) -> Fields:
    return dict.fromkeys(("qkv_bias", "o_bias", "mlp_bias"), flag(raw, "use_bias"))


def _exaone4(raw: Json) -> Fields:
    return {"in_norms": False, "out_norms": True, "qk_norm": True}


def _seed_oss(raw: Json) -> Fields:
    return _biases(raw, "qkv", "mlp") | {"o_bias": flag(raw, "attention_out_bias")}


def _gpt_oss(raw: Json) -> Fields:
    return _biases(raw, "qkv", "o") | {"sinks": True}


def _olmo(raw: Json) -> Fields:
    return _biases(raw, "qkv", "o") | {
        "in_norms": False,
        "out_norms": True,
        "qk_norm": True,
        "whole_qk_norm": True,
    }


def _olmo3(raw: Json) -> Fields:
    theta = number(section(raw, "rope_parameters"), "rope_theta", number(raw, "rope_theta", 5e5))
    return _olmo(raw) | {"local_rope": parse_local_rope(raw, theta)}


def _granite(raw: Json) -> Fields:
    return _biases(raw, "qkv", "o", "mlp") | {
        "embed_scale": number(raw, "embedding_multiplier", 1.0),
        "query_scalar": number(raw, "attention_multiplier", 1.0) ** -2,
        "residual_scale": number(raw, "residual_multiplier", 1.0),
        "logit_scale": 1 / number(raw, "logits_scaling", 1.0),
    }


def _cohere(raw: Json) -> Fields:
    if flag(raw, "use_qk_norm"):
        raise UnsupportedCheckpoint("config.json: use_qk_norm is not supported")
    return _biases(raw, "qkv", "o") | {
        "rms_eps": number(raw, "layer_norm_eps"),
        "layer_norms": True,
        "parallel": True,
        "logit_scale": number(raw, "logit_scale"),
    }


def _gemma2(raw: Json) -> Fields:
    return _later_gemma(raw) | {
        "attention_cap": _cap(raw, "attn_logit_softcapping"),
        "logit_cap": _cap(raw, "final_logit_softcapping"),
    }


def _gemma3(raw: Json) -> Fields:
    for key in ("final_logit_softcapping", "attn_logit_softcapping"):
        if raw.get(key) is not None:
            raise UnsupportedCheckpoint(f"config.json: {key} is not supported in this architecture")
    local = parse_local_rope(raw, number(raw, "rope_local_base_freq"))
    return _later_gemma(raw) | {"qk_norm": True, "local_rope": local}


def _later_gemma(raw: Json) -> Fields:
    """What the second and third generation have in common."""
    scalar = number(raw, "query_pre_attn_scalar")
    return _gemma(raw) | {"out_norms": True, "query_scalar": scalar}


def _gemma(raw: Json) -> Fields:
    return _biases(raw, "qkv", "o") | {
        "gelu": True,
        "float_norms": True,
        "embed_scale": math.sqrt(number(raw, "hidden_size")),
    }


def _cap(raw: Json, key: str) -> float | None:
    return None if raw[key] is None else number(raw, key)


_GEMMA2_DEFAULTS: Json = {
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "tie_word_embeddings": True,
}
_GEMMA3_DEFAULTS: Json = {
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
"""Multimodal ones say little about their text part."""

_GLM_DEFAULTS: Json = {
    "attention_bias": True,
    "head_dim": 128,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1.5625e-07,
}

_GPT_OSS_DEFAULTS: Json = {
    "attention_bias": True,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0,
    "sliding_window": 128,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
}

_COHERE_DEFAULTS: Json = {
    "logit_scale": 0.0625,
    "layer_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}

_ERNIE_DEFAULTS: Json = {
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "head_dim": 128,
    "tie_word_embeddings": True,
}

FAMILIES: Mapping[ModelFamily, FamilyReader] = {
    "llama": FamilyReader(_llama),
    "qwen2": FamilyReader(_qwen2),
    "qwen3": FamilyReader(_qwen3),
    "mistral": FamilyReader(_mistral),
    "mixtral": FamilyReader(_mistral, {"rope_theta": 1e6, "sliding_window": None}),
    "qwen3_moe": FamilyReader(_qwen3),
    "qwen3_vl_moe": FamilyReader(_qwen3),
    "gemma": FamilyReader(_gemma, {"head_dim": 256, "tie_word_embeddings": True}),
    "gemma2": FamilyReader(_gemma2, _GEMMA2_DEFAULTS),
    "gemma3": FamilyReader(_gemma3, _GEMMA3_DEFAULTS),
    "phi3": FamilyReader(_phi3, {"rms_norm_eps": 1e-5, "sliding_window": None}),
    "olmo2": FamilyReader(_olmo, {"rms_norm_eps": 1e-5}),
    "olmo3": FamilyReader(_olmo3, {"rms_norm_eps": 1e-5, "rope_theta": 5e5}),
    "granite": FamilyReader(_granite),
    "smollm3": FamilyReader(_llama, {"rope_theta": 2e6, "tie_word_embeddings": True}),
    "glm": FamilyReader(_glm, _GLM_DEFAULTS),
    "glm4": FamilyReader(_glm4, _GLM_DEFAULTS),
    "gpt_oss": FamilyReader(_gpt_oss, _GPT_OSS_DEFAULTS),
    "seed_oss": FamilyReader(_seed_oss, {"attention_bias": True, "head_dim": 128}),
    "cohere": FamilyReader(_cohere, _COHERE_DEFAULTS | {"rope_theta": 5e5}),
    "cohere2": FamilyReader(_cohere, _COHERE_DEFAULTS),
    "exaone4": FamilyReader(_exaone4, {"rms_norm_eps": 1e-5}),
    "ernie4_5": FamilyReader(_ernie, _ERNIE_DEFAULTS),
}

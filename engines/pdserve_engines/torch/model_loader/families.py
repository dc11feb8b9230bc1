"""Says by which options each family's layers differ from a Llama's, from the family's own keys.

Reads JSON only. `config.py` reads what all families have in common, `windows.py` the windows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pdserve.errors import UnsupportedCheckpoint
from pdserve_engines.torch.model_loader.config_keys import Json, flag, number
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


def _gemma3(raw: Json) -> Fields:
    for key in ("final_logit_softcapping", "attn_logit_softcapping"):
        if raw.get(key) is not None:
            raise UnsupportedCheckpoint(f"config.json: {key} is not supported in this architecture")
    return _gemma(raw) | {"qk_norm": True, "local_rope": parse_local_rope(raw)}


def _gemma(raw: Json) -> Fields:
    """What Gemmas have in common."""
    return _biases(raw, "qkv", "o") | {
        "gelu": True,
        "float_norms": True,
        "out_norms": True,
        "embed_scale": math.sqrt(number(raw, "hidden_size")),
        "query_scalar": number(raw, "query_pre_attn_scalar"),
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

FAMILIES: Mapping[ModelFamily, FamilyReader] = {
    "llama": FamilyReader(_llama),
    "qwen2": FamilyReader(_qwen2),
    "qwen3": FamilyReader(_qwen3),
    "mistral": FamilyReader(_mistral),
    "mixtral": FamilyReader(_mistral, {"rope_theta": 1e6}),
    "qwen3_moe": FamilyReader(_qwen3),
    "gemma3": FamilyReader(_gemma3, _GEMMA3_DEFAULTS),
}

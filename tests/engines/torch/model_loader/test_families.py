"""Published configurations of each family, shortened, are read as what they compute."""

from __future__ import annotations

import math
from dataclasses import MISSING, fields
from typing import Any

import pytest

from pdserve.errors import UnsupportedCheckpoint
from pdserve_engines.torch.model_loader.config import ModelConfig, parse_config
from pdserve_engines.torch.model_loader.rope_config import RopeConfig

SIZES: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 512,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 8192,
}

PUBLISHED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Phi3ForCausalLM": (
        {"rms_norm_eps": 1e-5, "rope_theta": 250000, "sliding_window": None, "hidden_act": "silu"},
        {"fused_qkv": True, "fused_gate_up": True},
    ),
    "Olmo2ForCausalLM": (
        {"attention_bias": False, "rope_theta": 500000},
        {"in_norms": False, "out_norms": True, "whole_qk_norm": True},
    ),
    "Olmo3ForCausalLM": (
        {"rope_theta": 500000, "sliding_window": 64},
        {
            "in_norms": False,
            "out_norms": True,
            "whole_qk_norm": True,
            "full_layers": (3,),
            "local_rope": RopeConfig("default", 5e5),
        },
    ),
    "GraniteForCausalLM": (
        {
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.0078125,
            "residual_multiplier": 0.22,
            "logits_scaling": 16.0,
        },
        {
            "embed_scale": 12.0,
            "query_scalar": 128.0**2,
            "residual_scale": 0.22,
            "logit_scale": 0.0625,
        },
    ),
    "SmolLM3ForCausalLM": (
        {"no_rope_layers": [1, 1, 1, 0], "no_rope_layer_interval": 4, "rope_theta": 5e6},
        {"nope_layers": (3,)},
    ),
    "Glm4ForCausalLM": (
        {"attention_bias": False, "head_dim": 128, "partial_rotary_factor": 0.5},
        {"out_norms": True, "fused_gate_up": True},
    ),
    "SeedOssForCausalLM": (
        {"attention_bias": True, "attention_out_bias": False, "head_dim": 128},
        {},
    ),
    "Gemma2ForCausalLM": (
        {
            "head_dim": 256,
            "query_pre_attn_scalar": 144,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "hidden_activation": "gelu_pytorch_tanh",
        },
        {
            "gelu": True,
            "float_norms": True,
            "out_norms": True,
            "embed_scale": math.sqrt(512),
            "query_scalar": 144.0,
            "attention_cap": 50.0,
            "logit_cap": 30.0,
            "full_layers": (1, 3),
        },
    ),
    "GemmaForCausalLM": (
        {"head_dim": 256, "hidden_act": "gelu", "hidden_activation": None},
        {"gelu": True, "float_norms": True, "embed_scale": math.sqrt(512)},
    ),
    "GlmForCausalLM": ({"attention_bias": True, "head_dim": 128}, {"fused_gate_up": True}),
    "CohereForCausalLM": (
        {"logit_scale": 0.0625, "layer_norm_eps": 1e-5, "use_qk_norm": False},
        {"layer_norms": True, "parallel": True, "logit_scale": 0.0625},
    ),
    "Exaone4ForCausalLM": (
        {
            "sliding_window": 4096,
            "sliding_window_pattern": "LLLG",
            "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        },
        {"in_norms": False, "out_norms": True, "full_layers": (3,), "nope_layers": (3,)},
    ),
    "Ernie4_5ForCausalLM": ({"use_bias": False, "head_dim": 128, "rope_theta": 5e5}, {}),
    "Cohere2ForCausalLM": (
        {"logit_scale": 0.25, "layer_norm_eps": 1e-5, "use_qk_norm": False},
        {
            "layer_norms": True,
            "parallel": True,
            "logit_scale": 0.25,
            "full_layers": (3,),
            "nope_layers": (3,),
        },
    ),
}


def read(architecture: str, **changes: Any) -> ModelConfig:
    keys, _ = PUBLISHED[architecture]
    return parse_config(SIZES | keys | {"architectures": [architecture]} | changes)


@pytest.mark.parametrize("architecture", PUBLISHED)
def test_a_published_configuration_says_how_its_layers_differ(architecture: str) -> None:
    config = read(architecture)
    options = {
        field.name: getattr(config, field.name)
        for field in fields(config)
        if field.default is not MISSING and getattr(config, field.name) != field.default
    }
    assert options == PUBLISHED[architecture][1]


@pytest.mark.parametrize(
    ("architecture", "biases"),
    [
        ("Phi3ForCausalLM", (False, False, False)),
        ("Olmo2ForCausalLM", (True, True, False)),
        ("GraniteForCausalLM", (True, True, True)),
        ("SmolLM3ForCausalLM", (True, True, True)),
        ("GemmaForCausalLM", (True, True, False)),
        ("GlmForCausalLM", (True, False, False)),
        ("CohereForCausalLM", (True, True, False)),
        ("Exaone4ForCausalLM", (False, False, False)),
        ("Ernie4_5ForCausalLM", (False, False, False)),
        ("Glm4ForCausalLM", (True, False, False)),
        ("SeedOssForCausalLM", (True, False, True)),
        ("Gemma2ForCausalLM", (True, True, False)),
        ("Cohere2ForCausalLM", (True, True, False)),
    ],
)
def test_bias_keys_mean_what_each_family_makes_of_them(
    architecture: str, biases: tuple[bool, bool, bool]
) -> None:
    config = read(architecture, attention_bias=True, mlp_bias=True)
    assert (config.qkv_bias, config.o_bias, config.mlp_bias) == biases


@pytest.mark.parametrize(
    ("architecture", "tied", "eps", "theta", "head_dim"),
    [
        ("Phi3ForCausalLM", False, 1e-5, 1e4, 128),
        ("Olmo2ForCausalLM", False, 1e-5, 1e4, 128),
        ("Olmo3ForCausalLM", False, 1e-5, 5e5, 128),
        ("GraniteForCausalLM", False, 1e-6, 1e4, 128),
        ("SmolLM3ForCausalLM", True, 1e-6, 2e6, 128),
        ("GemmaForCausalLM", True, 1e-6, 1e4, 256),
        ("GlmForCausalLM", False, 1.5625e-07, 1e4, 128),
        ("CohereForCausalLM", True, 1e-5, 5e5, 128),
        ("Exaone4ForCausalLM", False, 1e-5, 1e4, 128),
        ("Ernie4_5ForCausalLM", True, 1e-5, 5e5, 128),
        ("Glm4ForCausalLM", False, 1.5625e-07, 1e4, 128),
        ("SeedOssForCausalLM", False, 1e-6, 1e4, 128),
        ("Gemma2ForCausalLM", True, 1e-6, 1e4, 256),
        ("Cohere2ForCausalLM", True, 1e-5, 1e4, 128),
    ],
)
def test_what_a_configuration_leaves_out_is_the_familys(
    architecture: str, tied: bool, eps: float, theta: float, head_dim: int
) -> None:
    config = parse_config(SIZES | {"architectures": [architecture]})
    assert (config.tied, config.rms_eps, config.rope.theta) == (tied, eps, theta)
    assert config.head_dim == head_dim


def test_an_ernie_has_all_biases_or_none() -> None:
    config = read("Ernie4_5ForCausalLM", use_bias=True)
    assert config.qkv_bias
    assert config.o_bias
    assert config.mlp_bias


def test_a_gemma2_may_have_no_bounds() -> None:
    config = read("Gemma2ForCausalLM", attn_logit_softcapping=None, final_logit_softcapping=None)
    assert config.attention_cap is None
    assert config.logit_cap is None


def test_an_olmo3_stretches_only_the_layers_without_a_window() -> None:
    """Both spellings: as published, and as newer tools write it."""
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 1024}
    older = read("Olmo3ForCausalLM", rope_scaling=yarn)
    newer = read(
        "Olmo3ForCausalLM",
        rope_theta=None,
        rope_parameters={
            "full_attention": yarn | {"rope_theta": 5e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
        },
    )
    for config in (older, newer):
        ropes = [config.rope_of(layer) for layer in (0, 3)]
        assert [rope and (rope.kind, rope.theta) for rope in ropes] == [
            ("default", 5e5),
            ("yarn", 5e5),
        ]


@pytest.mark.parametrize("architecture", ["CohereForCausalLM", "Cohere2ForCausalLM"])
def test_a_cohere_with_norms_of_q_and_k_is_refused(architecture: str) -> None:
    with pytest.raises(UnsupportedCheckpoint, match="use_qk_norm"):
        read(architecture, use_qk_norm=True)

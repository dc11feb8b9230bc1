"""Every configuration the engine understands, and every one it must refuse by name."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import pytest

from pdserve.errors import UnsupportedCheckpoint
from pdserve_engines.torch.model_loader.architectures import ARCHITECTURES
from pdserve_engines.torch.model_loader.config import (
    ExpertsConfig,
    SwigluConfig,
    parse_config,
    read_config,
)
from pdserve_engines.torch.model_loader.rope_config import YarnConfig
from tests.engines.torch.checkpoints import TINY

if TYPE_CHECKING:
    from pathlib import Path

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
QWEN2 = LLAMA | {"architectures": ["Qwen2ForCausalLM"]}
MISTRAL = LLAMA | {"architectures": ["MistralForCausalLM"]}
MIXTRAL = LLAMA | {
    "architectures": ["MixtralForCausalLM"],
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
QWEN3_MOE = LLAMA | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
}
GEMMA3 = LLAMA | {"architectures": ["Gemma3ForCausalLM"], "head_dim": 16}


def test_a_minimal_configuration_gets_the_families_defaults() -> None:
    config = parse_config(LLAMA)
    assert (config.family, config.head_dim, config.groups) == ("llama", 16, 2)
    assert config.rms_eps == 1e-6
    assert (config.rope.kind, config.rope.theta) == ("default", 10000.0)
    assert not (config.tied)
    assert not (config.qkv_bias)
    assert not (config.o_bias)
    assert not (config.mlp_bias)
    assert config.eos_token_ids == ()


def test_without_kv_heads_every_query_head_has_its_own() -> None:
    raw = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
    assert parse_config(raw).kv_heads == 4


@pytest.mark.parametrize(
    ("architecture", "expected"),
    [
        ("LlamaForCausalLM", (True, True, True)),
        ("Qwen2ForCausalLM", (True, False, False)),
        ("Qwen3ForCausalLM", (True, True, False)),
        ("MistralForCausalLM", (False, False, False)),
    ],
)
def test_bias_keys_mean_what_each_family_makes_of_them(
    architecture: str, expected: tuple[bool, bool, bool]
) -> None:
    raw = LLAMA | {"architectures": [architecture], "attention_bias": True, "mlp_bias": True}
    config = parse_config(raw)
    assert (config.qkv_bias, config.o_bias, config.mlp_bias) == expected


def test_both_spellings_of_rope_mean_the_same() -> None:
    scaling = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    older = LLAMA | {"rope_theta": 5e5, "rope_scaling": scaling | {"type": "llama3"}}
    newer = LLAMA | {
        "rope_parameters": scaling | {"rope_type": "llama3", "rope_theta": 500000},
        "rope_scaling": None,
    }
    assert parse_config(older).rope == parse_config(newer).rope
    assert parse_config(older).rope.original_max_positions == 64


def test_ends_are_the_union_of_both_files() -> None:
    config = parse_config(LLAMA | {"eos_token_id": 5}, {"eos_token_id": [9, 5]})
    assert config.eos_token_ids == (9, 5)
    assert parse_config(LLAMA | {"eos_token_id": [1, 2]}).eos_token_ids == (1, 2)


@pytest.mark.parametrize("name", TINY)
def test_what_transformers_writes_can_be_read(name: str, tmp_path: Path) -> None:
    written = TINY[name].config()
    written.architectures = [TINY[name].architecture]
    written.save_pretrained(tmp_path)
    config = read_config(tmp_path)
    text = written.get_text_config()
    assert config.family == ARCHITECTURES[TINY[name].architecture]
    assert config.kv_heads == text.num_key_value_heads
    rope = text.rope_parameters
    assert config.rope.kind == rope.get("full_attention", rope)["rope_type"]
    assert config.eos_token_ids == (7,)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config (awq)"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"num_local_experts": 8}, "num_local_experts"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_scaling": {"rope_type": "dynamic"}}, "factor"),
        ({"rope_scaling": {"rope_type": "proportional"}}, "'proportional'"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "short_factor must be a list of 8"),
        ({"rope_scaling": {"type": "default", "mrope_section": [1, 1]}}, "mrope_section"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "by layer"),
        ({"rope_scaling": {"type": "yarn", "llama_4_scaling_beta": 0.1}}, "llama_4_scaling_beta"),
        ({"rope_scaling": {"type": "yarn", "factor": "large"}}, "factor"),
        (MIXTRAL | {"num_experts_per_tok": 5}, "num_experts_per_tok 5"),
        (MIXTRAL | {"num_local_experts": None}, "num_local_experts"),
        (QWEN3_MOE | {"moe_intermediate_size": None}, "moe_intermediate_size"),
        (QWEN3_MOE | {"mlp_only_layers": 3}, "mlp_only_layers"),
        (GEMMA3 | {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        (GEMMA3 | {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        (GEMMA3 | {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        (GEMMA3 | {"hidden_activation": "relu"}, "hidden_activation 'relu'"),
        (GEMMA3 | {"sliding_window": None}, "sliding_window"),
        (GEMMA3 | {"layer_types": ["full_attention"]}, "layer_types must name 2"),
        (GEMMA3 | {"layer_types": ["full_attention", "linear_attention"]}, "'linear_attention'"),
        (GEMMA3 | {"text_config": 3}, "text_config"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3"),
        ({"hidden_size": 66}, "hidden_size 66"),
        ({"head_dim": 15}, "head_dim 15"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"hidden_size": None}, "hidden_size"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"eos_token_id": [2, -1]}, "eos_token_id"),
        ({"eos_token_id": 1 << 31}, "eos_token_id 2147483648"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be at most 10000"),
        (MIXTRAL | {"num_local_experts": 10**9}, "num_local_experts must be at most 10000"),
        (GEMMA3 | {"sliding_window": 10**30}, "sliding_window must be at most"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a finite number"),
        ({"rope_theta": 0}, "rope_theta must be larger than zero"),
        ({"rope_parameters": [1]}, "rope_parameters must be an object"),
        ({"rope_scaling": {"type": "linear", "factor": -2.0}}, "factor must be larger than zero"),
        ({"rope_scaling": {"type": "yarn", "factor": float("inf")}}, "factor must be a finite"),
    ],
)
def test_what_the_engine_lacks_is_refused_by_name(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedCheckpoint) as error:
        parse_config(LLAMA | fields)
    assert named in error.value.message


@pytest.mark.parametrize(
    ("raw", "windows"),
    [
        (MISTRAL, [4096, 4096]),
        (MISTRAL | {"sliding_window": 64}, [64, 64]),
        (MISTRAL | {"sliding_window": None}, [None, None]),
        (MIXTRAL, [None, None]),
        (MIXTRAL | {"sliding_window": 64}, [64, 64]),
        (LLAMA | {"sliding_window": 64}, [None, None]),
        (QWEN2 | {"sliding_window": 64}, [None, None]),
        (QWEN2 | {"sliding_window": 64, "use_sliding_window": True}, [None, None]),
        (QWEN2 | {"use_sliding_window": True, "max_window_layers": 0}, [4096, 4096]),
        (
            QWEN2 | {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 1},
            [None, 64],
        ),
        (
            QWEN2
            | {
                "sliding_window": 64,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            [64, None],
        ),
        (QWEN3_MOE | {"sliding_window": 64}, [None, None]),
        (QWEN3_MOE | {"sliding_window": 64, "use_sliding_window": True}, [64, 64]),
        (GEMMA3, [4096, 4096]),
        (GEMMA3 | {"sliding_window": 64, "sliding_window_pattern": 2}, [64, None]),
        (GEMMA3 | {"layer_types": ["full_attention", "sliding_attention"]}, [None, 4096]),
    ],
)
def test_each_layer_has_its_window(raw: dict[str, Any], windows: list[int | None]) -> None:
    config = parse_config(raw)
    assert [config.window(layer) for layer in range(2)] == windows


def test_yarn_stretches_the_context_and_sharpens_attention() -> None:
    """Published long-context settings: the other key still says the original length."""
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    config = parse_config(LLAMA | {"rope_scaling": scaling})
    assert config.max_positions == 2048
    assert config.rope.yarn == YarnConfig(32.0, 1.0, 0.1 * math.log(4.0) + 1.0, True)
    config = parse_config(LLAMA | {"max_position_embeddings": 4096, "rope_scaling": scaling})
    assert config.max_positions == 4096
    config = parse_config(LLAMA | {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}})
    assert (config.rope.original_max_positions, config.max_positions) == (512, 1024)
    config = parse_config(
        LLAMA | {"rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": 128}}
    )
    assert config.rope.factor == 4.0
    config = parse_config(
        LLAMA | {"rope_scaling": scaling | {"attention_factor": 1.5, "truncate": False}}
    )
    assert config.rope.yarn == YarnConfig(32.0, 1.0, 1.5, False)


def test_experts_are_read_in_every_spelling() -> None:
    mixtral = parse_config(MIXTRAL).experts
    assert mixtral == ExpertsConfig(4, 2, 96, normalized=True, dense_layers=())
    qwen = QWEN3_MOE | {"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    assert parse_config(qwen).experts == ExpertsConfig(8, 3, 24, False, dense_layers=(0, 2, 3))
    renamed = {key: value for key, value in QWEN3_MOE.items() if key != "num_experts"}
    assert (
        parse_config(renamed | {"num_local_experts": 8}).experts == parse_config(QWEN3_MOE).experts
    )


def test_both_spellings_of_a_gemma3_mean_the_same() -> None:
    older = GEMMA3 | {
        "rope_theta": 2e6,
        "rope_local_base_freq": 3e4,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    }
    newer = GEMMA3 | {
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 3e4},
        }
    }
    assert parse_config(older) == parse_config(newer)
    config = parse_config(older | {"sliding_window_pattern": 2})
    ropes = [config.rope_of(layer) for layer in range(2)]
    assert [rope and (rope.theta, rope.kind) for rope in ropes] == [
        (3e4, "default"),
        (2e6, "linear"),
    ]


def test_a_multimodal_gemma3_is_its_text_part() -> None:
    """As published: little is said of the text part, the rest is the family's."""
    raw = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "eos_token_id": [1, 106],
        "torch_dtype": "bfloat16",
        "vision_config": {"hidden_size": 1152},
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
    }
    config = parse_config(raw)
    assert (config.hidden_size, config.num_heads, config.kv_heads, config.head_dim) == (
        2560,
        8,
        4,
        256,
    )
    assert (config.vocab_size, config.max_positions, config.tied) == (262208, 131072, True)
    assert (config.eos_token_ids, config.dtype) == ((1, 106), "bfloat16")
    assert [layer for layer in range(34) if config.window(layer) is None] == [5, 11, 17, 23, 29]
    assert config.rope.theta == 1e6


def test_unreadable_configurations_are_refused_with_the_file(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedCheckpoint, match=r"config\.json: no such file"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UnsupportedCheckpoint, match=r"config\.json"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(UnsupportedCheckpoint, match="not a JSON object"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "generation_config.json").write_text("nonsense")
    with pytest.raises(UnsupportedCheckpoint, match=r"generation_config\.json"):
        read_config(tmp_path)


def test_published_gpt_oss_configurations_are_read() -> None:
    raw = LLAMA | {
        "architectures": ["GptOssForCausalLM"],
        "attention_bias": True,
        "experts_per_token": 4,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2880,
        "initial_context_length": 4096,
        "intermediate_size": 2880,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "max_position_embeddings": 131072,
        "num_attention_heads": 64,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 4,
        "num_key_value_heads": 8,
        "num_local_experts": 32,
        "quantization_config": {
            "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"],
            "quant_method": "mxfp4",
        },
        "rms_norm_eps": 1e-5,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 150000,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
    }
    config = parse_config(raw)
    assert (config.qkv_bias, config.o_bias, config.sinks) == (True, True, True)
    assert [config.window(layer) for layer in range(4)] == [128, None, 128, None]
    assert config.max_positions == 131072
    assert config.rope.yarn is not None
    assert not config.rope.yarn.truncate
    assert config.experts == ExpertsConfig(
        count=32,
        per_token=4,
        intermediate_size=2880,
        normalized=True,
        dense_layers=(),
        bias=True,
        swiglu=SwigluConfig(alpha=1.702, limit=7.0),
        storage="mxfp4",
    )
    bare = {key: value for key, value in raw.items() if key != "quantization_config"}
    unquantised = parse_config(bare).experts
    assert unquantised is not None
    assert unquantised.storage == "stacked"
    raw["architectures"] = ["LlamaForCausalLM"]
    with pytest.raises(UnsupportedCheckpoint, match="mxfp4"):
        parse_config(raw)

"""Every configuration the engine understands, and every one it must refuse by name."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from pdserve.errors import UnsupportedCheckpoint
from pdserve_engines.torch.config import check_window, parse_config, read_config
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


@pytest.mark.parametrize("name", list(TINY))
def test_what_transformers_writes_can_be_read(name: str, tmp_path: Path) -> None:
    written = TINY[name].config()
    written.architectures = [f"{TINY[name].family}ForCausalLM"]
    written.save_pretrained(tmp_path)
    config = read_config(tmp_path)
    assert config.family == TINY[name].family.lower()
    assert config.kv_heads == written.num_key_value_heads
    assert config.rope.kind == written.rope_parameters["rope_type"]
    assert config.eos_token_ids == (7,)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM"),
        ({"architectures": None}, "architecture none"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config (awq)"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"num_local_experts": 8}, "num_local_experts"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "'yarn'"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "'longrope'"),
        ({"rope_scaling": {"type": "default", "mrope_section": [1, 1]}}, "mrope_section"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
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
    ],
)
def test_what_the_engine_lacks_is_refused_by_name(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedCheckpoint) as error:
        parse_config(LLAMA | fields)
    assert named in error.value.message


@pytest.mark.parametrize(
    ("raw", "window"),
    [
        (MISTRAL, 4096),
        (MISTRAL | {"sliding_window": 64}, 64),
        (MISTRAL | {"sliding_window": None}, None),
        (LLAMA | {"sliding_window": 64}, None),
        (QWEN2 | {"sliding_window": 64}, None),
        (QWEN2 | {"sliding_window": 64, "use_sliding_window": True}, None),
        (
            QWEN2 | {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 1},
            64,
        ),
        (
            QWEN2
            | {
                "sliding_window": 64,
                "use_sliding_window": True,
                "layer_types": ["full_attention", "sliding_attention"],
            },
            64,
        ),
    ],
)
def test_a_sliding_window_counts_only_where_a_layer_uses_it(
    raw: dict[str, Any], window: int | None
) -> None:
    assert parse_config(raw).sliding_window == window


def test_a_window_is_refused_only_if_sequences_can_outgrow_it() -> None:
    config = parse_config(MISTRAL | {"sliding_window": 64})
    check_window(config, 64)
    with pytest.raises(UnsupportedCheckpoint, match="--max-model-len 64 would serve"):
        check_window(config, 65)


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

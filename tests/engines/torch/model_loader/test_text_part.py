"""Of published multimodal configurations the text part is read, wherever its keys are."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve_engines.torch.model_loader.config import ModelConfig, parse_config

TEXT: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 512,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
}
QWEN2_5 = "Qwen2_5_VLForConditionalGeneration"
QWEN3 = "Qwen3VLForConditionalGeneration"
MISTRAL3 = "Mistral3ForConditionalGeneration"


def whole(architecture: str, **keys: Any) -> ModelConfig:
    return parse_config({"architectures": [architecture], "vision_config": {"depth": 1}} | keys)


def test_the_first_qwen_vl_wrote_it_beside_the_other_parts() -> None:
    mrope = {"type": "mrope", "mrope_section": [16, 24, 24]}
    config = whole(QWEN2_5, **TEXT, rope_theta=1e6, rope_scaling=mrope, use_sliding_window=False)
    assert (config.family, config.qkv_bias, config.multimodal) == ("qwen2", True, True)
    assert (config.rope.kind, config.rope.theta) == ("default", 1e6)


def test_text_turns_by_one_position_whatever_the_sections() -> None:
    rope = {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [24, 20, 20]}
    config = whole(QWEN3, text_config=TEXT | {"rope_scaling": rope, "rope_theta": 5e6})
    assert (config.family, config.qk_norm, config.head_dim) == ("qwen3", True, 128)
    assert config.rope == whole(QWEN3, text_config=TEXT | {"rope_theta": 5e6}).rope


@pytest.mark.parametrize(("architecture", "theta"), [(QWEN2_5, 1e6), (QWEN3, 5e5), (MISTRAL3, 1e4)])
def test_what_the_text_part_leaves_out_is_its_own_default(architecture: str, theta: float) -> None:
    assert whole(architecture, text_config=TEXT).rope.theta == theta


@pytest.mark.parametrize(
    ("outer", "inner", "tied", "by_tensors"),
    [
        ({"tie_word_embeddings": True}, {}, True, False),
        ({"tie_word_embeddings": False}, {"tie_word_embeddings": True}, False, False),
        ({}, {"tie_word_embeddings": True}, True, False),
        ({}, {"tie_word_embeddings": False}, False, False),
        ({}, {}, False, True),
    ],
)
def test_the_whole_model_says_first_whether_the_embedding_is_the_output_layer(
    outer: dict[str, Any], inner: dict[str, Any], tied: bool, by_tensors: bool
) -> None:
    config = whole(MISTRAL3, text_config=TEXT | inner, **outer)
    assert (config.tied, config.tied_unless_stored) == (tied, by_tensors)


def test_ends_and_dtype_are_the_whole_models() -> None:
    config = whole(MISTRAL3, text_config=TEXT | {"dtype": "float32"}, dtype="bfloat16")
    assert (config.dtype, config.sliding_window) == ("bfloat16", 4096)
    assert whole(MISTRAL3, text_config=TEXT, eos_token_id=2).eos_token_ids == (2,)

"""How KV memory becomes blocks."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.engine.executor import KvLayout, ModelInfo
from pdserve.engine.sizing import size_pool
from pdserve.errors import ConfigError
from pdserve.messages.engine import EngineSpec

LAYOUT = KvLayout(num_layers=2, kv_heads=2, block_size=16, head_dim=8, itemsize=4)


def info(**changes: Any) -> ModelInfo:
    fields: dict[str, Any] = {
        "model_type": "llama",
        "dtype": "float32",
        "device": "cpu",
        "vocab_size": 100,
        "max_model_len": 64,
        "eos_token_ids": (),
        "layout": LAYOUT,
        "weight_bytes": 0,
        "kv_memory": 10 * LAYOUT.block_bytes,
    }
    return ModelInfo(**(fields | changes))


def spec(**changes: Any) -> EngineSpec:
    return EngineSpec(engine="e", model="m", **changes)


def test_memory_is_divided_into_whole_blocks():
    sizing = size_pool(spec(kv_memory=7 * LAYOUT.block_bytes + 5), info())
    assert (sizing.num_blocks, sizing.max_model_len, sizing.warning) == (7, 64, None)


def test_without_a_wish_the_executors_proposal_holds():
    assert size_pool(spec(), info()).num_blocks == 10


def test_a_checkpoints_length_is_reduced_with_a_warning():
    sizing = size_pool(spec(kv_memory=3 * LAYOUT.block_bytes), info())
    assert sizing.max_model_len == 48
    assert sizing.warning
    assert "reduced to 48" in sizing.warning
    assert str(4 * LAYOUT.block_bytes) in sizing.warning


def test_a_length_that_was_asked_for_is_refused_instead():
    with pytest.raises(ConfigError, match=f"needs {4 * LAYOUT.block_bytes} bytes: raise"):
        size_pool(spec(kv_memory=3 * LAYOUT.block_bytes, max_model_len=64), info())


def test_memory_for_not_even_one_block_is_refused():
    with pytest.raises(ConfigError, match="KV memory of 10 bytes holds no block"):
        size_pool(spec(kv_memory=10), info())


def test_who_gave_all_of_it_is_told_that_this_is_a_share():
    with pytest.raises(ConfigError, match="of 5 bytes, which is 50% of --kv-memory, holds no"):
        size_pool(spec(kv_memory=10, kv_share=0.5), info())

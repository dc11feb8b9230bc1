"""How KV memory becomes blocks."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.engine_core.executor import KvBlockShape, ModelInfo
from pdserve.engine_core.pool_sizing import size_pool
from pdserve.errors import ConfigError
from pdserve.messages.engine import EngineSpec

LAYOUT = KvBlockShape(num_layers=2, kv_heads=2, block_size=16, head_dim=8, itemsize=4)


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
    with pytest.raises(
        ConfigError, match=f"raise --kv-memory to {4 * LAYOUT.block_bytes} or lower"
    ):
        size_pool(spec(kv_memory=3 * LAYOUT.block_bytes, max_model_len=64), info())


def test_memory_for_not_even_one_block_is_refused():
    with pytest.raises(ConfigError, match=r"KV memory of 10 bytes \(10 B\) holds no block"):
        size_pool(spec(kv_memory=10), info())


def test_who_gave_all_of_it_is_told_that_this_is_a_share():
    with pytest.raises(ConfigError, match=r"of 5 bytes \(5 B, 50% of --kv-memory\) holds no"):
        size_pool(spec(kv_memory=10, kv_share=0.5), info())


def test_more_than_there_is_is_refused_with_both_numbers():
    most = info(kv_most=1 << 30, kv_reason="of the 1.1 GiB that are free (the machine)")
    with pytest.raises(ConfigError, match=r"100\.0 GiB .*: 1\.0 GiB of the 1\.1 GiB .*machine"):
        size_pool(spec(kv_memory=100 << 30), most)


def test_a_remedy_that_cannot_work_is_not_named():
    little = info(kv_most=3 * LAYOUT.block_bytes)
    with pytest.raises(ConfigError, match=r"bytes .*: lower --max-model-len to 48"):
        size_pool(spec(kv_memory=3 * LAYOUT.block_bytes, max_model_len=64), little)
    sizing = size_pool(spec(), info(kv_memory=3 * LAYOUT.block_bytes, kv_most=1))
    assert "more does not fit here" in (sizing.warning or "")


def test_the_remedy_of_one_that_shares_is_for_all():
    sizing = size_pool(spec(kv_share=0.5), info(kv_memory=6 * LAYOUT.block_bytes))
    assert (sizing.num_blocks, sizing.max_model_len) == (3, 48)
    assert f"--kv-memory {8 * LAYOUT.block_bytes} gives all of it" in (sizing.warning or "")

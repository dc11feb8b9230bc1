"""A pool that was too large for its memory becomes smaller, never too small for the context."""

from __future__ import annotations

from msgspec.structs import replace

from pdserve.engine.oom_recovery import with_less_kv
from pdserve.engine_core.executor import KvBlockShape
from pdserve.engine_core.pool_sizing import size_pool
from pdserve.messages.engine import EngineSpec
from tests.engine_core.test_main import CAPABILITIES
from tests.engine_core.test_pool_sizing import info

BLOCK = 1000
SPEC = EngineSpec(engine="e", model="m", kv_memory=100 * BLOCK)
HAD = replace(CAPABILITIES, num_blocks=100, block_bytes=BLOCK, block_size=16, max_model_len=16 * 60)


def test_a_quarter_goes_each_time_until_one_context_is_left() -> None:
    spec = with_less_kv(SPEC, HAD)
    assert spec == replace(SPEC, kv_cap=75 * BLOCK, max_model_len=16 * 60)
    spec = with_less_kv(SPEC, replace(HAD, num_blocks=75))
    assert spec is not None
    assert spec.kv_cap == 60 * BLOCK
    assert with_less_kv(SPEC, replace(HAD, num_blocks=60)) is None


def test_the_next_pool_is_the_one_that_was_meant() -> None:
    layout = KvBlockShape(num_layers=1, kv_heads=1, block_size=16, head_dim=8, itemsize=4)
    known = info(layout=layout, kv_most=10**9, kv_memory=10**9)
    had = replace(HAD, block_bytes=layout.block_bytes)
    for share in (1.0, 0.5, 1 / 3):
        spec = with_less_kv(replace(SPEC, kv_memory=10**9, kv_share=share), had)
        assert spec is not None
        sizing = size_pool(spec, known)
        assert sizing.num_blocks == 75
        assert "memory ran out" in (sizing.warning or "")
        less = size_pool(
            spec, info(layout=layout, kv_most=int(70 * layout.block_bytes / share) + 1)
        )
        assert less.num_blocks <= 70


def test_no_block_is_lost_to_rounding() -> None:
    """The last one would make the pool too small for its context."""
    spec = replace(SPEC, kv_share=0.7)
    for blocks in range(2, 2000):
        had = replace(HAD, num_blocks=blocks + 1, block_bytes=65536, max_model_len=16 * blocks)
        smaller = with_less_kv(spec, had)
        assert smaller is not None
        assert int(smaller.kv_cap * smaller.kv_share) // 65536 == blocks


def test_an_engine_without_kv_is_started_as_it_was() -> None:
    assert with_less_kv(SPEC, replace(HAD, num_blocks=0, block_bytes=0)) is SPEC

"""The compat hash and the memory that is proposed for KV."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from pdserve.engine.executor import KvLayout
from pdserve_engines.torch.config import ModelConfig, parse_config
from pdserve_engines.torch.executor import TorchExecutor
from pdserve_engines.torch.facts import compat_hash, propose_kv_memory
from pdserve_engines.torch.host import available_memory
from tests.engines.torch.checkpoints import checkpoint
from tests.engines.torch.driver import spec
from tests.engines.torch.test_config import LLAMA, MISTRAL, QWEN2

if TYPE_CHECKING:
    from pathlib import Path

    from pdserve.messages.engine import EngineSpec

LAYOUT = KvLayout(num_layers=2, kv_heads=2, block_size=32, head_dim=16, itemsize=4)
CONFIG = parse_config(LLAMA)
YARN = {"type": "yarn", "factor": 4.0}


@pytest.mark.parametrize(
    "other",
    [
        (replace(CONFIG, rms_eps=1e-5), LAYOUT, "float32", b"w"),
        (replace(CONFIG, rope=replace(CONFIG.rope, theta=5e5)), LAYOUT, "float32", b"w"),
        (parse_config(LLAMA | {"rope_scaling": YARN}), LAYOUT, "float32", b"w"),
        (replace(CONFIG, sliding_window=64), LAYOUT, "float32", b"w"),
        (replace(CONFIG, embed_scale=2.0), LAYOUT, "float32", b"w"),
        (CONFIG, replace(LAYOUT, block_size=16), "float32", b"w"),
        (CONFIG, replace(LAYOUT, kv_heads=4), "float32", b"w"),
        (CONFIG, LAYOUT, "bfloat16", b"w"),
        (CONFIG, LAYOUT, "float32", b"other weights"),
    ],
)
def test_blocks_of_different_models_never_look_compatible(
    other: tuple[ModelConfig, KvLayout, str, bytes],
) -> None:
    assert compat_hash(*other) != compat_hash(CONFIG, LAYOUT, "float32", b"w")


@pytest.mark.parametrize(
    ("raw", "known"),
    [
        (LLAMA, "a0afd1c05815f07ecb5d58443e845b33"),
        (MISTRAL, "c1497a99368b74bbb4b9ae25b7a7c894"),
        (
            QWEN2 | {"rope_scaling": {"type": "linear", "factor": 2.0}},
            "0523cbcf9a8fe33dc3fe9d7128ba06f3",
        ),
    ],
)
def test_blocks_of_the_release_before_are_still_understood(raw: dict[str, Any], known: str) -> None:
    """While workers are replaced one by one, the old and the new hand over to each other."""
    assert compat_hash(parse_config(raw), LAYOUT, "float32", b"w") == known


def test_limits_and_ends_do_not_separate_workers() -> None:
    other = replace(CONFIG, max_positions=99, eos_token_ids=(5,), dtype="bfloat16")
    assert compat_hash(other, LAYOUT, "float32", b"w") == compat_hash(
        CONFIG, LAYOUT, "float32", b"w"
    )


def load(**fields: object) -> str:
    executor = TorchExecutor()
    wanted: EngineSpec = spec(checkpoint("llama")[0], **fields)
    found = executor.load(wanted, lambda stage, fraction: None).compat_hash
    executor.close()
    return found


def test_workers_of_one_checkpoint_agree_whatever_computes() -> None:
    first = load()
    assert load(max_model_len=64, threads=2, options={"kernels": "torch"}) == first
    assert load(dtype="bfloat16") != first
    assert load(block_size=16) != first


def test_kv_memory_is_what_is_free_within_what_is_useful() -> None:
    one = 4 * LAYOUT.block_bytes
    assert propose_kv_memory(LAYOUT, 100, 8, free=10 * one) == 8 * one
    assert propose_kv_memory(LAYOUT, 100, 8, free=5 * one) == 5 * one
    assert propose_kv_memory(LAYOUT, 100, 8, free=0) == one


def test_a_control_group_bounds_the_memory(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9999 kB\nMemAvailable: 4096 kB\n")
    assert available_memory(tmp_path, meminfo) == 4096 << 10
    (tmp_path / "memory.max").write_text("3000000\n")
    (tmp_path / "memory.current").write_text("1000000\n")
    assert available_memory(tmp_path, meminfo) == 2000000
    (tmp_path / "memory.max").write_text("max\n")
    assert available_memory(tmp_path, meminfo) == 4096 << 10
    assert available_memory(tmp_path / "none", tmp_path / "none") > 0

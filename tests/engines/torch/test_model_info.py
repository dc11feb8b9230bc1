"""The compat hash."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from msgspec import structs

from pdserve import accel
from pdserve.engine_core.executor import KvBlockShape
from pdserve.messages.card import CLOSE_PREFIX, EXACT_PREFIX
from pdserve_engines.torch.executor import TorchExecutor
from pdserve_engines.torch.kv_budget import AvailableMemory
from pdserve_engines.torch.model_info import compat_hash, plan_kv_budget
from pdserve_engines.torch.model_loader.config import ModelConfig, parse_config
from pdserve_engines.torch.settings import resolve_settings
from tests.engines.torch.checkpoints import checkpoint
from tests.engines.torch.driver import loaded, spec
from tests.engines.torch.model_loader.test_config import GEMMA3, LLAMA, MISTRAL, MIXTRAL, QWEN2

if TYPE_CHECKING:
    from pdserve.messages.engine import EngineSpec

LAYOUT = KvBlockShape(num_layers=2, kv_heads=2, block_size=32, head_dim=16, itemsize=4)
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
    other: tuple[ModelConfig, KvBlockShape, str, bytes],
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
        (LLAMA | {"rope_scaling": YARN}, "e7dca18c5275f46bfae150cc062e61d8"),
        (MIXTRAL, "81083d381d20e258ca1fbfcd4621e4e2"),
        (GEMMA3, "e1f644acb1fbe1400d10c722b205b704"),
        (
            GEMMA3 | {"architectures": ["Gemma3ForConditionalGeneration"]},
            "e1f644acb1fbe1400d10c722b205b704",
        ),
    ],
)
def test_blocks_of_the_release_before_are_still_understood(raw: dict[str, Any], known: str) -> None:
    """While workers are replaced one by one, the old and the new hand over to each other."""
    assert compat_hash(parse_config(raw), LAYOUT, "float32", b"w") == known


def test_keys_turned_by_another_context_are_not_exchanged() -> None:
    hashes = []
    for length in (16, 17, 200):
        executor = TorchExecutor()
        wanted = spec(checkpoint("phi3")[0], max_model_len=length)
        hashes.append(executor.load(wanted, lambda stage, fraction: None).compat_hash)
        executor.close()
    assert hashes[0] != hashes[1] == hashes[2]


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


@pytest.mark.parametrize(
    ("kernels", "dtype", "exact", "close"),
    [
        ("native", "float32", True, True),
        ("native", "bfloat16", False, False),
        ("torch", "float32", False, True),
    ],
)
def test_only_kernels_that_compute_a_row_by_itself_promise_the_same_tokens(
    kernels: str, dtype: str, exact: bool, close: bool
) -> None:
    if kernels == "native" and not accel.NATIVE:
        pytest.skip(accel.REASON)
    executor = loaded(checkpoint("llama")[0], dtype=dtype, options={"kernels": kernels})
    assert executor.info is not None
    found = [one for one in executor.info.features if one.startswith(EXACT_PREFIX)]
    assert (f"{CLOSE_PREFIX}float32" in executor.info.features) == close
    executor.close()
    assert bool(found) == exact
    assert all(one.startswith("exact:native ") for one in found)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_on_gpus_hold_their_own_heads_only(ranks: int) -> None:
    """Of the same GPU's memory, a rank has room for as many more blocks as it holds fewer heads."""
    room = AvailableMemory(70 << 30, "cuda:0", 80 << 30, 8 << 30)
    config = parse_config(LLAMA | {"num_key_value_heads": 4, "num_attention_heads": 16})
    one = spec(Path("m"), max_sequences=100_000)
    settings = resolve_settings(one, config)
    alone = plan_kv_budget(one, config, settings, room)
    wanted = structs.replace(one, tensor_parallel=ranks)
    found = plan_kv_budget(wanted, config, settings, room)
    assert found.most / alone.most == pytest.approx(min(ranks, 4), rel=0.3)
    assert f"on each of {ranks} ranks" in found.reason

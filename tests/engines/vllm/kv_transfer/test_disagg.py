"""Which configurations of vLLM exchange KV, and how large their staging is. Needs no vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pdserve.engine_core.staged_kv.port import StagedBlocks
from pdserve.errors import ConfigError
from pdserve.messages.engine import EngineCapabilities
from pdserve_engines.vllm.kv_transfer import device_staging, disagg
from pdserve_engines.vllm.kv_transfer.copy_planner import CopyPlanner, LetGo
from pdserve_engines.vllm.kv_transfer.disagg import (
    VllmStaging,
    check_exchangeable,
    settle_failed_loads,
)
from pdserve_engines.vllm.kv_transfer.kv_copy import CacheForm

FORM = CacheForm(packing="rows", layers=2, heads=2, tokens=16, dim=8, itemsize=2, blocks=101)


def config(**changes: Any) -> Any:
    """A configuration whose KV can be exchanged, with changes."""
    model: dict[str, Any] = dict.fromkeys(
        ("use_mla", "is_hybrid", "is_attention_free", "is_encoder_decoder"), False
    )
    parallel = dict.fromkeys(
        (
            "pipeline_parallel_size",
            "decode_context_parallel_size",
            "prefill_context_parallel_size",
            "nnodes",
        ),
        1,
    )
    speculative = changes.pop("speculative_config", None)
    for name, value in changes.items():
        (model if name in model else parallel)[name] = value
    return SimpleNamespace(
        model_config=SimpleNamespace(**model),
        parallel_config=SimpleNamespace(**parallel),
        speculative_config=speculative,
    )


def capabilities(**changes: Any) -> EngineCapabilities:
    fields: dict[str, Any] = {
        "engine": "vllm",
        "model_type": "llama",
        "dtype": "bfloat16",
        "device": "cpu",
        "max_model_len": 160,
        "vocab_size": 99,
        "block_size": 16,
        "num_blocks": 100,
        "block_bytes": 1,
        "max_batch_tokens": 64,
        "max_sequences": 8,
        "compat_hash": "same",
    }
    return EngineCapabilities(**(fields | changes))


def core_of(*forms: Any) -> Any:
    """vLLM's core, as far as staging looks at it."""
    connector = SimpleNamespace(forms=list(forms), staging=None, planner=CopyPlanner(16, 2))
    pool = SimpleNamespace(num_gpu_blocks=101)
    manager = SimpleNamespace(block_pool=pool)
    model = SimpleNamespace(get_total_num_kv_heads=lambda: 4)
    return SimpleNamespace(
        scheduler=SimpleNamespace(connector=connector, kv_cache_manager=manager),
        vllm_config=SimpleNamespace(model_config=model),
        model_executor=SimpleNamespace(),
        request_block_hasher=None,
    )


def said(form: CacheForm | None = FORM, refusal: str = "") -> Any:
    return SimpleNamespace(form=form, refusal=refusal)


# ------------------------------------------------------------------ refusals by name


def test_a_plain_model_is_taken():
    check_exchangeable(config())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"use_mla": True}, "MLA"),
        ({"is_hybrid": True}, "state-space"),
        ({"is_attention_free": True}, "no attention"),
        ({"is_encoder_decoder": True}, "encoder"),
        ({"nnodes": 2}, "several machines"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size"),
        ({"decode_context_parallel_size": 2}, "decode_context_parallel_size"),
        ({"prefill_context_parallel_size": 2}, "prefill_context_parallel_size"),
        ({"speculative_config": object()}, "speculatively"),
    ],
)
def test_others_are_refused_by_name_and_with_the_remedy(changes: dict[str, Any], words: str):
    with pytest.raises(ConfigError, match=words) as caught:
        check_exchangeable(config(**changes))
    assert "--mode=aggregated" in caught.value.message


@pytest.mark.parametrize(("ahead", "policy"), [(False, "recompute"), (True, "fail")])
def test_a_failed_load_is_computed_only_if_no_step_is_ahead(ahead: bool, policy: str):
    wanted = SimpleNamespace(
        scheduler_config=SimpleNamespace(async_scheduling=ahead),
        kv_transfer_config=SimpleNamespace(kv_load_failure_policy="recompute"),
    )
    settle_failed_loads(wanted)
    assert wanted.kv_transfer_config.kv_load_failure_policy == policy


def test_what_a_rank_refuses_is_refused():
    with pytest.raises(ConfigError, match="2 kinds of KV pools"):
        VllmStaging(core_of(said(), said(None, "it has 2 kinds of KV pools")), capabilities(), 0.3)


@pytest.mark.parametrize("forms", [(), (said(), said(CacheForm("rows", 2, 1, 16, 8, 2, 101)))])
def test_ranks_must_agree(forms: tuple[Any, ...]):
    with pytest.raises(ConfigError, match="its ranks"):
        VllmStaging(core_of(*forms), capabilities(), 0.3)


# ------------------------------------------------------------------ staging blocks


def test_staging_has_all_heads_and_says_what_a_block_means():
    core = core_of(said(), said())
    staging = VllmStaging(core, capabilities(), 0.3)
    layout = staging.pool.layout
    assert (layout.heads, layout.layers, layout.tokens, layout.tp) == (4, 2, 16, 1)
    assert layout.content == "same rows"
    assert core.scheduler.connector.staging == staging.pool.handle()
    staging.pool.close()


@pytest.mark.parametrize(
    ("unfilled", "memory", "blocks"),
    [
        (0.3, 1 << 30, 30),
        (0.1, 1 << 30, 20),
        (0.3, 4 * 15 * 4096, 15),
        (0.3, 4 * 4096, 1),
    ],
)
def test_staging_is_a_share_of_vllms_blocks_within_bounds(
    monkeypatch: pytest.MonkeyPatch, unfilled: float, memory: int, blocks: int
):
    """At least two whole sequences of ten blocks, and at most a quarter of the free memory."""
    monkeypatch.setattr(disagg, "available", lambda: SimpleNamespace(free=memory))
    staging = VllmStaging(core_of(said()), capabilities(), unfilled)
    assert staging.pool.block_bytes == 4096
    assert staging.pool.blocks.num_blocks == blocks
    staging.pool.close()


def test_no_memory_is_an_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(disagg, "available", lambda: SimpleNamespace(free=100))
    with pytest.raises(ConfigError, match="no memory"):
        VllmStaging(core_of(said()), capabilities(), 0.3)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A CPU tensor stands for the device's memory. What the test sets: why it is `refused`."""
    torch = pytest.importorskip("torch")
    facts = {"refused": ""}
    monkeypatch.setattr(device_staging, "_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(device_staging, "_unsupported", lambda region: facts["refused"])
    monkeypatch.setattr(disagg, "available", lambda: SimpleNamespace(free=1 << 30))
    return facts


@pytest.mark.parametrize(("kept", "blocks"), [(1 << 20, 30), (25 * 4096 + 17, 25)])
def test_staging_is_in_the_memory_that_the_executor_has_kept(
    device: dict[str, Any], kept: int, blocks: int
):
    core = core_of(said())
    core.model_executor.kept_for_staging = kept
    staging = VllmStaging(core, capabilities(), 0.3)
    assert staging.pool.in_device
    assert staging.pool.blocks.num_blocks == blocks
    assert core.scheduler.connector.staging.local
    tensor = device_staging.tensor_of(core.scheduler.connector.staging)
    assert staging.pool.region.address == tensor.data_ptr()
    staging.pool.close()


@pytest.mark.parametrize(("kept", "refused"), [(1 << 20, "no peer can open it"), (4095, "")])
def test_without_room_that_peers_can_open_staging_is_in_host_memory(
    device: dict[str, Any], caplog: pytest.LogCaptureFixture, kept: int, refused: str
):
    device["refused"] = refused
    core = core_of(said())
    core.model_executor.kept_for_staging = kept
    staging = VllmStaging(core, capabilities(), 0.3)
    assert not staging.pool.in_device
    assert staging.pool.region.fd is not None
    assert refused in caplog.text
    assert not device_staging._TENSORS
    staging.pool.close()


def test_events_come_with_their_handles():
    staging = VllmStaging(core_of(said()), capabilities(), 0.3)
    staging.planner.expect_load("17.2", StagedBlocks(0, (3,), 9))
    staging.planner.finished("17.2")
    assert staging.events() == [(17, LetGo("17.2", 0))]
    assert staging.events() == []
    staging.pool.close()

"""KV never gets more than there is, whoever loads first, and leaves a GPU room for a step."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pdserve.engine_core.executor import KvBlockShape
from pdserve.engine_core.pool_sizing import size_pool
from pdserve.errors import ConfigError
from pdserve.limits.memory import MemoryBound
from pdserve_engines.torch import executor, kv_budget
from pdserve_engines.torch.executor import TorchExecutor
from pdserve_engines.torch.kv_budget import (
    AvailableMemory,
    KvBudget,
    StepMemory,
    fit,
    plan_kv,
    step_memory,
)
from pdserve_engines.torch.kv_pool import KvPool
from pdserve_engines.torch.model_loader.config import parse_config
from pdserve_engines.torch.models.capped_attention import SCORES_AT_ONCE
from tests.engines.torch.checkpoints import checkpoint
from tests.engines.torch.driver import Driver, loaded, spec
from tests.engines.torch.model_loader.test_config import LLAMA

if TYPE_CHECKING:
    from pdserve.messages.engine import EngineSpec

GIB = 1 << 30
LAYOUT = KvBlockShape(num_layers=2, kv_heads=2, block_size=32, head_dim=16, itemsize=4)
NOTHING = StepMemory(fixed=0, per_position=0, of_pool=0.0)
LLAMA_8B = parse_config(
    LLAMA
    | {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
    }
)
LAYOUT_8B = KvBlockShape(num_layers=32, kv_heads=8, block_size=32, head_dim=128, itemsize=2)


def anything(**fields: Any) -> EngineSpec:
    return spec("any", **fields)  # type: ignore[arg-type]


def host(free: int, layout: KvBlockShape, context: int, **fields: Any) -> KvBudget:
    return plan_kv(
        AvailableMemory(free, "the machine"), anything(**fields), layout, context, NOTHING
    )


@pytest.mark.parametrize(
    ("layers", "dim", "context", "free"),
    [(28, 128, 40960, 8 * GIB), (16, 64, 131072, 8 * GIB), (28, 128, 131072, 16 * GIB)],
)
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_a_laptop_gives_a_quarter_of_what_is_free_even_to_long_contexts(
    layers: int, dim: int, context: int, free: int, share: float
) -> None:
    layout = KvBlockShape(layers, 8, 32, dim, 4)
    found = host(free, layout, context, kv_share=share, block_size=32)
    assert found.proposed == free // 4
    assert found.most == int(free * 0.9)


def test_no_more_is_taken_than_could_be_used() -> None:
    one = 4 * LAYOUT.block_bytes
    assert host(1000 * one, LAYOUT, 100, max_sequences=8).proposed == 8 * one
    assert host(1000 * one, LAYOUT, 100, max_sequences=8, kv_share=0.5).proposed == 16 * one
    assert host(0, LAYOUT, 100).proposed == 0


def gpu(free: int, total: int, **fields: Any) -> KvBudget:
    wanted = anything(block_size=32, **fields)
    room = AvailableMemory(free, "cuda:0", total, own=total - free)
    return plan_kv(room, wanted, LAYOUT_8B, 131072, step_memory(wanted, LLAMA_8B, 2, 2))


@pytest.mark.parametrize("share", [1.0, 0.5])
@pytest.mark.parametrize("total", [24, 48, 80, 141])
def test_pools_and_steps_of_all_cores_fit_into_what_a_gpu_has_free(
    total: int, share: float
) -> None:
    free = (total - 17) * GIB
    wanted = anything(kv_share=share, block_size=32)
    needs = step_memory(wanted, LLAMA_8B, 2, 2)
    found = gpu(free, total * GIB, kv_share=share)
    assert found.proposed <= found.most
    pool = found.most * share
    context = min(131072, pool / LAYOUT_8B.block_bytes * 32)
    step = needs.fixed + needs.per_position * context + needs.of_pool * pool
    assert (pool + step) / share <= free
    if found.most:
        block = LAYOUT_8B.block_bytes * (1 + needs.of_pool) + needs.per_position * 32
        assert (pool + step + block) / share > free - 2 * GIB * (share < 1)


def test_bounded_scores_need_memory_of_their_own() -> None:
    wanted = anything(block_size=32)
    plain = step_memory(wanted, LLAMA_8B, 2, 2)
    bounded = step_memory(wanted, replace(LLAMA_8B, attention_cap=50.0), 2, 2)
    assert bounded.fixed - plain.fixed == SCORES_AT_ONCE * 16
    assert plain.of_pool < bounded.of_pool < 1.1 * plain.of_pool


def test_a_gpu_is_used_up_to_its_utilization() -> None:
    free, total = 60 * GIB, 80 * GIB
    little = gpu(free, total, gpu_memory_utilization=0.45)
    more = gpu(free, total, gpu_memory_utilization=0.9)
    assert 0 < little.proposed < more.proposed < more.most
    assert gpu(free, total, gpu_memory_utilization=0.2).proposed == 0


def test_workers_of_several_processes_divide_a_gpu() -> None:
    total, weights = 80 * GIB, 17 * GIB
    taken = 0
    for _ in range(2):
        taken += weights
        wanted = anything(block_size=32, gpu_memory_utilization=0.45)
        room = AvailableMemory(total - taken, "cuda:0", total, own=weights)
        needs = step_memory(wanted, LLAMA_8B, 2, 2)
        found = plan_kv(room, wanted, LAYOUT_8B, 131072, needs)
        assert found.proposed > 8 * GIB
        taken += found.proposed + needs.fixed
    assert taken < 0.9 * total


def test_long_and_short_pools_are_fitted_alike() -> None:
    """Masks grow with the context only as far as there is one."""
    needs = StepMemory(fixed=1000, per_position=LAYOUT.block_bytes // 32, of_pool=1.0)
    block = LAYOUT.block_bytes
    assert fit(1000 + 3 * 5 * block, LAYOUT, 5 * 32, needs) == 5 * block
    assert fit(1000 + 3 * 4 * block, LAYOUT, 5 * 32, needs) == 4 * block
    assert fit(1000 + (5 + 2 * 9) * block, LAYOUT, 5 * 32, needs) == 9 * block
    assert fit(999, LAYOUT, 5 * 32, needs) == 0


@pytest.mark.parametrize("first", [0, 1])
def test_cores_of_one_process_get_the_same_whichever_loads_first(
    first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second would otherwise see what the first has left."""
    rooms = [
        AvailableMemory(9 * GIB, "empty"),
        AvailableMemory(8 * GIB, "loaded"),
        AvailableMemory(4 * GIB, "taken"),
    ]
    monkeypatch.setattr(executor, "measure_memory", lambda device: rooms.pop(0))
    order = ["prefill", "decode"][:: 1 - 2 * first]
    owner = TorchExecutor()
    made, sizes = [], {}
    wanted = spec(checkpoint("llama")[0], kv_share=0.5, max_sequences=1 << 20)
    for name in order:
        each = owner if name == order[0] else owner.sibling()
        info = each.load(wanted, lambda stage, fraction: None)
        sizes[name] = size_pool(wanted, info).num_blocks
        made.append(each)
    assert sizes["prefill"] == sizes["decode"] > 0
    assert [room.limit for room in rooms] == ["taken"]
    for each in made:
        each.close()


def test_kv_memory_beyond_what_is_free_is_refused_before_weights_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        executor, "measure_memory", lambda device: AvailableMemory(10 * GIB, "the machine")
    )
    stages: list[str] = []
    each = TorchExecutor()
    wanted = spec(checkpoint("llama")[0], kv_memory=9 * GIB + 1)
    with pytest.raises(ConfigError, match=r"more than may be taken: 9\.0 GiB of the 10\.0 GiB"):
        each.load(wanted, lambda stage, _: stages.append(stage))
    assert "loading weights" not in stages


def test_a_gpu_is_measured_when_nothing_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: calls.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("empty_cache"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 16 * GIB)
    found = kv_budget.measure_memory(torch.device("cuda", 1))
    assert calls == ["synchronize", "empty_cache"]
    assert found == AvailableMemory(60 * GIB, "cuda:1", 80 * GIB, own=16 * GIB + (512 << 20))


def test_weights_that_do_not_fit_are_refused_before_they_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    little = MemoryBound("memory.max of control group /job", 9000, 2000)
    monkeypatch.setattr(executor, "available", lambda: little)
    monkeypatch.setattr(kv_budget, "available", lambda: little)
    stages: list[str] = []
    with pytest.raises(ConfigError, match=r"no room for .* of weights: 2\.0 KiB are free .*/job"):
        TorchExecutor().load(spec(checkpoint("llama")[0]), lambda stage, _: stages.append(stage))
    assert "loading weights" not in stages


def test_a_pool_that_does_not_fit_names_the_sizes_and_the_options(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*args: object, **kwargs: object) -> torch.Tensor:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "zeros", full)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 * GIB, 80 * GIB))
    with pytest.raises(ConfigError, match=r"3\.0 GiB of 80\.0 GiB.*--kv-memory or --max-model-len"):
        KvPool(LAYOUT, 7, torch.float32, torch.device("cuda"))


def test_warming_up_computes_the_largest_step_and_leaves_no_trace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cold, warm = (loaded(checkpoint("llama")[0], max_batch_tokens=24) for _ in range(2))
    counts: list[list[int]] = []
    execute = warm.execute

    def counted(step: Any) -> Any:
        counts.append([chunk.count for chunk in step.chunks])
        return execute(step)

    with monkeypatch.context() as patch:
        patch.setattr(warm, "execute", counted)
        warm.warm_up()
    assert counts == [[24], [1]] * 2
    assert warm.pool is not None
    assert not warm.pool.tensor.any()
    outputs = []
    for each in (cold, warm):
        driver = Driver(each)
        sequence = driver.add([5, 4, 3])
        driver.finish([sequence], 4)
        outputs.append(sequence.output)
        each.close()
    assert outputs[0] == outputs[1]


def test_a_gpu_is_warmed_up_within_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compiled at first use would otherwise look like a core that stands still."""
    each = TorchExecutor()
    each.load(spec(checkpoint("llama")[0]), lambda stage, fraction: None)
    assert each._settings is not None
    each._settings = replace(each._settings, device=torch.device("cuda", 1))
    calls: list[str] = []
    on_cpu = KvPool(LAYOUT, 4, torch.float32, torch.device("cpu"))
    monkeypatch.setattr(executor, "KvPool", lambda *args: on_cpu)
    monkeypatch.setattr(each._model, "bind", lambda pool: calls.append("bind"))
    monkeypatch.setattr(each, "warm_up", lambda: calls.append("warm up"))
    monkeypatch.setattr(each, "_settle", lambda: None)
    each.allocate(4)
    assert calls == ["bind", "warm up"]
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("give back"))
    each.close()
    assert calls[2:] == ["give back"]


def test_a_step_that_does_not_fit_is_found_while_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    each = loaded(checkpoint("llama")[0])

    def full(step: Any) -> Any:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(each, "execute", full)
    with pytest.raises(ConfigError, match="lower --max-batch-tokens, --max-sequences or --kv"):
        each.warm_up()
    each.close()


def test_the_device_is_made_the_threads_own(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    for name in ("cpu", "cuda", "cuda:1"):
        executor._enter(torch.device(name))
    assert chosen == [0, 1]

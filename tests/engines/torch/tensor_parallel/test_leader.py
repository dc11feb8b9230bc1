"""Several ranks against one: the same tokens, logits within 1e-4 in float32, whatever the division.

Most tests run the ranks as threads; those of processes are in test_rank_processes.py."""

from __future__ import annotations

import ctypes
import gc
import random
import shutil
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest import mock

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from pdserve.clock import ManualClock
from pdserve.engine_core.engine_loader import load_core
from pdserve.engine_core.executor import KvBlockShape, ScheduledChunk, StepPlan
from pdserve.errors import ConfigError, EngineDied
from pdserve.messages.engine import CoreFailed, Submit
from pdserve.messages.engine_errors import error_of
from pdserve.messages.request import GenerateRequest, SamplingParams
from pdserve.messages.tiers import TierSpec
from pdserve.messages.transfer import RankKvLayout
from pdserve.token_ids import token_ids
from pdserve.transfer.cuda.driver import CudaIpcExport
from pdserve_engines.torch.kv_budget import CUDA_CONTEXT, AvailableMemory
from pdserve_engines.torch.kv_pool import KvPool
from pdserve_engines.torch.model_loader.config import read_config
from pdserve_engines.torch.settings import resolve_settings
from pdserve_engines.torch.tensor_parallel import leader
from pdserve_engines.torch.tensor_parallel import rank as rank_module
from pdserve_engines.torch.tensor_parallel.leader import LeaderModel
from pdserve_engines.torch.tensor_parallel.placement import RankPlacement
from pdserve_engines.torch.tensor_parallel.rank import Rank
from pdserve_engines.torch.tensor_parallel.rank_link import RankLoaded
from pdserve_engines.torch.tensor_parallel.rank_model import RankModel
from pdserve_engines.torch.tensor_parallel.rank_processes import RankProcesses
from pdserve_engines.torch.tensor_parallel.shard import Shard
from tests.engines.torch.checkpoints import TINY, VOCAB, checkpoint
from tests.engines.torch.driver import Driver, loaded, sequence, spec
from tests.engines.torch.tensor_parallel.thread_ranks import RankThread, ranks_as_threads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from pdserve.engine_core.executor import StepResult
    from pdserve.messages.engine import EngineSpec
    from pdserve_engines.torch.executor import TorchExecutor
    from pdserve_engines.torch.tensor_parallel.rank_plan import RankPlan

BLOCK = 8
OUTPUTS = 10
GREEDY = SamplingParams(max_tokens=OUTPUTS, temperature=0.0)
LOGPROBS = SamplingParams(max_tokens=OUTPUTS, temperature=0.0, logprobs=5, prompt_logprobs=2)
DRAWN = SamplingParams(
    max_tokens=OUTPUTS, temperature=0.8, top_p=0.9, seed=3, repetition_penalty=1.2
)
DIVIDED = [("llama", 2), ("llama", 4), ("llama_biased", 2), ("qwen2", 6)]
NOT_DIVIDED = {"mixtral", "qwen3_moe", "qwen3_vl_moe", "gpt_oss", "olmo2", "olmo3"}


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=length)


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    with ranks_as_threads():
        yield


def pools_of_ranks() -> Callable[[], list[KvPool]]:
    """The pools of all ranks of this process that have memory, rank 0's included."""
    return lambda: [
        found for found in gc.get_objects() if type(found) is KvPool and found.memory is not None
    ]


def generate(executor: TorchExecutor) -> tuple[list[list[int]], list[StepResult]]:
    """Tokens and results of some requests together, in small chunks, one of them forked."""
    driver = Driver(executor)
    plain = driver.add(prompt_of(21), GREEDY)
    told = driver.add(prompt_of(13, 1), LOGPROBS)
    drawn = driver.add(prompt_of(11, 2), DRAWN)
    driver.finish([plain, told, drawn], 1, chunk=6)
    forked = driver.fork(drawn, 1)
    everything = [plain, told, drawn, forked]
    driver.finish(everything, OUTPUTS, chunk=6)
    return [sequence.output for sequence in everything], driver.results


def compare(family: str, ranks: int) -> None:
    directory = checkpoint(family)[0]
    alone = loaded(directory, block_size=BLOCK, options={"kernels": "torch"})
    wanted, expected = generate(alone)
    alone.close()
    divided = loaded(directory, block_size=BLOCK, tensor_parallel=ranks)
    try:
        found, results = generate(divided)
    finally:
        divided.close()
    assert found == wanted
    for ours, theirs in zip(results, expected, strict=True):
        for one, other in zip(ours.logprobs, theirs.logprobs, strict=True):
            if one is not None and other is not None:
                assert one.logprob == pytest.approx(other.logprob, abs=1e-4)


@pytest.mark.parametrize(("family", "ranks"), DIVIDED)
def test_ranks_generate_what_one_rank_does(family: str, ranks: int) -> None:
    compare(family, ranks)


@pytest.mark.long(one_in=3)
@pytest.mark.parametrize("family", [name for name in TINY if name not in dict(DIVIDED)])
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_family_is_divided_or_refused(family: str, ranks: int) -> None:
    if family not in NOT_DIVIDED:
        compare(family, ranks)
        return
    with pytest.raises(ConfigError, match="are not divided among ranks yet"):
        compare(family, ranks)


def test_blocks_are_copied_on_every_rank_without_a_batch() -> None:
    """A fork's copy may come in a plan of its own."""
    executor = loaded(checkpoint("llama")[0], block_size=BLOCK, tensor_parallel=2)
    driver = Driver(executor)
    parent = driver.add(prompt_of(13))
    driver.finish([parent], 1)
    child = driver.fork(parent, 1)
    copies, driver._copies = driver._copies, []
    assert copies
    executor.execute(StepPlan([], copies))
    driver.finish([parent, child], OUTPUTS)
    executor.close()
    assert child.output == parent.output


def test_kv_is_on_every_rank_when_a_layer_is_reported() -> None:
    """`watch` may send a layer's KV of all ranks to a peer."""
    executor = loaded(checkpoint("llama")[0], block_size=BLOCK, tensor_parallel=2)
    pools = pools_of_ranks()
    seen: list[int] = []

    def watch(layers: int) -> None:
        seen.append(layers)
        for pool in pools():
            assert pool.tensor[0, layers - 1, :, :, :5].abs().amin() > 0

    chunk = ScheduledChunk(sequence(prompt_of(6)), 0, 5, samples=False)
    chunk.sequence.blocks = [0]
    executor.execute(StepPlan([chunk], watch=watch, watch_at=frozenset({1, 2})))
    executor.close()
    assert seen == [1, 2]
    assert len(pools()) == 0


def test_a_step_that_fails_on_one_rank_ends_all_of_them() -> None:
    executor = loaded(checkpoint("llama")[0], block_size=BLOCK, tensor_parallel=2)
    driver = Driver(executor)
    waiting = driver.add(prompt_of(9))
    with (
        mock.patch.object(Rank, "compute", side_effect=MemoryError("no room")),
        pytest.raises(EngineDied, match=r"rank 1 .*failed: MemoryError: no room"),
    ):
        driver.step((waiting, 9))
    with pytest.raises(EngineDied, match="the ranks have ended"):
        driver.executor.execute(StepPlan([], [(0, 1)]))
    executor.close()


def test_a_core_whose_rank_fails_ends_so_that_its_requests_go_on_elsewhere() -> None:
    core = load_core("torch", ManualClock())
    core.load(spec(checkpoint("llama")[0], kv_memory=1 << 20, tensor_parallel=2), lambda _: None)
    request = GenerateRequest(
        request_id="r", model="m", prompt=token_ids(prompt_of(9)), sampling=GREEDY
    )
    core.handle(Submit(handle=1, request=request))
    with mock.patch.object(Rank, "compute", side_effect=MemoryError("no room")):
        event = core.step()[-1]
    core.close()
    assert isinstance(event, CoreFailed)
    assert "rank 1" in event.message
    assert error_of(event).retryable
    core.close()


def test_ranks_that_failed_are_killed_before_they_are_waited_for() -> None:
    """One that stands still never ends in order, and the node's patience is short."""
    calls: list[str] = []
    executor = loaded(checkpoint("llama")[0], block_size=BLOCK, tensor_parallel=2)
    assert isinstance(executor._model, LeaderModel)
    wait = RankThread.wait

    def killed(_thread: RankThread) -> None:
        calls.append("kill")

    def waited(thread: RankThread, timeout: float) -> int | None:
        calls.append("wait")
        return wait(thread, timeout)

    with (
        mock.patch.object(RankThread, "kill", killed),
        mock.patch.object(RankThread, "wait", waited),
    ):
        executor._model.ranks.end("a test ends them")
    executor.close()
    assert calls[:2] == ["kill", "wait"]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"options": {"kernels": "native"}}, "leave out the engine option kernels=native"),
        ({"tiers": TierSpec(host_bytes=1 << 20)}, "leave out --host-kv and --disk-kv"),
        ({"options": {"rank_timeout": "0"}}, "rank_timeout='0': give 0.1 to 3600 seconds"),
    ],
)
def test_what_does_not_work_with_ranks_is_refused_by_name(
    fields: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        loaded(checkpoint("llama")[0], tensor_parallel=2, **fields)


def test_a_rank_that_cannot_load_says_why() -> None:
    with (
        mock.patch.object(RankModel, "place", side_effect=MemoryError("too large")),
        pytest.raises((EngineDied, ConfigError), match=r"too large|no room"),
    ):
        loaded(checkpoint("llama")[0], tensor_parallel=2)


def test_the_words_of_a_rank_that_cannot_load_are_the_engines() -> None:
    """Rank 0 itself has loaded by then."""
    place = RankModel.place

    def placed(model: RankModel, param: Any, parts: Any) -> None:
        if model._shard.rank:
            raise MemoryError("too large")
        place(model, param, parts)

    with (
        mock.patch.object(RankModel, "place", placed),
        pytest.raises(EngineDied, match=r"rank 1 \(process \d+\) failed: MemoryError: too large"),
    ):
        loaded(checkpoint("llama")[0], tensor_parallel=2)


def test_a_rank_that_fails_is_noticed_while_a_slower_one_loads() -> None:
    place, end = RankModel.place, RankProcesses.end
    failure, late = threading.Event(), []

    def placed(model: RankModel, param: Any, parts: Any) -> None:
        if model._shard.rank == 1 and not failure.wait(20):
            late.append(param.key)
        if model._shard.rank == 3:
            raise MemoryError("too large")
        place(model, param, parts)

    def ended(ranks: RankProcesses, reason: str) -> EngineDied:
        failure.set()
        return end(ranks, reason)

    with (
        mock.patch.object(RankModel, "place", placed),
        mock.patch.object(RankProcesses, "end", ended),
        pytest.raises(EngineDied, match=r"rank 3 .* failed: MemoryError: too large"),
    ):
        loaded(checkpoint("llama")[0], tensor_parallel=4)
    assert not late


def test_ranks_compute_with_the_checkpoint_that_rank_0_has_read(tmp_path: Path) -> None:
    """Somebody replaces files while an engine loads: shapes are the same, numbers are not."""
    first, second = (tmp_path / name for name in ("first", "second"))
    for directory in (first, second):
        shutil.copytree(checkpoint("llama")[0], directory)
    weights = load_file(second / "model.safetensors")
    weights["model.norm.weight"] += 1
    save_file(weights, second / "model.safetensors", metadata={"format": "pt"})

    def started(spec: EngineSpec, *others: Any) -> RankProcesses:
        return RankProcesses(msgspec.structs.replace(spec, model=str(second)), *others)

    with (
        mock.patch.object(leader, "RankProcesses", started),
        pytest.raises(EngineDied, match=r"rank 1 has read another checkpoint .* were replaced"),
    ):
        loaded(first, tensor_parallel=2)


def test_plans_that_no_memory_holds_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"no memory for the plans of ranks .*--max-sequences"):
        loaded(checkpoint("llama")[0], tensor_parallel=2, max_sequences=1 << 50)


# ------------------------------------------------------------------ on GPUs, without one


DIGEST = b"of the checkpoint"


class PlayedRanks:
    """Of a leader on two GPUs: what it uses of `RankProcesses`."""

    pids = (7,)

    def __init__(self) -> None:
        self.memories: list[Any] = []

    def wait_loaded(self) -> list[RankLoaded]:
        return [RankLoaded(30, free=50 << 30, total=80 << 30, own=9 << 30, checkpoint=DIGEST)]

    def join(self, placement: RankPlacement) -> mock.Mock:
        return mock.Mock()

    def allocate(self, num_blocks: int, memories: list[Any]) -> list[None]:
        self.memories += memories
        return [None]

    def close(self) -> None:
        self.memories.clear()


def leader_on(placement: RankPlacement) -> tuple[LeaderModel, PlayedRanks]:
    config = read_config(checkpoint("llama")[0])
    ranks: Any = PlayedRanks()
    shard = Shard(config, 0, 2)
    settings = resolve_settings(spec(checkpoint("llama")[0], tensor_parallel=2), config)
    driver = mock.Mock(wraps=PlayedDriver())
    driver.export.side_effect = lambda address, size: (address, size)
    model = LeaderModel(RankModel(shard, settings), shard, ranks, placement, driver)
    model.connect(DIGEST)
    return model, ranks


def test_rank_0_allocates_the_pools_of_all_gpus_and_moves_them() -> None:
    """Each rank's pool has half of the heads; the regions are in the order of ranks."""
    on_cpu = RankPlacement((torch.device("cpu"),) * 2, "gloo")
    model, ranks = leader_on(on_cpu)
    whole = KvBlockShape(num_layers=2, kv_heads=2, block_size=BLOCK, head_dim=16, itemsize=4)
    own = model.allocate(whole, 5)
    assert own == replace(whole, kv_heads=1)
    assert [size for _, size in ranks.memories] == [5 * own.block_bytes]
    pool = KvPool(own, 5, torch.float32, torch.device("cpu"))
    model.bind(pool)
    layout = RankKvLayout(content="c", layers=2, heads=2, tokens=BLOCK, dim=16, itemsize=4)
    region = model.region(layout)
    assert [(one.layout.tp, one.layout.rank) for one in region.pools] == [(2, 0), (2, 1)]
    addresses = [pool.tensor.data_ptr(), ranks.memories[0][0]]
    assert [one.address for one in region.pools] == addresses
    assert region.block_bytes == whole.block_bytes
    model.close()
    pool.close()


class PlayedDriver:
    """Exports host memory; ranks are threads and find it at its address."""

    def __init__(self) -> None:
        self._held: dict[int, Any] = {}

    def allocate(self, size: int, device: int) -> int:
        memory = (ctypes.c_uint8 * size)()
        self._held[ctypes.addressof(memory)] = memory
        return ctypes.addressof(memory)

    def free(self, address: int) -> None:
        del self._held[address]

    def export(self, address: int, size: int) -> CudaIpcExport:
        return CudaIpcExport(b"", b"", b"", 0, address)


class LeaderOnDevices(LeaderModel):
    """Allocates the pools of all ranks, as on GPUs."""

    def __init__(
        self, model: Any, shard: Any, ranks: Any, placement: Any, _driver: Any = None
    ) -> None:
        driver: Any = PlayedDriver()
        super().__init__(model, shard, ranks, placement, driver)


class PlayedPool:
    """An `OpenedPool`."""

    def __init__(self, exported: CudaIpcExport, size: int, device: torch.device) -> None:
        held = (ctypes.c_uint8 * size).from_address(exported.address)
        self.memory = torch.frombuffer(held, dtype=torch.uint8)

    def close(self) -> None:
        del self.memory


def test_ranks_compute_in_the_memory_that_rank_0_moves() -> None:
    """What rank 1 has written is in the region, and the tokens are those of one rank."""
    directory = checkpoint("llama")[0]
    alone = Driver(loaded(directory, block_size=BLOCK, options={"kernels": "torch"}))
    with (
        mock.patch.object(leader, "LeaderModel", LeaderOnDevices),
        mock.patch.object(rank_module, "OpenedPool", PlayedPool),
    ):
        divided = Driver(loaded(directory, block_size=BLOCK, tensor_parallel=2))
        outputs = []
        for driver in (alone, divided):
            driver.finish([wanted := driver.add(prompt_of(21))], OUTPUTS, chunk=6)
            outputs.append(wanted.output)
        model = divided.executor._model
        assert isinstance(model, LeaderModel)
        (pool,) = model._device_pools
        assert [one.address for one in divided.executor.region().pools][1] == pool.address
        assert pool._memory is not None
        assert pool._memory.bytes.any()
        divided.executor.close()
        alone.executor.close()
    assert outputs[0] == outputs[1]


def test_ranks_have_the_memory_of_the_fullest_gpu() -> None:
    own = AvailableMemory(60 << 30, "cuda:0", 80 << 30, 9 << 30)
    cuda = [torch.device("cuda", rank) for rank in range(2)]
    apart, _ = leader_on(RankPlacement((cuda[0], cuda[1]), "nccl"))
    room = apart.room(own)
    # Rank 0 has a context there, too, to move the KV.
    assert (room.limit, room.free, room.total) == ("cuda:1", (50 << 30) - CUDA_CONTEXT, 80 << 30)
    assert [one.device for one in apart.processes] == ["cuda:0", "cuda:1"]
    together, _ = leader_on(RankPlacement((cuda[0], cuda[0]), "gloo"))
    room = together.room(own)
    assert (room.free, room.total) == (((50 << 30) - CUDA_CONTEXT) // 2, 40 << 30)
    host = AvailableMemory(1 << 30, "host")
    assert apart.room(host) is host


# ------------------------------------------------------------------ planted bugs


def test_a_rank_that_is_one_plan_behind_is_found() -> None:
    """Were plans not numbered, a rank could compute a step of the same form twice."""
    compute = Rank.compute
    last: dict[int, RankPlan] = {}

    def late(rank: Rank, plan: RankPlan) -> None:
        if plan.batch is None:
            compute(rank, plan)
            return
        before = last.get(id(rank), plan)
        last[id(rank)] = plan
        alike = lengths(before) == lengths(plan) and before.task is plan.task
        compute(rank, before if alike else plan)

    with mock.patch.object(Rank, "compute", late), pytest.raises(AssertionError):
        compare("llama", 2)


def lengths(plan: RankPlan) -> list[int]:
    assert plan.batch is not None
    return [len(array) for array in plan.batch.arrays]


def test_a_swapped_slice_of_heads_is_found() -> None:
    with (
        mock.patch.object(Shard, "_heads", swapped_heads(Shard._heads)),
        pytest.raises(AssertionError),
    ):
        compare("llama", 2)


def test_a_part_that_is_not_summed_is_found() -> None:
    def forgetful(model: RankModel, layer: Any, name: str, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, layer[name])

    with mock.patch.object(RankModel, "_project", forgetful), pytest.raises(AssertionError):
        compare("llama", 2)


def swapped_heads(heads: Any) -> Any:
    """Ranks take each other's key heads."""

    def swapped(shard: Shard, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        other = Shard(shard.whole, shard.ranks - 1 - shard.rank, shard.ranks)
        q, _, v = heads(shard, tensors)
        return [q, heads(other, tensors)[1], v]

    return swapped

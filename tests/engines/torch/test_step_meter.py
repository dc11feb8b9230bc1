"""KV is sized by what the largest step takes, on an imagined GPU."""

from __future__ import annotations

import logging
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch

from pdserve.engine_core.pool_sizing import size_pool
from pdserve.errors import ConfigError
from pdserve_engines.torch import executor as executor_module
from pdserve_engines.torch import kv_budget, warm_up
from pdserve_engines.torch.executor import TorchExecutor
from pdserve_engines.torch.kv_budget import AvailableMemory
from pdserve_engines.torch.model_info import model_info
from pdserve_engines.torch.step_meter import CudaStepMeter, step_meter
from tests.engines.torch.checkpoints import checkpoint
from tests.engines.torch.driver import spec

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.engine_core.executor import ModelInfo, StepPlan

MIB = 1 << 20
GIB = 1 << 30
TOKENS, SEQUENCES = 64, 6


@dataclass
class ImaginedGpu:
    """Memory of one device; the model's weights take `weights` of it."""

    total: int
    weights: int
    per_token: int
    """Bytes that a step takes for each of its tokens."""
    per_sequence: int
    others: int = 0
    """Bytes of other processes."""
    measured: int = 0
    """Bytes of the step that was measured."""

    def use(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(executor_module, "measure_memory", self.measure)
        patch.setattr(executor_module, "step_meter", lambda device: self)
        patch.setattr(torch.cuda, "mem_get_info", lambda device: (self.free, self.total))
        whole = TorchExecutor.execute

        def execute(engine: TorchExecutor, plan: StepPlan) -> Any:
            self.measured = self.step(plan.num_tokens, len(plan.chunks))
            if self.measured > self.free:
                raise torch.cuda.OutOfMemoryError("CUDA out of memory")
            return whole(engine, plan)

        patch.setattr(TorchExecutor, "execute", execute)

    @property
    def free(self) -> int:
        return self.total - self.others - self.weights

    def step(self, tokens: int, sequences: int) -> int:
        return tokens * self.per_token + sequences * self.per_sequence

    def measure(self, device: object) -> AvailableMemory:
        return AvailableMemory(self.free, "cuda:0", self.total, own=self.weights)

    def most(self, run: Callable[[], None]) -> int:
        run()
        return self.measured


def load(gpu: ImaginedGpu, patch: pytest.MonkeyPatch, **fields: Any) -> ModelInfo:
    with patch.context() as inner:
        gpu.use(inner)
        engine = TorchExecutor()
        wanted = spec(
            checkpoint("llama")[0],
            max_batch_tokens=TOKENS,
            **{"max_sequences": SEQUENCES} | fields,
        )
        try:
            info = engine.load(wanted, lambda stage, fraction: None)
            assert engine.pool is None
            return info
        finally:
            engine.close()


def test_weights_kv_and_the_largest_step_fit_into_the_share(
    monkeypatch: pytest.MonkeyPatch, seed: int, long: bool
) -> None:
    """What is left is the head-room, an estimate of what grows with the pool, and not much more."""
    # Contexts that fill a card: KV is never more than could be used.
    monkeypatch.setattr(executor_module, "model_info", _with_useful(model_info))
    chance = random.Random(seed)
    for _ in range(40 if long else 4):
        gpu = ImaginedGpu(
            total=80 * GIB,
            weights=chance.randint(1, 20) * GIB,
            per_token=chance.randint(1, 160) * MIB,
            per_sequence=chance.randint(1, 500) * MIB,
        )
        share = chance.choice((0.5, 0.9))
        info = load(gpu, monkeypatch, gpu_memory_utilization=share)
        step = gpu.step(TOKENS, SEQUENCES)
        assert gpu.measured == step, "the largest step was tried"
        whole = gpu.weights + step + info.kv_memory
        assert whole <= share * gpu.total
        if info.kv_memory:
            # A step may gather as much as the pool of these two layers has.
            assert whole + info.kv_memory > share * gpu.total - 0.25 * step - GIB


def _with_useful(whole: Any) -> Any:
    """`model_info` for requests enough to use all KV."""

    def sized(spec: Any, *args: Any, **kwargs: Any) -> ModelInfo:
        found: ModelInfo = whole(_many(spec), *args, **kwargs)
        return found

    return sized


def _many(wanted: Any) -> Any:
    return msgspec.structs.replace(wanted, max_sequences=1 << 24)


def test_two_workers_share_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor_module, "model_info", _with_useful(model_info))
    taken = 0
    for _ in range(2):
        gpu = ImaginedGpu(80 * GIB, 10 * GIB, 32 * MIB, 64 * MIB, others=taken)
        info = load(gpu, monkeypatch, gpu_memory_utilization=0.45)
        assert info.kv_memory > 5 * GIB
        taken += gpu.weights + gpu.step(TOKENS, SEQUENCES) + info.kv_memory
    assert taken <= 0.9 * 80 * GIB


def test_the_log_says_what_takes_the_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    load(ImaginedGpu(80 * GIB, 10 * GIB, 32 * MIB, 0), monkeypatch)
    assert "memory of cuda:0: the largest step takes 2.0 GiB, weights" in caplog.text
    assert "70.0 GiB of 80.0 GiB are free" in caplog.text


def test_a_step_that_does_not_fit_is_refused_while_loading(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With what torch says, and the options that make steps smaller."""
    with pytest.raises(
        ConfigError, match=r"no room for a step of 64 tokens .*CUDA out of memory"
    ) as caught:
        load(ImaginedGpu(16 * GIB, 10 * GIB, 200 * MIB, 0), monkeypatch)
    assert "lower --max-batch-tokens or --max-sequences" in str(caught.value)


def refusal(gpu: ImaginedGpu, patch: pytest.MonkeyPatch, **fields: Any) -> str:
    info = load(gpu, patch, **fields)
    assert info.kv_memory == 0
    with pytest.raises(ConfigError) as caught:
        size_pool(spec(checkpoint("llama")[0], **fields), info)
    return str(caught.value)


def test_a_share_that_is_too_small_is_refused_with_one_that_suffices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = ImaginedGpu(80 * GIB, 10 * GIB, 64 * MIB, 0)
    text = refusal(gpu, monkeypatch, gpu_memory_utilization=0.15)
    assert "--gpu-memory-utilization 0.15 leaves 2.0 GiB of them: give at least 0.20" in text
    assert load(gpu, monkeypatch, gpu_memory_utilization=0.2).kv_memory > 0


def test_a_card_that_is_too_small_is_refused_with_what_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = ImaginedGpu(16 * GIB, 10 * GIB, 80 * MIB, 0, others=GIB)
    text = refusal(gpu, monkeypatch, gpu_memory_utilization=1.0)
    assert "1.5 GiB are missing for a step and a block: lower --max-batch-tokens" in text


def test_a_size_that_an_estimate_would_refuse_is_taken_if_the_step_leaves_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kv_budget, "_FRAGMENTS", 60 * GIB)
    info = load(ImaginedGpu(80 * GIB, 10 * GIB, MIB, 0), monkeypatch, kv_memory=25 * GIB)
    assert info.kv_most is not None
    assert info.kv_most > 25 * GIB


def test_the_largest_step_has_all_tokens_in_blocks_of_their_own() -> None:
    plan = warm_up.largest_step(100, 7, 16, 80, samples=True)
    assert [chunk.count for chunk in plan.chunks] == [80] + [1] * 6
    assert warm_up.largest_step(100, 7, 16, 500, samples=True).num_tokens == 100
    blocks = [block for chunk in plan.chunks for block in chunk.sequence.blocks]
    assert blocks == list(range(5 + 6))
    assert all(chunk.samples and chunk.sequence.sampling.logprobs for chunk in plan.chunks)
    assert not any(
        chunk.samples for chunk in warm_up.largest_step(9, 2, 16, 9, samples=False).chunks
    )
    assert len(warm_up.largest_step(2, 7, 16, 80, samples=True).chunks) == 2


def test_siblings_take_the_measure_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = ImaginedGpu(80 * GIB, 10 * GIB, 32 * MIB, 0)
    gpu.use(monkeypatch)
    owner = TorchExecutor()
    wanted = spec(checkpoint("llama")[0], max_batch_tokens=TOKENS, max_sequences=6, kv_share=0.5)
    first = owner.load(wanted, lambda stage, fraction: None)
    gpu.measured, other = 0, owner.sibling()
    assert other.load(wanted, lambda stage, fraction: None).kv_memory == first.kv_memory
    assert gpu.measured == 0
    for each in (owner, other):
        each.close()


def test_a_gpu_is_measured_by_what_torch_has_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    held = iter([3 * GIB])
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda device, name=name: calls.append(name))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("empty_cache"))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: next(held))
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 5 * GIB)
    meter = step_meter(torch.device("cuda", 1))
    assert isinstance(meter, CudaStepMeter)
    assert meter.most(lambda: calls.append("run")) == 2 * GIB
    assert calls == [
        *("synchronize", "empty_cache", "reset_peak_memory_stats"),
        *("run", "synchronize", "empty_cache"),
    ]
    assert step_meter(torch.device("cpu")) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_real_step_is_measured_and_given_back() -> None:
    device = torch.device("cuda")
    before = torch.cuda.memory_reserved(device)

    def run() -> None:
        torch.empty(64 * MIB, dtype=torch.uint8, device=device)

    assert 64 * MIB <= CudaStepMeter(device).most(run) < 128 * MIB
    assert torch.cuda.memory_reserved(device) <= before

"""Prefixes that come back layer group by layer group, while the step that needs them computes.

Copies run in their thread here, on the real clock. Each is held until the step waits for it, so
that a step which reads a layer too early reads what lay in the block before.
"""

from __future__ import annotations

import random
import threading
import time
from typing import TYPE_CHECKING

import pytest

from pdserve.clock import SystemClock
from pdserve.engine_core.core import EngineCore
from pdserve.engine_core.engine_loader import load_core
from pdserve.kv.tiers.jobs import CopyIn
from pdserve.kv.tiers.layer_groups import LayerGroups
from pdserve.kv.tiers.thread_io import ThreadTierIo
from pdserve.messages.request import GenerateRequest, SamplingParams
from pdserve.messages.tiers import TierSpec
from pdserve.testing.inline_engine import InlineEngine
from pdserve.token_ids import token_ids
from tests.engines.torch.checkpoints import CONFIGURATIONS, VOCAB, checkpoint, oracle_generate
from tests.engines.torch.driver import spec

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.ids import Bytes, Seconds
    from pdserve.kv.tiers.job_runner import JobRunner
    from pdserve.kv.tiers.jobs import JobDone, TierJob
    from pdserve.testing.output_checker import OutputChecker

BLOCK = 8
BLOCKS = 20
NAME = "gemma2_uncapped"
LAYERS = 5


class HeldRunner:
    """Carries out jobs, but copies of later layer groups only when a step waits for them."""

    def __init__(self, runner: JobRunner) -> None:
        self._runner = runner
        self.wanted = threading.Semaphore(0)

    def run(self, job: TierJob, began: Seconds, clock: Callable[[], Seconds]) -> JobDone:
        """As `JobRunner.run`."""
        if isinstance(job, CopyIn) and job.group:
            self.wanted.acquire(timeout=5.0)
        return self._runner.run(job, began, clock)


class HeldIo(ThreadTierIo):
    """Threads whose copies of later layer groups wait until they are asked for."""

    def __init__(self, runner: JobRunner) -> None:
        self.held = HeldRunner(runner)
        super().__init__(self.held)  # type: ignore[arg-type]

    def wait_copied(self, fetch: int, group: int, seconds: Seconds) -> bool:
        self.held.wanted.release()
        return super().wait_copied(fetch, group, seconds)


class Bench:
    """A torch core with a host tier."""

    def __init__(self, groups: int, kernels: str, batch: int) -> None:
        config = CONFIGURATIONS[NAME].config().get_text_config()
        assert config.num_hidden_layers == LAYERS
        block_bytes = 2 * LAYERS * config.num_key_value_heads * config.head_dim * BLOCK * 4
        core = load_core("torch", SystemClock())
        assert isinstance(core, EngineCore)
        self.core = core
        core.make_tier_io = self._make_io
        self.engine = InlineEngine(
            core,
            spec(
                checkpoint(NAME)[0],
                block_size=BLOCK,
                kv_memory=BLOCKS * block_bytes,
                max_batch_tokens=batch,
                max_sequences=4,
                options={"kernels": kernels},
                tiers=TierSpec(host_bytes=64 * block_bytes),
            ),
        )
        assert core._tiers is not None
        assert self.engine.capabilities.kv_layers == 0, "its pool is in host memory"
        core._tiers.lower.layers = LayerGroups(LAYERS, block_bytes, groups)
        # A fetch has to be worth it.
        core._step_cost.prefill = lambda length, cached=0: float(length - cached)  # type: ignore[method-assign]

    def _make_io(self, runner: JobRunner, block_bytes: Bytes, disk: bool) -> HeldIo:
        self.io = HeldIo(runner)
        return self.io

    def run(self, prompt: list[int], n: int = 1) -> OutputChecker:
        """Run a request to its end, and all copies."""
        sampling = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
        request = GenerateRequest(
            request_id="r", model="m", prompt=token_ids(prompt), sampling=sampling, n=n
        )
        found = self.engine.submit(request)
        until = time.monotonic() + 30.0
        while not found.done or self.core.has_work:
            self.engine.step()
            self.core.pool.check()
            assert time.monotonic() < until
            time.sleep(0.001)
        return found

    def fill(self) -> list[int]:
        """Compute a prompt and let others evict it from the device; returns it."""
        first = prompt_of(9 * BLOCK + 3, 0)
        self.run(first)
        for seed in (1, 2, 3):
            self.run(prompt_of(9 * BLOCK, seed))
            time.sleep(0.02)
        return first


def prompt_of(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=length)


def right(found: OutputChecker) -> bool:
    wanted = oracle_generate(checkpoint(NAME)[1], found.request.prompt.tolist(), 4)
    return found.tokens == [wanted] * found.request.n


@pytest.mark.timeout(180)  # a second each, but on a busy machine
@pytest.mark.long(one_in=4)
@pytest.mark.parametrize("kernels", ["torch", "auto"])
@pytest.mark.parametrize("groups", [2, 4])
@pytest.mark.parametrize(("length", "choices"), [(9 * BLOCK, 1), (9 * BLOCK + 1, 2)])
def test_a_step_reads_no_layer_before_it_has_come(
    kernels: str, groups: int, length: int, choices: int
) -> None:
    bench = Bench(groups, kernels, batch=16)
    first = bench.fill()
    found = bench.run(first[:length], choices)
    early = bench.core._early
    assert early is not None
    assert right(found)
    assert (early.started, early.failed) == (1, 0)
    assert bench.core.close() == 0

"""Measures the cost of scheduling: microseconds per sequence and step while many sequences decode.

    python bench/micro/scheduler.py

Rows are measured in turn within the same rounds; the result is their best round, so the ratios hold
on a busy machine. The limit is work that no scheduler in Python can avoid: making the records of a
step (one chunk and one delta per sequence) and appending the tokens. Writes
bench/results/scheduler.md.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from bench.machine import facts
from pdserve import accel
from pdserve.clock import SystemClock
from pdserve.engine_core.core import EngineCore
from pdserve.engine_core.executor import (
    KvBlockShape,
    ModelInfo,
    ProgressFn,
    ScheduledChunk,
    StepPlan,
    StepResult,
)
from pdserve.messages.engine import EngineSpec, Submit
from pdserve.messages.request import GenerateRequest, SamplingParams, TokenDelta
from pdserve.token_ids import token_ids
from pdserve.wire.codec import encode
from pdserve.wire.length_prefixed import encode_frames

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Sequence as Seq

    from pdserve.engine_core.scheduler.sequence import Sequence

SIZES = (1, 32, 256)
STEPS = 64
"""Steps per round, in which each sequence fills two blocks of 32 tokens."""
ROUNDS = 12
PROMPT = 100
RESULT = Path(__file__).parent.parent / "results" / "scheduler.md"


class NullExecutor:
    """An executor that computes nothing: every sequence gets the same token."""

    def load(self, spec: EngineSpec, progress: ProgressFn) -> ModelInfo:
        layout = KvBlockShape(1, 1, spec.block_size, 1, 1)
        return ModelInfo(
            model_type="null",
            dtype="",
            device="",
            vocab_size=100_000,
            max_model_len=8192,
            eos_token_ids=(2,),
            layout=layout,
            weight_bytes=0,
            kv_memory=32_768 * layout.block_bytes,
        )

    def allocate(self, num_blocks: int) -> None:
        """Allocates nothing."""

    def execute(self, plan: StepPlan) -> StepResult:
        samples = sum(chunk.samples for chunk in plan.chunks)
        return StepResult([5] * samples, [None] * samples)

    def release(self, sequences: Seq[Sequence]) -> None:
        """Releases nothing."""

    def close(self) -> None:
        """Closes nothing."""


@dataclass
class Bench:
    """A core with `size` decoding sequences."""

    size: int
    core: EngineCore = field(init=False)

    def __post_init__(self) -> None:
        self.core = EngineCore(NullExecutor(), SystemClock())
        spec = EngineSpec(engine="null", model="", max_sequences=256, max_batch_tokens=2048)
        self.core.load(spec, lambda progress: None)
        for handle in range(self.size):
            sampling = SamplingParams(max_tokens=8000, eos_token_ids=(2,))
            prompt = [3 + handle] * PROMPT
            request = GenerateRequest(
                request_id=f"r{handle}", model="m", prompt=token_ids(prompt), sampling=sampling
            )
            self.core.handle(Submit(handle=handle, request=request))
        while len(self.core.scheduler.running) < self.size:
            self.core.step()
        self.encode = encode

    def scheduling(self) -> None:
        """Plans and completes steps, nothing else."""
        scheduler, execute = self.core.scheduler, NullExecutor().execute
        for _ in range(STEPS):
            plan = scheduler.schedule(0.0)
            scheduler.complete(plan, execute(plan), 0.0)
        self.core.pool.drain_events()

    def whole_core(self) -> None:
        """Runs steps of the core, and encodes and frames their events."""
        for _ in range(STEPS):
            encode_frames(map(self.encode, self.core.step()))

    def records(self) -> None:
        """The limit: makes the records of a step."""
        running = self.core.scheduler.running
        tokens: list[list[int]] = [[] for _ in running]
        for _ in range(STEPS):
            chunks = [ScheduledChunk(sequence, 7, 1, True) for sequence in running]
            deltas = []
            for chunk, output in zip(chunks, tokens, strict=True):
                output.append(5)
                sequence = chunk.sequence
                deltas.append(TokenDelta(sequence.handle, sequence.choice, [5], None, None, None))


def best_seconds(work: dict[str, Callable[[], None]]) -> dict[str, float]:
    """Returns each row's best round; the rounds take all rows in turn."""
    best = dict.fromkeys(work, float("inf"))
    for _ in range(ROUNDS):
        for name, run in work.items():
            start = time.perf_counter()
            run()
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def rows(size: int) -> list[str]:
    """The table's rows for one number of sequences."""
    bench = Bench(size)
    best = best_seconds(
        {
            "limit: the records alone": bench.records,
            "schedule + complete": bench.scheduling,
            "whole core, events encoded": bench.whole_core,
        }
    )
    limit = best["limit: the records alone"]
    return [
        f"| {size} | {name} | {seconds / STEPS / size * 1e6:.2f} | {seconds / STEPS * 1e3:.3f} "
        f"| {seconds / STEPS / 0.02:.1%} | {seconds / limit:.1f} |"
        for name, seconds in best.items()
    ]


def report() -> str:
    """The result file's text."""
    return "\n".join(
        [
            "# Scheduling",
            "",
            f"Decoding with prefix cache, {STEPS} steps per round, best of {ROUNDS} rounds.",
            "Repeat with `python bench/micro/scheduler.py`.",
            "",
            *(f"- {fact}" for fact in facts()),
            f"- {accel.describe()}",
            "",
            "| sequences | what | us per sequence and step | ms per step | of a 20 ms step "
            "| times the limit |",
            "|---:|---|---:|---:|---:|---:|",
            *(row for size in SIZES for row in rows(size)),
            "",
        ]
    )


def main() -> None:
    """Measure, print, write."""
    text = report()
    print(text)
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

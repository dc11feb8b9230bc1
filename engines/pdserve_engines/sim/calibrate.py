"""Measures steps of the torch engine on this machine and fits a timing model to them.

    python -m pdserve_engines.sim.calibrate --model DIRECTORY --out timing.json
    pdserve --engine sim --engine-option timing=timing.json

A third of the points is held out of the fit and shows its error. Only the executor is measured: the
time of the core, its process and the network is not included.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from pdserve.engine_core.executor import ScheduledChunk, StepPlan
from pdserve.engine_core.scheduler.sequence import Sequence
from pdserve.messages.engine import EngineSpec
from pdserve.messages.request import GenerateRequest, SamplingParams
from pdserve.perf_model.step_time import write_timing
from pdserve.token_ids import token_ids
from pdserve_engines.sim.roofline_fit import StepSample, errors_of, fit_roofline

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from collections.abc import Sequence as Seq

    from pdserve.engine_core.executor import Executor
    from pdserve.ids import Seconds
    from pdserve.perf_model.step_time import Roofline

__all__ = ["Point", "main", "measure", "points"]

Point = tuple[tuple[tuple[int, int], ...], tuple[int, ...]]
"""(prompt chunks as (tokens before, tokens computed), contexts of decodes in tokens)."""

_CACHED = (0, 256, 1024)
_PROMPTS = (16, 64, 128, 256, 512, 1024)
_BATCHES = (1, 2, 4, 8, 16, 32)
_CONTEXTS = (16, 128, 512, 1500)


def points(longest: int) -> list[Point]:
    """Points to measure: prompts alone, cached and in pairs; decodes; both together. None is longer
    than `longest` tokens."""
    prompts: list[Point] = [
        (((cached, count),) * copies, ())
        for cached in _CACHED
        for count in _PROMPTS
        for copies in (1, 2)
        if cached + count < longest and count * copies <= 1024
    ]
    decodes: list[Point] = [
        ((), (context,) * batch)
        for batch in _BATCHES
        for context in _CONTEXTS
        if context + 1 < longest
    ]
    both: list[Point] = [
        (((cached, count),), (context,) * batch)
        for cached, count in ((0, 64), (256, 256), (0, 512))
        for batch in (2, 8)
        for context in (128, 512)
        if max(cached + count, context + 1) < longest
    ]
    return prompts + decodes + both


def measure(
    executor: Executor,
    todo: Seq[Point],
    *,
    block_size: int,
    num_blocks: int,
    repeats: int,
    timer: Callable[[], Seconds] = time.perf_counter,
) -> Iterator[StepSample]:
    """Each point's median over `repeats` rounds, after one round that does not count. Each round
    measures all points, so that other load on the machine affects all alike."""
    rng = random.Random(1)
    taken: dict[Point, list[Seconds]] = {point: [] for point in todo}
    for number in range(repeats + 1):
        for point in rng.sample(todo, len(todo)):
            plan = _plan(point, block_size, num_blocks)
            begin = timer()
            executor.execute(plan)
            took = timer() - begin
            executor.release([chunk.sequence for chunk in plan.chunks])
            if number:
                taken[point].append(took)
    for point, seconds in taken.items():
        prefill, contexts = point
        yield StepSample(prefill, len(contexts), sum(contexts), statistics.median(seconds))


def _plan(point: Point, block_size: int, num_blocks: int) -> StepPlan:
    prefill, contexts = point
    rng = random.Random(2)
    free: Iterator[int] = iter(rng.sample(range(num_blocks), num_blocks))
    plan = StepPlan()
    for start, count in (*((context, 1) for context in contexts), *prefill):
        handle = len(plan.chunks)
        tokens = token_ids(rng.choices(range(4, 1000), k=start + count))
        request = GenerateRequest(
            request_id=str(handle),
            model="",
            prompt=tokens,
            sampling=SamplingParams(max_tokens=1, temperature=0.0),
        )
        sequence = Sequence(handle, 0, request, tokens, len(tokens), 0.0, num_computed=start)
        sequence.blocks = [next(free) for _ in range(-(-len(tokens) // block_size))]
        plan.chunks.append(ScheduledChunk(sequence, start, count, samples=True))
    return plan


def _blocks_of(point: Point, size: int) -> int:
    prefill, contexts = point
    lengths = (*(start + count for start, count in prefill), *(c + 1 for c in contexts))
    return sum(-(-length // size) for length in lengths)


def main(argv: Seq[str] | None = None) -> int:
    """Measure, fit, write the timing file and report its error; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m pdserve_engines.sim.calibrate")
    parser.add_argument("--model", required=True, help="a local directory")
    parser.add_argument("--out", type=Path, required=True, help="the timing model's file")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=7, help="rounds over all points")
    arguments = parser.parse_args(argv)
    samples = list(_measure_torch(arguments))
    random.Random(3).shuffle(samples)
    cut = len(samples) // 3
    held, used = samples[:cut], samples[cut:]
    model = fit_roofline(used)
    write_timing(arguments.out, model, _about(arguments, len(used)))
    lines = [f"{name} {value:.3g} s" for name, value in asdict(model).items()]
    lines += [_errors("fitted", model, used), _errors("held out", model, held)]
    for kind, chosen in _kinds(held).items():
        lines.append(_errors(f"  {kind}", model, chosen))
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def _errors(name: str, model: Roofline, samples: Seq[StepSample]) -> str:
    errors = errors_of(model, samples)
    return (
        f"{name}: {len(samples)} points, error median {errors.median:.1%}, "
        f"p90 {errors.p90:.1%}, largest {errors.largest:.1%}, bias {errors.bias:+.1%}"
    )


def _kinds(samples: Seq[StepSample]) -> dict[str, list[StepSample]]:
    kinds: dict[str, list[StepSample]] = {}
    for sample in samples:
        kind = "prompts" if not sample.decodes else "both" if sample.prefill else "decodes"
        kinds.setdefault(kind, []).append(sample)
    return kinds


def _about(arguments: argparse.Namespace, count: int) -> dict[str, object]:
    return {
        "model": Path(arguments.model).name,
        "device": arguments.device,
        "dtype": arguments.dtype,
        "threads": arguments.threads,
        "points": count,
    }


def _measure_torch(arguments: argparse.Namespace) -> Iterable[StepSample]:
    # This imports torch, so it is done only when needed.
    from pdserve_engines.torch import create

    executor = create()
    spec = EngineSpec(
        engine="torch",
        model=arguments.model,
        device=arguments.device,
        dtype=arguments.dtype,
        threads=arguments.threads,
        block_size=arguments.block_size,
    )
    try:
        info = executor.load(spec, lambda stage, fraction: None)
        todo = points(info.max_model_len)
        size = arguments.block_size
        num_blocks = max(_blocks_of(point, size) for point in todo)
        executor.allocate(num_blocks)
        yield from measure(
            executor,
            todo,
            block_size=size,
            num_blocks=num_blocks,
            repeats=arguments.repeats,
        )
    finally:
        executor.close()


if __name__ == "__main__":
    sys.exit(main())

"""Where the engine's time and memory go: decode steps by kernel and operation, peaks of prefill."""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerActivity, profile

from bench.gpu import engine, limits, shapes
from bench.gpu.limits import settle
from bench.gpu.probes.base import Row, guarded

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bench.gpu.probes.base import Probe
    from pdserve.engine_core.scheduler.sequence import Sequence

MODEL = "llama-3.2-1b"
CONTEXT = 1024
STEPS = 10
WARM = 3
LONGEST = 12
"""Names of kernels that are listed."""


def ask_engine(probe: Probe) -> Iterator[Row]:
    """Profiles of ten decode steps at two batches, and peaks of two prompts."""
    name = "tiny" if probe.dry else MODEL
    prompts = (24, 64) if probe.dry else (2048, 8192)
    context = probe.size(CONTEXT, 40)
    batches = (1, 3) if probe.dry else (1, 64)
    room = max(batches) * (context + 4 * STEPS + engine.BLOCK) + max(prompts)
    shape = shapes.SHAPES[name]
    with tempfile.TemporaryDirectory() as folder:
        made = engine.Engine(shapes.write(shape, Path(folder)), shape, probe.device, room)
        try:
            for batch in batches:
                what = f"{name}, decode {batch} × {context}"
                yield from guarded(what, partial(_steps, made, what, batch, context))
            for tokens in prompts:
                what = f"{name}, peak of a prompt of {tokens}"
                yield from guarded(what, partial(_peak, made, what, tokens))
        finally:
            made.close()


def _steps(made: engine.Engine, what: str, batch: int, context: int) -> Iterator[Row]:
    sequences = made.sequences([context + 1] * batch, WARM + 2 * STEPS + 2)
    for each in sequences:
        each.num_computed = context
    for _ in range(WARM):
        made.step(sequences)
    before = _allocations(made)
    seconds = _many(made, sequences)
    yield Row(f"{what}, one step", seconds * 1e3, "ms", "without the profiler")
    asked = _allocations(made) - before
    yield Row(f"{what}, memory asked of the driver", asked, "times", f"in {STEPS} steps")
    activities = [ProfilerActivity.CPU]
    if made.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as found:
        profiled = _many(made, sequences)
    yield Row(f"{what}, one step", profiled * 1e3, "ms", "with the profiler")
    yield from _kernels(found, what, seconds)
    yield from _operations(found, what)


def _many(made: engine.Engine, sequences: list[Sequence]) -> float:
    """Returns the mean time of a step; every step ends with its tokens on the host."""
    settle(made.device)
    begin = time.perf_counter()
    for _ in range(STEPS):
        made.step(sequences)
    return (time.perf_counter() - begin) / STEPS


def _allocations(made: engine.Engine) -> int:
    if made.device.type != "cuda":
        return 0
    return int(torch.cuda.memory_stats(made.device).get("num_device_alloc", 0))


def _kernels(found: profile, what: str, seconds: float) -> Iterator[Row]:
    """Device time of a step by kernel; what is left of a step is the host's alone."""
    times: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for event in _averages(found):
        if "CUDA" in str(event.device_type):
            times[event.key] += event.self_device_time_total
            counts[event.key] += event.count
    busy = sum(times.values()) / STEPS / 1e3
    yield Row(f"{what}, kernels", sum(counts.values()) / STEPS, "a step")
    yield Row(f"{what}, device busy", busy, "ms", "a step")
    yield Row(f"{what}, host alone", seconds * 1e3 - busy, "ms", "a step")
    for name, spent in times.most_common(LONGEST):
        note = f"{counts[name] / STEPS:g} times: {name[:90]}"
        yield Row(f"{what}, kernel", spent / STEPS, "µs", note)


def _operations(found: profile, what: str) -> Iterator[Row]:
    """Host time of a step by operation, as the profiler lengthens it."""
    events = [event for event in _averages(found) if "CPU" in str(event.device_type)]
    events.sort(key=lambda event: -event.self_cpu_time_total)
    for event in events[:LONGEST]:
        note = f"{event.count / STEPS:g} times: {event.key[:60]}"
        yield Row(f"{what}, host operation", event.self_cpu_time_total / STEPS, "µs", note)


def _averages(found: profile) -> list[Any]:
    return list(found.key_averages())


def _peak(made: engine.Engine, what: str, tokens: int) -> Iterator[Row]:
    (sequence,) = made.sequences([tokens], 1)
    with limits.peak_memory(made.device) as peak:
        made.step([sequence])
    yield Row(what, peak() / 2**20, "MiB", "beside weights and KV")

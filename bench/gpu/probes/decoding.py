"""Where the engine's time and memory go: decode steps by kernel and operation, peaks of prefill.

A step that is longer than the device is busy waits for the host. The processor's time, its switches
and page faults, and the cost of one small launch at that moment say whether the host computed,
waited, or was slow.
"""

from __future__ import annotations

import resource
import statistics
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerActivity, profile

from bench.gpu import engine, limits, shapes
from bench.gpu.limits import settle
from bench.gpu.probes.base import Row, guarded

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from bench.gpu.probes.base import Probe
    from pdserve.engine_core.scheduler.sequence import Sequence

MODEL = "llama-3.2-1b"
LARGE = "llama-3.1-8b"
CONTEXT = 1024
STEPS = 10
WARM = 3
LONGEST = 12
"""Names of kernels that are listed."""
GAPS = 6
"""Kernels that are listed because the device was idle before them."""


def ask_engine(probe: Probe) -> Iterator[Row]:
    """Profiles of ten decode steps at two batches, and peaks of two prompts."""
    prompts = (24, 64) if probe.dry else (2048, 8192)
    yield from _ask(probe, MODEL, (1, 3) if probe.dry else (1, 64), prompts)


def ask_large_engine(probe: Probe) -> Iterator[Row]:
    """A profile of ten decode steps of a single sequence on a larger model, and their time once
    more after a prompt: does the order matter?"""
    yield from _ask(probe, LARGE, (1,), (24,) if probe.dry else (512,), again=True)


def _ask(
    probe: Probe,
    model: str,
    batches: tuple[int, ...],
    prompts: tuple[int, ...],
    *,
    again: bool = False,
) -> Iterator[Row]:
    name = "tiny" if probe.dry else model
    context = probe.size(CONTEXT, 40)
    room = max(batches) * (context + 4 * STEPS + engine.BLOCK) + max(prompts, default=0)
    shape = shapes.SHAPES[name]
    with tempfile.TemporaryDirectory() as folder:
        made = engine.Engine(shapes.write(shape, Path(folder)), shape, probe.device, room)
        try:
            for batch in batches:
                what = f"{name}, decode {batch} × {context}"
                yield from guarded(what, partial(_steps, probe, made, what, batch, context))
            for tokens in prompts:
                what = f"{name}, peak of a prompt of {tokens}"
                yield from guarded(what, partial(_peak, made, what, tokens))
            for batch in batches if again else ():
                what = f"{name}, decode {batch} × {context}, again"
                yield from guarded(what, partial(_again, made, what, batch, context))
        finally:
            made.close()


def _steps(probe: Probe, made: engine.Engine, what: str, batch: int, context: int) -> Iterator[Row]:
    sequences = _decoding(made, batch, context)
    yield _launch(probe, f"{what}, a small launch before")
    before, host = _allocations(made), _Host.now()
    times = _many(made, sequences)
    seconds = statistics.mean(times)
    spread = f"without the profiler; {min(times) * 1e3:.2f} to {max(times) * 1e3:.2f} ms"
    yield Row(f"{what}, one step", seconds * 1e3, "ms", spread)
    yield from _Host.now().since(host, what)
    asked = _allocations(made) - before
    yield Row(f"{what}, memory asked of the driver", asked, "times", f"in {STEPS} steps")
    yield _launch(probe, f"{what}, a small launch after")
    activities = [ProfilerActivity.CPU]
    if made.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as found:
        profiled = statistics.mean(_many(made, sequences))
    yield Row(f"{what}, one step", profiled * 1e3, "ms", "with the profiler")
    yield from _kernels(found, what, seconds)
    yield from _operations(found, what)
    yield from _idle(found, what)


def _again(made: engine.Engine, what: str, batch: int, context: int) -> Iterator[Row]:
    before = _Host.now()
    sequences = _decoding(made, batch, context)
    times = _many(made, sequences)
    spread = f"{min(times) * 1e3:.2f} to {max(times) * 1e3:.2f} ms"
    yield Row(f"{what}, one step", statistics.mean(times) * 1e3, "ms", spread)
    thread = _Host.now().thread - before.thread
    yield Row(f"{what}, processor", thread / (WARM + STEPS) * 1e3, "ms", "a step")


def _decoding(made: engine.Engine, batch: int, context: int) -> list[Sequence]:
    """Makes sequences that have decoded a few tokens."""
    sequences = made.sequences([context + 1] * batch, WARM + 2 * STEPS + 2)
    for each in sequences:
        each.num_computed = context
    for _ in range(WARM):
        made.step(sequences)
    return sequences


def _many(made: engine.Engine, sequences: list[Sequence]) -> list[float]:
    """Returns the time of each step; every step ends with its tokens on the host."""
    settle(made.device)
    times = []
    for _ in range(STEPS):
        begin = time.perf_counter()
        made.step(sequences)
        times.append(time.perf_counter() - begin)
    return times


def _launch(probe: Probe, what: str) -> Row:
    """The host's time of one small launch, beside the same row of the question `launches`: is the
    host slower here?"""
    small = torch.zeros(256, device=probe.device, dtype=torch.bfloat16)
    with torch.inference_mode():
        return Row(what, probe.host_seconds(lambda: small.add_(1)) * 1e6, "µs", "add_ in place")


@dataclass(frozen=True, slots=True)
class _Host:
    """What this thread and this process have used so far."""

    thread: float
    """Seconds of a processor."""
    process: float
    left: int
    """How often the thread gave its processor up."""
    lost: int
    """How often it was taken from it."""
    faults: int

    @classmethod
    def now(cls) -> _Host:
        used = resource.getrusage(resource.RUSAGE_THREAD)
        faults = used.ru_minflt + used.ru_majflt
        thread, process = time.thread_time(), time.process_time()
        return cls(thread, process, used.ru_nvcsw, used.ru_nivcsw, faults)

    def since(self, before: _Host, what: str) -> Iterator[Row]:
        """Rows for one of the steps between the two."""
        thread, process = self.thread - before.thread, self.process - before.process
        others = f"other threads {(process - thread) / STEPS * 1e3:.2f} ms"
        yield Row(f"{what}, processor", thread / STEPS * 1e3, "ms", others)
        lost = f"{(self.lost - before.lost) / STEPS:g} against its will"
        yield Row(f"{what}, processor left", (self.left - before.left) / STEPS, "times", lost)
        yield Row(f"{what}, page faults", (self.faults - before.faults) / STEPS, "times")


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


def _idle(found: profile, what: str) -> Iterator[Row]:
    """Idle time of the device in a step, by the kernel that ended it."""
    spans = [
        (event.name, event.time_range.start, event.time_range.end)
        for event in found.events() or ()  # type: ignore[no-untyped-call]
        if "CUDA" in str(event.device_type)
    ]
    for name, (spent, count) in idle_before(spans)[:GAPS]:
        note = f"{count / STEPS:g} times before {name[:80]}"
        yield Row(f"{what}, device idle", spent / STEPS, "µs", note)


def idle_before(spans: Iterable[tuple[str, float, float]]) -> list[tuple[str, tuple[float, int]]]:
    """Returns how long and how often nothing ran before each name, the longest first. `spans`:
    name, begin and end of each kernel and copy."""
    times: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    last: float | None = None
    for name, begin, end in sorted(spans, key=lambda span: span[1]):
        if last is not None and begin > last:
            times[name] += begin - last  # type: ignore[assignment]
            counts[name] += 1
        last = end if last is None else max(last, end)
    return [(name, (spent, counts[name])) for name, spent in times.most_common()]


def _averages(found: profile) -> list[Any]:
    return list(found.key_averages())


def _peak(made: engine.Engine, what: str, tokens: int) -> Iterator[Row]:
    (sequence,) = made.sequences([tokens], 1)
    with limits.peak_memory(made.device) as peak:
        made.step([sequence])
    yield Row(what, peak() / 2**20, "MiB", "beside weights and KV")

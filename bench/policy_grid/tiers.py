"""What tiers below the device and fetches between workers do for a conversation trace.

    python bench/policies.py --trace FILE --tiers [--requests N] [--data FILE] [--write PAGE]

Eight workers with 0.5 M tokens of device each; those with tiers have 20 M tokens of host in all.
Load 1 is the highest speed of the trace at which nine of ten requests are good without tiers. Then
each row is replayed at half of it, at 0.8 and at 0.95, with the trace as a whole.

Placement is exclusive: what leaves the device goes to the host, and what is used comes back. With
mirrored placement the host also holds all that the device holds; that is replayed as a host tier
which is smaller by the device.

A request is good if its first token came within 1 s + 2 times its prefill on an idle worker with an
empty cache.
"""

from __future__ import annotations

import os
import sys
from collections import OrderedDict
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Final

from bench.machine import facts
from bench.policy_grid.cells import Arm, Scale, World
from bench.policy_grid.compare import mean
from bench.policy_grid.report import good
from bench.policy_grid.runner import Runner
from pdserve.perf_model.step_time import preset_of
from pdserve.sim.workloads.mooncake import BLOCK, MooncakeTrace

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from bench.policy_grid.runner import Result
    from pdserve.ids import Seconds
    from pdserve.sim.workloads.trace_request import TraceRequest

__all__ = [
    "ARMS",
    "LOADS",
    "NO_TIERS",
    "ROWS",
    "TierFindings",
    "atomic_hit_rate",
    "idle_prefills",
    "tiers_main",
]

_DEVICE: Final = 500_000
_HOST: Final = 2_500_000
NO_TIERS: Final = Arm("no tiers", "ttft")
ARMS: Final = (
    NO_TIERS,
    Arm("host tiers", "ttft", host_tokens=_HOST),
    Arm("host tiers, fetches", "ttft", host_tokens=_HOST, fetch="auto"),
    Arm("host tiers, mirrored", "ttft", host_tokens=_HOST - _DEVICE),
    Arm("random routing, no tiers", "random"),
    Arm("random routing, host tiers", "random", host_tokens=_HOST),
    Arm("random routing, host tiers, fetches", "random", host_tokens=_HOST, fetch="auto"),
)
UNBOUNDED: Final = Arm(
    "host tiers that nothing fills, fetches", "ttft", host_tokens=150_000_000, fetch="auto"
)
"""What is left to gain by larger tiers or by better eviction."""
ROWS: Final = (*ARMS, UNBOUNDED)
LOADS: Final = (0.5, 0.8, 0.95)
_WELL: Final = 0.9
_KNEE_STEPS: Final = 5
_FIRST_SPEEDS: Final = (3.0, 4.0)
"""Between these the knee is searched first."""
_CHUNK: Final = 2048
"""Prompt tokens of a step, as replays have them."""


@dataclass(frozen=True, slots=True)
class TierFindings:
    """All measurements."""

    scale: Scale
    knee: float
    """Load 1, as a multiple of the trace's own speed."""
    results: Mapping[tuple[float, str], Sequence[Result]]
    """By load and arm, in order of seeds."""
    atomic: float
    """Hit rate of one LRU pool as large as all devices and hosts, requests one after the other."""
    idle: tuple[Seconds, Seconds] = (0.0, 0.0)
    """Mean seconds of a prefill on an idle worker: with an empty cache, and with one that has all
    that earlier prompts had."""
    cpu_seconds: float = 0.0


def tiers_main(options: argparse.Namespace) -> int:
    """Runs what is missing and writes the page."""
    requests = options.requests or (300 if options.quick else 0)
    scale = Scale(requests=requests, seeds=options.seeds or 1, noise=0.0, kv_tokens=_DEVICE)
    runner = Runner(options.trace, scale, options.data, options.processes)
    try:
        findings = _investigate(
            runner,
            scale,
            MooncakeTrace(options.trace),
            options.knee,
            only_known=options.known,
        )
    finally:
        runner.close()
    from bench.policy_grid.tiers_page import tiers_page  # it imports what it shows from here

    text = tiers_page(findings, [*facts(), f"{os.cpu_count()} CPUs seen"])
    print(text)
    if options.write:
        options.write.write_text(text, encoding="utf-8")
    return 0


def _investigate(
    runner: Runner,
    scale: Scale,
    trace: Iterable[TraceRequest],
    knee: float,
    *,
    only_known: bool,
) -> TierFindings:
    knee = knee or _knee(runner, scale)
    seeds = range(1, scale.seeds + 1)
    cells = [(load, arm, seed) for load in LOADS for arm in ROWS for seed in seeds]
    jobs = [(World(load=load, whole=True), arm, seed, knee) for load, arm, seed in cells]
    found = runner.known(jobs) if only_known else runner.run(jobs)
    results: dict[tuple[float, str], list[Result]] = {}
    for (load, arm, _), result in zip(cells, found, strict=True):
        if result is not None:
            results.setdefault((load, arm.name), []).append(result)
    whole = list(islice(trace, scale.requests or None))
    blocks = scale.workers * (_DEVICE + _HOST) // BLOCK
    atomic = atomic_hit_rate(whole, blocks)
    return TierFindings(scale, knee, results, atomic, idle_prefills(whole), runner.seconds)


def _knee(runner: Runner, scale: Scale) -> float:
    """The highest speed at which enough requests are good without tiers, to within some per
    cent."""

    def well(speed: float) -> bool:
        (found,) = runner.run([(World(whole=True), NO_TIERS, 1, speed)])
        print(f"{good(found):.1%} good at {speed:.3f}x", file=sys.stderr)
        return good(found) >= _WELL

    low, high = _FIRST_SPEEDS
    while not well(low):
        low, high = low * low / high, low
    while well(high):
        low, high = high, high * high / low
    for _ in range(_KNEE_STEPS):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if well(middle) else (low, middle)
    return round(low, 3)


def atomic_hit_rate(requests: Iterable[TraceRequest], blocks: int) -> float:
    """The share of prompt tokens that one LRU pool of `blocks` blocks finds, if each request is
    over before the next one begins. Leaves go first."""
    pool: OrderedDict[tuple[int, ...], None] = OrderedDict()
    tokens = hits = 0
    for request in requests:
        names = list(_chain(request))
        found = next((n for n, name in enumerate(names) if name not in pool), len(names))
        length = sum(count for _, count in request.pieces)
        tokens += length
        hits += min(found * BLOCK, length - 1)
        for name in reversed(names):
            pool[name] = None
            pool.move_to_end(name)
        while len(pool) > blocks:
            pool.popitem(last=False)
    return hits / tokens if tokens else 0.0


def _chain(request: TraceRequest) -> Iterator[tuple[int, ...]]:
    """Names of the prompt's full blocks, each with all before it."""
    before = 0
    for content, count in request.pieces:
        if count == BLOCK:
            before = hash((before, content))
            yield (before,)


def idle_prefills(requests: Iterable[TraceRequest]) -> tuple[Seconds, Seconds]:
    """Mean seconds of a prefill on an idle worker of the replays: with an empty cache, and with one
    that has all that earlier prompts had. No cache and no load makes the second one shorter."""
    seen: set[tuple[int, ...]] = set()
    cold: list[Seconds] = []
    warm: list[Seconds] = []
    for request in requests:
        length = sum(count for _, count in request.pieces)
        names = list(_chain(request))[: (length - 1) // BLOCK]
        found = next((n for n, name in enumerate(names) if name not in seen), len(names))
        seen.update(names)
        cold.append(_prefill(length, 0))
        warm.append(_prefill(length, found * BLOCK))
    return mean(cold), mean(warm)


def _prefill(length: int, cached: int) -> Seconds:
    timing = preset_of(World().preset).timing
    steps = (
        timing.step([(start, min(_CHUNK, length - start))], 0, 0, _DEVICE)
        for start in range(cached, length, _CHUNK)
    )
    return sum(steps)

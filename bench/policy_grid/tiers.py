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
from bench.policy_grid.report import first, good
from bench.policy_grid.runner import Runner
from pdserve.sim.workloads.mooncake import BLOCK, MooncakeTrace

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from bench.policy_grid.runner import Result
    from pdserve.sim.workloads.trace_request import TraceRequest

__all__ = ["ARMS", "NO_TIERS", "TierFindings", "atomic_hit_rate", "tiers_main", "tiers_page"]

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
_LOADS: Final = (0.5, 0.8, 0.95)
_WELL: Final = 0.9
_KNEE_STEPS: Final = 5
_FIRST_SPEEDS: Final = (3.0, 4.0)
"""Between these the knee is searched first."""


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
    cpu_seconds: float = 0.0


def tiers_main(options: argparse.Namespace) -> int:
    """Runs what is missing and writes the page."""
    requests = options.requests or (300 if options.quick else 0)
    scale = Scale(requests=requests, seeds=options.seeds or 1, noise=0.0, kv_tokens=_DEVICE)
    runner = Runner(options.trace, scale, options.data, options.processes)
    try:
        findings = _investigate(runner, scale, MooncakeTrace(options.trace))
    finally:
        runner.close()
    text = tiers_page(findings, [*facts(), f"{os.cpu_count()} CPUs seen"])
    print(text)
    if options.write:
        options.write.write_text(text, encoding="utf-8")
    return 0


def _investigate(runner: Runner, scale: Scale, trace: Iterable[TraceRequest]) -> TierFindings:
    knee = _knee(runner, scale)
    seeds = range(1, scale.seeds + 1)
    cells = [(load, arm, seed) for load in _LOADS for arm in ARMS for seed in seeds]
    found = runner.run(
        [(World(load=load, whole=True), arm, seed, knee) for load, arm, seed in cells]
    )
    results: dict[tuple[float, str], list[Result]] = {}
    for (load, arm, _), result in zip(cells, found, strict=True):
        results.setdefault((load, arm.name), []).append(result)
    whole = islice(trace, scale.requests or None)
    blocks = scale.workers * (_DEVICE + _HOST) // BLOCK
    return TierFindings(scale, knee, results, atomic_hit_rate(whole, blocks), runner.seconds)


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


# ---------------------------------------------------------------------- the page


def tiers_page(findings: TierFindings, about: Sequence[str]) -> str:
    """The whole page."""
    scale = findings.scale
    count = f"the first {scale.requests}" if scale.requests else "all"
    lines = [
        "# Tiers and routing in simulation",
        "",
        "Repeat with `python bench/policies.py --trace conversation_trace.jsonl --tiers`.",
        "",
        *(__doc__ or "").split("\n\n", 2)[2].strip().split("\n"),
        "",
        *(f"- {fact}" for fact in about),
        f"- {count} requests of Mooncake's conversation trace, with 3 s of jitter; "
        f"{scale.seeds} seed(s)",
        f"- load 1 is the trace at {findings.knee:g}x",
        f"- one LRU pool of all devices and hosts, requests one after the other, would find "
        f"{findings.atomic:.1%} of the prompt tokens",
        f"- {findings.cpu_seconds / 60:.0f} minutes of CPU",
    ]
    for load in _LOADS:
        lines += ["", f"## Load {load:g}", "", *_table(findings, load)]
    return "\n".join(lines) + "\n"


def _table(findings: TierFindings, load: float) -> Iterator[str]:
    yield f"| {' | '.join(_COLUMNS)} |"
    yield f"|{'---|' * len(_COLUMNS)}"
    base = mean([first(one) for one in findings.results[load, NO_TIERS.name]])
    for arm in ARMS:
        results = findings.results[load, arm.name]
        shares = {source: mean([_share(one, source) for one in results]) for source in _SOURCES}
        times = {key: mean([one["ttft"][key] for one in results]) for key in ("mean", "p50", "p99")}
        computed = mean([one["prompt_tokens"]["computed"] for one in results]) / 1e6
        cells = [
            arm.name,
            f"{mean([good(one) for one in results]):.1%}",
            f"{sum(shares.values()):.1%}",
            *(f"{share:.1%}" for share in shares.values()),
            f"{computed:.1f}",
            *(f"{value:.3f}" for value in times.values()),
            f"{times['mean'] / base - 1:+.1%}" if base else "",
        ]
        yield f"| {' | '.join(cells)} |"


_COLUMNS: Final = (
    *("row", "good", "found", "device", "host", "peer", "computed, M"),
    *("TTFT mean, s", "p50", "p99", "mean, to no tiers"),
)
_SOURCES: Final = ("device", "host", "peer")


def _share(result: Result, source: str) -> float:
    tokens = result["prompt_tokens"]
    return float(tokens[source] / max(1, sum(tokens.values())))

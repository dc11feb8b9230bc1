"""Which policy serves most requests well: production code, simulated engines, paired worlds.

    python bench/policies.py --trace FILE [--quick] [--processes 2] [--data FILE] [--write PAGE]
    python bench/policies.py --trace FILE --tiers ...    another page: bench/policy_grid/tiers.py
    python bench/policies.py --trace FILE --workloads ...    the page's last section: other requests
                                                and higher loads, bench/policy_grid/workloads.py

1. The knee: the highest speed of the trace at which `kv_load` with its defaults still serves 95 %
   of the requests well. Loads are given in units of it. Found on the first half of the trace.
2. `kv_load` is tuned on the first half, over the settings that its authors publish.
3. `ttft` and tuned `kv_load` on the second half over the whole grid: loads, jittered and not, all
   workers equal and a quarter at half speed, one, two and four routers. All other policies, with
   their defaults, at three loads with one router; every seed of a cell is the same world for all.
4. `ttft` without each of its terms, and both without the router's queue.

Every policy is behind the same queue, admission and bookings. The worlds have what the predictor's
model has not: steps shared by many requests, 30 % noise on each step, and, in some cells, the time
polynomials of Dynamo's mocker.

A request is good if its first token came within 1 s + 2 times its prefill on an idle worker with an
empty cache. Each finished replay is a line of `--data`, so that an interrupted run goes on.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.machine import facts
from bench.pages import kept
from bench.policy_grid.cells import CANDIDATES, KV_LOAD, Scale, World, grid
from bench.policy_grid.compare import mean
from bench.policy_grid.report import Findings, first, good, page
from bench.policy_grid.runner import Runner
from bench.policy_grid.tiers import tiers_main
from bench.policy_grid.workloads import workloads_main
from bench.policy_grid.workloads_page import HEADING

if TYPE_CHECKING:
    from bench.policy_grid.cells import Arm
    from bench.policy_grid.runner import Result

QUICK: Final = Scale(
    requests=300, workers=4, seeds=2, loads=(0.75, 1.0), few_loads=(1.0,), routers=(1, 2)
)
"""A grid of a few minutes. It shows that everything works, not which policy is better."""
_WELL: Final = 0.95
_TUNING_LOADS: Final = (0.75, 1.0)
_TUNING_SEEDS: Final = (101, 102)
_KNEE_STEPS: Final = 6
_PRESETS: Final = ("h100-8b", "dynamo-mocker")


def main() -> int:
    """Runs what is missing and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--trace", type=Path, required=True, help="conversation_trace.jsonl")
    parser.add_argument("--quick", action="store_true", help="a small grid, to see that it works")
    parser.add_argument("--requests", type=int, help="of a replay")
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--processes", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--data", type=Path, default=Path("build/policies.jsonl"))
    parser.add_argument("--write", type=Path)
    parser.add_argument("--tiers", action="store_true", help="only: what host tiers and fetches do")
    parser.add_argument("--knee", type=float, default=0.0, help="with --tiers: load 1, if known")
    parser.add_argument(
        "--known",
        action="store_true",
        help="with --tiers or --workloads: write what is measured, run no cell",
    )
    parser.add_argument(
        "--workloads", action="store_true", help="only: other requests, and loads up to 2"
    )
    parser.add_argument(
        "--code", type=Path, help="with --workloads: AzureLLMInferenceTrace_code.csv"
    )
    options = parser.parse_args()
    if options.tiers:
        return tiers_main(options)
    if options.workloads:
        return workloads_main(options)
    scale = QUICK if options.quick else Scale()
    scale = replace(
        scale,
        requests=options.requests or scale.requests,
        seeds=options.seeds or scale.seeds,
    )
    runner = Runner(options.trace, scale, options.data, options.processes)
    try:
        findings = investigate(runner, scale)
    finally:
        runner.close()
    text = page(findings, [*facts(), *_world(findings)], _how(options))
    print(text)
    if options.write:
        options.write.write_text(text + kept(options.write, HEADING), encoding="utf-8")
    return 0


def investigate(runner: Runner, scale: Scale) -> Findings:
    """Runs all four steps."""
    knees = {preset: knee(runner, scale, preset) for preset in _PRESETS}
    tuning = tune(runner, knees[_PRESETS[0]])
    tuned = replace(tuning[0][0], name="kv_load, tuned")
    plan = list(grid(scale, tuned))
    found = runner.run(
        [(world, arm, seed, knees[world.preset]) for world, arm, seed in plan],
    )
    results: dict[tuple[World, str], list[Result]] = {}
    for (world, arm, _), result in zip(plan, found, strict=True):
        results.setdefault((world, arm.name), []).append(result)
    return Findings(
        scale=scale,
        knees=knees,
        tuned=tuned,
        tuning=tuning,
        results=results,
        cpu_seconds=runner.seconds,
    )


def knee(runner: Runner, scale: Scale, preset: str) -> float:
    """Finds the knee by halving an interval that is widened first, to within some per cent."""

    def well(speed: float) -> bool:
        world = World(preset=preset, tuning=True)
        found = runner.run([(world, KV_LOAD, seed, speed) for seed in _TUNING_SEEDS])
        share = mean([good(result) for result in found])
        print(f"{preset}: {share:.1%} good at {speed:.2f}x", file=sys.stderr)
        return share >= _WELL

    low, high = scale.workers / 8, scale.workers / 2
    while not well(low):
        low, high = low / 2, low
    while well(high):
        low, high = high, high * 2
    for _ in range(_KNEE_STEPS):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if well(middle) else (low, middle)
    return round(low, 3)


def tune(runner: Runner, speed: float) -> list[tuple[Arm, float, float]]:
    """Tunes `kv_load`; returns the best first: (arm, share of good requests, mean time to first
    token)."""
    jobs = [
        (World(load=load, tuning=True), arm, seed, speed)
        for arm in CANDIDATES
        for load in _TUNING_LOADS
        for seed in _TUNING_SEEDS
    ]
    found = runner.run(jobs)
    each = len(jobs) // len(CANDIDATES)
    rows = []
    for index, arm in enumerate(CANDIDATES):
        own = found[index * each : (index + 1) * each]
        rows.append((arm, mean([good(r) for r in own]), mean([first(r) for r in own])))
    return sorted(rows, key=lambda row: (-round(row[1], 3), row[2]))


def _world(findings: Findings) -> list[str]:
    scale = findings.scale
    knees = ", ".join(f"{speed:g}x with {name}" for name, speed in findings.knees.items())
    return [
        f"{scale.workers} workers of preset h100-8b with {scale.kv_tokens / 1e6:g} M tokens of KV, "
        f"{scale.noise:.0%} noise on each step, {scale.seeds} seeds",
        f"{scale.requests} requests a replay: the first of each half of Mooncake's conversation "
        "trace, so that all of it takes minutes; caches are cold at their begin",
        f"load 1 is the trace at {knees}",
        f"{findings.cpu_seconds / 60:.0f} minutes of CPU; other work ran on the machine, which "
        "does not show in simulated time",
    ]


def _how(options: argparse.Namespace) -> list[str]:
    quick = " --quick" if options.quick else ""
    lines = __doc__.split("\n\n")
    return [
        f"Repeat with `python bench/policies.py --trace conversation_trace.jsonl{quick}`.",
        "",
        *"\n\n".join(lines[2:]).strip().split("\n"),
    ]


if __name__ == "__main__":
    sys.exit(main())

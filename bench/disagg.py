"""When do prefill and decode on different workers pay? Production code, simulated engines.

    python bench/disagg.py [--quick] [--processes 2] [--data FILE] [--write PAGE]
    python bench/disagg.py --planner [--minutes N] ...    another page: bench/disagg_grid/planned.py

Eight workers serve chats of 300 tokens whose answers stream, and among them a fifth of prompts of
12,000 tokens: on one worker each of those makes every stream stutter. Aggregated workers against
prefill and decode workers in three ratios, with every prompt prefilled elsewhere (`always`), and
with the decode worker's own choice (`predict`; `rule` at one ratio); over load, two presets, and a
fast and a slow network.

A request is good if its first token came within A + twice what its prompt takes on an idle worker,
and its tokens followed each other within B on average (A 0.5 s and B 15 ms with h100-8b, 1 s and
40 ms with h100-70b-tp4; B is 2.5 decode steps of an idle worker). Load 1 is the rate at which nine
of ten requests are good with aggregated workers. *The better side* of a cell is whichever serves
more requests well: aggregated workers, or `always` at the cell's ratio. *The better choice* is the
better of `always` and `never` there: what the decode workers of that cluster could do.

Each finished replay is a line of `--data`, so that an interrupted run goes on.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Final

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.disagg_grid.cells import KINDS, Arm, Scale, World, ablations, grid
from bench.disagg_grid.planned import (
    LONG,
    SHORT,
    CellResults,
    PlannedCell,
    cells,
    planned_page,
    results_of,
)
from bench.disagg_grid.report import Findings, page
from bench.disagg_grid.runner import Runner
from bench.machine import facts
from bench.planner_what_if import KNEES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.disagg_grid.cells import Kind
    from bench.disagg_grid.runner import Job, Result

QUICK: Final = Scale(requests=150, seeds=1, loads=(0.5, 1.0), prefills=(4,))
"""A grid of a minute or two, which shows that everything works."""
_WELL: Final = 0.9
_KNEE_SEEDS: Final = (11, 12)
_KNEE_STEPS: Final = 4
_LEAST: Final = {"h100-8b": 10.0, "h100-70b-tp4": 4.0}
_REASONS: Final = {
    "Why, over the slow network": "10 GbE carries less than one prompt of 12,000 tokens a second "
    "into a worker (1.6 GB of KV with h100-8b, 3.9 GB with h100-70b-tp4). So prefill workers stay "
    "nearly idle, and the decode workers do the work of all eight. No choice of theirs can help; "
    "what they could do, they do (`never` beside it). Next idea: prefill workers that take "
    "requests while the network is what is short, that is, modes that follow the load.",
    "Why, at little load there": "every decode worker begins with the guess of a fast network, "
    "and sends its first long prompts the slow way before it has learnt. Next idea: to begin with "
    "the rate that a path reports when it is made.",
}
"""Reasons of lost cells."""


def main() -> int:
    """Runs what is missing and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--quick", action="store_true", help="a small grid, to see that it works")
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--processes", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--data", type=Path, default=Path("build/disagg.jsonl"))
    parser.add_argument("--write", type=Path)
    parser.add_argument("--planner", action="store_true", help="only: a planner switches modes")
    text = "with --planner: begin no replay after so many minutes of CPU; results in --data count"
    parser.add_argument("--minutes", type=float, default=inf, help=text)
    options = parser.parse_args()
    if options.planner:
        return planner_main(options)
    scale = QUICK if options.quick else Scale()
    scale = replace(scale, seeds=options.seeds or scale.seeds)
    runner = Runner(scale, options.data, options.processes)
    try:
        findings = investigate(runner, scale)
    finally:
        runner.close()
    text = page(findings, [*facts(), *_world(findings)], _how(options))
    print(text)
    if options.write:
        options.write.write_text(text, encoding="utf-8")
    return 0


def planner_main(options: argparse.Namespace) -> int:
    """Runs cells in which a planner switches modes, and writes their page."""
    every = cells(LONG)
    runners = {scale: Runner(scale, options.data, options.processes) for scale in (SHORT, LONG)}

    def minutes() -> float:
        return sum(runner.seconds for runner in runners.values()) / 60

    def ask(scale: Scale, jobs: Sequence[Job]) -> list[Result] | None:
        runner = runners[scale]
        known = runner.known(jobs)
        return runner.run(jobs) if known is None and minutes() < options.minutes else known

    found: dict[PlannedCell, CellResults] = {}
    try:
        for cell in every:
            results = results_of(cell, KNEES, ask)
            if results is not None:
                found[cell] = results
                print(f"{cell.words}, {minutes():.0f} minutes of CPU", file=sys.stderr)
    finally:
        for runner in runners.values():
            runner.close()
    text = planned_page(found, every, [*facts(), f"{minutes():.0f} minutes of CPU"])
    print(text)
    if options.write:
        options.write.write_text(text, encoding="utf-8")
    return 0


def investigate(runner: Runner, scale: Scale) -> Findings:
    """Finds the knees, runs the grid and removes the router's terms."""
    knees = {kind.preset: knee(runner, scale, kind) for kind in KINDS}
    plan = list(grid(scale))
    terms = list(ablations(scale))
    jobs = [(world, arm, seed, knees[world.kind.preset]) for world, arm, seed in plan]
    jobs += [(world, arm, seed, knees[world.kind.preset]) for world, _, arm, seed in terms]
    found = runner.run(jobs)
    results: dict[tuple[World, str], list[Result]] = {}
    for (world, arm, _), result in zip(plan, found, strict=False):
        results.setdefault((world, arm.name), []).append(result)
    ablated: dict[tuple[World, str, str], list[Result]] = {}
    for (world, name, arm, _), result in zip(terms, found[len(plan) :], strict=True):
        ablated.setdefault((world, arm.name, name), []).append(result)
    return Findings(
        scale=scale,
        knees=knees,
        results=results,
        ablated=ablated,
        reasons=_REASONS,
        cpu_seconds=runner.seconds,
    )


def knee(runner: Runner, scale: Scale, kind: Kind) -> float:
    """Finds the knee by halving an interval that is widened first, to within some per cent."""

    def well(rate: float) -> bool:
        world, arm = World(kind), Arm(workers=scale.workers)
        found = runner.run([(world, arm, seed, rate) for seed in _KNEE_SEEDS])
        share = sum(result["good"] for result in found) / len(found)
        print(f"{kind.preset}: {share:.1%} good at {rate:.2f}/s", file=sys.stderr)
        return bool(share >= _WELL)

    low = _LEAST[kind.preset]
    high = low * 2
    while well(high):
        low, high = high, high * 2
    for _ in range(_KNEE_STEPS):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if well(middle) else (low, middle)
    return round(low, 2)


def _world(findings: Findings) -> list[str]:
    scale = findings.scale
    knees = ", ".join(f"{rate:g}/s with {name}" for name, rate in findings.knees.items())
    seeds = f"{scale.seeds} seeds, medians" if scale.seeds > 1 else "one seed"
    return [
        f"load 1: {knees}",
        f"{scale.requests} requests a replay, {seeds}; {scale.noise:.0%} "
        f"noise on each step, {scale.kv_tokens / 1e6:g} M tokens of KV a worker; all begins cold, "
        "with nothing learnt",
        "a worker sends KV, and receives some, at the network's rate; transfers share it; what is "
        "sent while later parts are computed costs nothing more",
        f"{findings.cpu_seconds / 60:.0f} minutes of CPU; other work ran on the machine, which "
        "does not show in simulated time",
    ]


def _how(options: argparse.Namespace) -> list[str]:
    quick = " --quick" if options.quick else ""
    quick += f" --seeds {options.seeds}" if options.seeds else ""
    lines = __doc__.split("\n\n")
    return [
        f"Repeat with `python bench/disagg.py{quick}`.",
        "",
        *"\n\n".join(lines[2:-1]).strip().split("\n"),
    ]


if __name__ == "__main__":
    sys.exit(main())

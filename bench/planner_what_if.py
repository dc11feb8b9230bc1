"""How well does the planner's what-if predict? Its miss shares beside those of production code.

    python bench/planner_what_if.py [--quick] [--processes 2] [--data FILE] [--write PAGE]

Each cell is one cluster under one load. `pdserve.sim.replay` runs production code in virtual time
and counts the requests that miss their objective. The what-if gets what a planner would have: the
arrivals, the lengths of finished requests, and a latency model fitted to the times of idle workers.
It draws output lengths by prompt length, so it does not know which answer is long.

Loads are those of bench/disagg.py: chats of 300 tokens, and a fifth of prompts of 12,000 tokens;
a first token within A + twice the prompt's own time, tokens within 2.5 idle decode steps. Load 1 is
the rate at which eight aggregated workers just keep it for nine of ten requests; other sizes get
their share of it. A cell is *near the knee* if 60% to 99.5% of its requests are good in simulation:
there a wrong answer changes what the planner does.

Each finished replay is a line of `--data`, so that an interrupted run goes on.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.disagg_grid.cells import KINDS, Arm, Kind, Scale, World, mix
from bench.disagg_grid.runner import Runner
from bench.machine import facts
from pdserve.perf_model.latency_model import LatencyModel
from pdserve.perf_model.regression import RegressionRow, fit_nonnegative
from pdserve.perf_model.step_time import preset_of
from pdserve.planner.recent_arrivals import RecentArrival
from pdserve.planner.what_if.evaluate import WhatIf
from pdserve.planner.what_if.records import (
    CandidatePool,
    CandidateWorker,
    Handoffs,
    LatencyObjective,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.messages.handoff import Disagg
    from pdserve.planner.what_if.records import Outcome, PoolMode

KNEES: Final = {"h100-8b": 33.64, "h100-70b-tp4": 16.0}
"""Requests per second of load 1 on eight workers (bench/results/disagg.md)."""
_EIGHT: Final = 8
_STEP: Final = 2048
_LENGTHS: Final = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
_LATENCY: Final = 0.002
"""Seconds of messages around a transfer, in the simulated network."""
_NEAR: Final = 0.6, 0.995
_AIM: Final = 0.05
_SEEDS: Final = 2


@dataclass(frozen=True, slots=True)
class Cell:
    """One cluster and its load."""

    kind: Kind
    arm: Arm
    load: float
    """Per worker, in units of the rate that aggregated workers just carry."""
    kv_tokens: int = 400_000

    @property
    def workers(self) -> int:
        return self.arm.workers + self.arm.prefill + self.arm.decode

    @property
    def rate(self) -> float:
        """Requests per second."""
        return self.load * KNEES[self.kind.preset] * self.workers / _EIGHT

    @property
    def words(self) -> str:
        arm = self.arm
        parts = [f"{arm.workers} aggregated"] if arm.workers else []
        if arm.prefill:
            parts.append(f"{arm.prefill}:{arm.decode} {arm.disagg}")
        return " + ".join(parts)


def cells() -> list[Cell]:
    """Sizes, ratios and rules around the knee, and some beyond it."""
    small, large = KINDS

    def split(prefill: int, decode: int, rule: Disagg, workers: int = 0) -> Arm:
        return Arm(workers, prefill, decode, rule)

    found = [Cell(small, Arm(n), load) for n in (2, 4, 8, 16) for load in (0.7, 1.0)]
    found += [Cell(small, Arm(_EIGHT), load) for load in (1.3, 1.7)]
    ratios: tuple[tuple[int, int, Disagg, float], ...] = (
        *((4, 4, "rule", 1.5), (4, 4, "rule", 2.0), (2, 6, "rule", 1.0), (2, 6, "rule", 1.5)),
        *((6, 2, "rule", 2.0), (4, 4, "always", 1.0), (4, 4, "always", 1.5)),
        *((2, 6, "always", 0.6), (2, 6, "always", 1.0), (4, 4, "predict", 1.5)),
        *((2, 6, "predict", 1.0), (1, 3, "rule", 1.0), (2, 2, "rule", 1.5)),
    )
    found += [
        Cell(small, split(prefill, decode, rule), load) for prefill, decode, rule, load in ratios
    ]
    found += [Cell(small, split(2, 2, "rule", 4), load) for load in (1.0, 1.5)]
    found += [Cell(small, Arm(_EIGHT), 1.0, kv_tokens) for kv_tokens in (40_000, 60_000)]
    found += [Cell(large, Arm(_EIGHT), load) for load in (0.7, 1.0)]
    found += [Cell(large, split(4, 4, "rule"), 1.5), Cell(large, split(2, 6, "rule"), 1.0)]
    return found


def learnt(preset: str) -> LatencyModel:
    """The latency model that idle workers of this preset teach."""
    timing, rows = preset_of(preset).timing, []
    for length in _LENGTHS:
        chunks = [(start, min(_STEP, length - start)) for start in range(0, length, _STEP)]
        seconds = sum(timing.step([chunk], 0, 0, 1) for chunk in chunks)
        rows.append(RegressionRow(length, float(length * length), seconds))
    prior = LatencyModel()
    base, per_token, per_pair = fit_nonnegative(rows, (prior.base, prior.per_token, prior.per_pair))
    steps = [
        RegressionRow(n, n * depth, timing.step((), n, n * depth, 1))
        for n in (1, 8, 64)
        for depth in (200, 2000)
    ]
    step = fit_nonnegative(steps, (prior.step_base, prior.step_sequence, prior.step_token))
    return LatencyModel(base, per_token, per_pair, *step, fitted=True)


def pool_of(cell: Cell) -> CandidatePool:
    """The cell's workers as a candidate."""
    modes: tuple[tuple[PoolMode, int], ...] = (
        ("aggregated", cell.arm.workers),
        ("prefill", cell.arm.prefill),
        ("decode", cell.arm.decode),
    )
    workers = tuple(
        CandidateWorker(mode=mode, kv_tokens=cell.kv_tokens)
        for mode, number in modes
        for _ in range(number)
    )
    return CandidatePool(cell.words, workers)


def predicted(cell: Cell, scale: Scale, seed: int) -> tuple[Outcome, float]:
    """What the what-if says of a cell, and the CPU seconds of one replay."""
    kind = cell.kind
    trace = list(mix(scale, cell.rate, seed))
    lengths = [sum(count for _, count in one.pieces) for one in trace]
    recent = [RecentArrival(one.at, tokens) for one, tokens in zip(trace, lengths, strict=True)]
    finished = [(tokens, one.output_tokens) for one, tokens in zip(trace, lengths, strict=True)]
    bandwidth = World(kind).bandwidth
    handoffs = Handoffs(
        cell.arm.disagg,
        latency=_LATENCY,
        token=preset_of(kind.preset).shape.token_bytes / bandwidth,
    )
    objective = LatencyObjective(kind.ttft, kind.itl, idle_factor=2.0)
    what_if = WhatIf(learnt(kind.preset), objective, recent, finished, handoffs=handoffs)
    began = time.process_time()
    outcome = what_if.evaluate(pool_of(cell))
    return outcome, (time.process_time() - began) / 3


@dataclass(frozen=True, slots=True)
class Row:
    """Both answers for one cell."""

    cell: Cell
    outcomes: Sequence[Outcome]
    simulated: float
    """Share of requests that miss, mean over the seeds."""
    ttft_p50: float
    itl_p50: float
    seconds: float

    @property
    def predicted(self) -> float:
        return sum(outcome.miss for outcome in self.outcomes) / len(self.outcomes)

    @property
    def off(self) -> float:
        return self.predicted - self.simulated

    @property
    def near(self) -> bool:
        return _NEAR[0] <= 1 - self.simulated <= _NEAR[1]

    @property
    def cause(self) -> str:
        causes: dict[str, float] = {}
        for outcome in self.outcomes:
            for cause, share in outcome.causes.items():
                causes[cause] = causes.get(cause, 0.0) + share
        return max(causes, key=causes.__getitem__, default="")


def measure(options: argparse.Namespace) -> list[Row]:
    """Runs what is missing."""
    scale = Scale(requests=150 if options.quick else 600)
    chosen = cells()[::6] if options.quick else cells()
    seeds = range(1, 2 if options.quick else _SEEDS + 1)
    rows = []
    by_size: dict[int, Runner] = {}
    try:
        for cell in chosen:
            if cell.kv_tokens not in by_size:
                sized = replace(scale, kv_tokens=cell.kv_tokens)
                by_size[cell.kv_tokens] = Runner(sized, options.data, options.processes)
            jobs = [(World(cell.kind), cell.arm, seed, cell.rate) for seed in seeds]
            results = by_size[cell.kv_tokens].run(jobs)
            answers = [predicted(cell, scale, seed) for seed in seeds]
            rows.append(
                Row(
                    cell,
                    [outcome for outcome, _ in answers],
                    sum(1 - result["good"] for result in results) / len(results),
                    sum(result["ttft"]["p50"] for result in results) / len(results),
                    sum(result["itl"]["p50"] for result in results) / len(results),
                    sum(seconds for _, seconds in answers) / len(answers),
                )
            )
            print(f"{_line(rows[-1])}", file=sys.stderr)
    finally:
        for runner in by_size.values():
            runner.close()
    return rows


def page(rows: Sequence[Row], requests: int) -> str:
    """The result page."""
    near = [row for row in rows if row.near]
    within = [row for row in near if abs(row.off) <= _AIM]
    mean = sum(abs(row.off) for row in near) / max(1, len(near))
    late = [row for row in rows if not row.near and abs(row.off) > _AIM]
    return "\n".join(
        [
            "# The planner's what-if beside production code",
            "",
            "Repeat with `python bench/planner_what_if.py`.",
            "",
            *"\n\n".join(__doc__.split("\n\n")[2:-1]).strip().split("\n"),
            "",
            *(f"- {fact}" for fact in facts()),
            f"- {requests} requests a replay, {_SEEDS} seeds, means; the what-if with 3 seeds each",
            "",
            "## What it says",
            "",
            f"Near the knee the what-if is off by {mean * 100:.1f} points on average. "
            f"{len(within)} of {len(near)} cells are within {_AIM:.0%}.",
            "",
            "Off by more near the knee:",
            "",
            *([f"- {_words(row)}" for row in near if row not in within] or ["- none"]),
            "",
            "Off by more elsewhere:",
            "",
            *([f"- {_words(row)}" for row in late] or ["- none"]),
            "",
            "## All cells",
            "",
            "| preset | pool | load | KV | simulated misses | predicted | off by | main cause | "
            "knee |",
            "| --- | --- | ---: | ---: | ---: | ---: | ---: | --- | --- |",
            *map(_line, rows),
            "",
        ]
    )


def _words(row: Row) -> str:
    return (
        f"{row.cell.kind.preset}, {row.cell.words}, load {row.cell.load:g}: {row.simulated:.1%} "
        f"miss, predicted {row.predicted:.1%}"
    )


def _line(row: Row) -> str:
    cell = row.cell
    return (
        f"| {cell.kind.preset} | {cell.words} | {cell.load:g} | {cell.kv_tokens // 1000}k | "
        f"{row.simulated:.1%} | {row.predicted:.1%} | {row.off * 100:+.1f} | {row.cause} | "
        f"{'near' if row.near else ''} |"
    )


def main() -> int:
    """Runs what is missing and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--quick", action="store_true", help="some cells, to see that it works")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--data", type=Path, default=Path("build/planner_what_if.jsonl"))
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    text = page(measure(options), 150 if options.quick else 600)
    print(text)
    if options.write:
        options.write.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

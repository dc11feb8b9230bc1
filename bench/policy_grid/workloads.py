"""More workloads than the first requests of one trace, and loads up to twice the knee.

    python bench/policies.py --trace FILE --workloads [--code FILE] [--known] [--write PAGE]

    conversation  the grid's own trace and part: the second half of Mooncake's conversations
    middle        2,000 requests from the middle of that trace
    code          the second half of Azure's code completions: 2,000 tokens in, 28 out, no prefixes
    agentic       generated programs of coding agents: contexts of 27,000 tokens on the mean, steps
                  of 4,000 that follow each other a second after an answer of 150
    shared-prefix generated prompts: 150 beginnings of 6,000 tokens, each with questions of its own
    unique        generated prompts that share nothing

Each workload has a knee of its own: the highest speed at which `kv_load` with its defaults serves
95 % of the requests well. Rivals have their defaults, and `kv_load` also the settings that were the
best on the first half of the conversations. One router, equal workers. A cell counts
once all its arms and seeds have run; `--known` writes what has run so far.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from bench.pages import replaced
from bench.policy_grid.cells import (
    CANDIDATES,
    KV_LOAD,
    RIVALS,
    TTFT,
    WORKLOADS,
    Arm,
    Scale,
    World,
)
from bench.policy_grid.compare import mean
from bench.policy_grid.report import good
from bench.policy_grid.runner import Runner

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence

    from bench.policy_grid.runner import Job, Result

__all__ = ["ARMS", "LOADS", "WorkloadFindings", "arms_of", "workload_jobs", "workloads_main"]

TUNED: Final = Arm("kv_load, tuned", "kv_load", CANDIDATES[7].options)
"""The best of `CANDIDATES` on the first half of the conversations."""
_CLOSE: Final = ("least_loaded", "approx_prefix, library", "mooncake", "sticky", "preble")
"""Rivals that do not lose every cell of the main grid by far."""
ARMS: Final = (TTFT, TUNED, KV_LOAD, *(arm for arm in RIVALS if arm.name in _CLOSE))
_BY_SESSION: Final = next(arm for arm in RIVALS if arm.name == "session")
_ORDER: Final = ("code", "shared-prefix", "unique", "conversation", "agentic", "middle")
"""Workloads in the order in which they run: the cheap ones first."""
LOADS: Final = (2.0, 1.0, 1.5)
"""In the order in which they run."""
_WELL: Final = 0.95
_KNEE_STEPS: Final = 3
_MOST_WIDENED: Final = 8
_FIRST_SPEEDS: Final[Mapping[str, tuple[float, float]]] = {
    "conversation": (2.0, 3.0),
    "middle": (2.0, 3.0),
    "code": (30.0, 45.0),
    "agentic": (1.0, 3.0),
    "shared-prefix": (15.0, 30.0),
    "unique": (60.0, 90.0),
}
"""Between these the knee is searched first."""


@dataclass(frozen=True, slots=True)
class WorkloadFindings:
    """All measurements."""

    scale: Scale
    knees: Mapping[str, float]
    """Load 1 of each workload, as a multiple of the trace's own speed."""
    results: Mapping[tuple[World, str], Sequence[Result]]
    """By world and arm, in order of seeds; whole worlds only."""
    cpu_seconds: float = 0.0

    @property
    def worlds(self) -> list[World]:
        """The worlds that ran, by workload and load."""
        order = {name: index for index, name in enumerate(WORKLOADS)}
        found = {world for world, _ in self.results}
        return sorted(found, key=lambda world: (order[world.workload], world.load))


def workloads_main(options: argparse.Namespace) -> int:
    """Runs what is missing and replaces the section of the page."""
    from bench.policy_grid.workloads_page import HEADING, section  # it imports names from here

    scale = Scale(
        requests=options.requests or (300 if options.quick else 800),
        seeds=options.seeds or (2 if options.quick else 3),
    )
    runner = Runner(options.trace, scale, options.data, options.processes, code=options.code)
    try:
        findings = _investigate(runner, scale, only_known=options.known)
    finally:
        runner.close()
    text = section(findings)
    print(text)
    if options.write:
        options.write.write_text(replaced(options.write, HEADING, text), encoding="utf-8")
    return 0


def arms_of(workload: str) -> tuple[Arm, ...]:
    """The policies of a workload. Only agents name their session."""
    return (*ARMS, _BY_SESSION) if workload == "agentic" else ARMS


def workload_jobs(name: str, load: float, scale: Scale, knee: float) -> list[Job]:
    """The replays of one cell."""
    world = World(load=load, workload=name)
    seeds = range(1, scale.seeds + 1)
    return [(world, arm, seed, knee) for arm in arms_of(name) for seed in seeds]


def _investigate(runner: Runner, scale: Scale, *, only_known: bool) -> WorkloadFindings:
    knees: dict[str, float] = {}
    results: dict[tuple[World, str], list[Result]] = {}
    for name in _ORDER:
        if name == "code" and runner.code is None:
            continue
        knees[name] = _knee(runner, name, only_known=only_known)
        for load in LOADS if knees[name] else ():
            jobs = workload_jobs(name, load, scale, knees[name])
            found = [one for one in _found(runner, jobs, only_known=only_known) if one is not None]
            if len(found) == len(jobs):
                for (world, arm, _, _), result in zip(jobs, found, strict=True):
                    results.setdefault((world, arm.name), []).append(result)
    return WorkloadFindings(scale, knees, results, runner.seconds)


def _found(runner: Runner, jobs: Sequence[Job], *, only_known: bool) -> Sequence[Result | None]:
    return runner.known(jobs) if only_known else runner.run(jobs)


def _knee(runner: Runner, name: str, *, only_known: bool) -> float:
    """The knee to within some per cent; 0 if a replay is missing that may not run."""

    def well(speed: float) -> bool:
        jobs = [(World(workload=name), KV_LOAD, seed, speed) for seed in (101, 102)]
        found = [one for one in _found(runner, jobs, only_known=only_known) if one is not None]
        if not found:
            raise LookupError(speed)
        share = mean([good(one) for one in found])
        print(f"{name}: {share:.1%} good at {speed:.2f}x", file=sys.stderr, flush=True)
        return share >= _WELL

    low, high = _FIRST_SPEEDS[name]
    try:
        while not well(low):
            low, high = low * low / high, low
        widened = 0
        while well(high):
            low, high = high, high * high / low
            widened += 1
            if widened > _MOST_WIDENED:
                raise RuntimeError(f"{name}: no speed is too high")
        for _ in range(_KNEE_STEPS):
            middle = (low * high) ** 0.5
            low, high = (middle, high) if well(middle) else (low, middle)
    except LookupError:
        return 0.0
    return round(low, 3)

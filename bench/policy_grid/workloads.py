"""More workloads than the first requests of one trace, and loads up to twice the knee.

    python bench/policies.py --trace FILE --workloads [--code FILE] [--known] [--write PAGE]

    conversation  the grid's own trace and part: the second half of Mooncake's conversations
    middle        requests from the middle of that trace
    code          the second half of Azure's code completions: 2,000 tokens in, 28 out, no prefixes
    agentic       generated programs of coding agents: contexts of 27,000 tokens on the mean, steps
                  of 4,000 that follow each other a second after an answer of 150
    shared-prefix generated prompts: 150 beginnings of 6,000 tokens, each with questions of its own
    unique        generated prompts that share nothing

Load 1 is a speed at which `kv_load` with its defaults once served 95 % of the requests well; it has
stayed the same since, so that pages of different commits can be compared. The middle has the speed
of the conversations. Agents have two workers and a speed of their own, since each program waits for
its answers: no speed is too much for eight workers. Rivals have their defaults; `kv_load`, `preble`
and `least_loaded` lost most cells at an earlier commit and are left out. One router, equal workers.
A cell counts once all its arms and seeds have run; `--known` writes what has run so far.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from bench.pages import replaced
from bench.policy_grid.cells import (
    RIVALS,
    TTFT,
    WORKLOADS,
    Arm,
    Scale,
    World,
)
from bench.policy_grid.runner import Runner

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence

    from bench.policy_grid.runner import Job, Result

__all__ = ["ARMS", "LOADS", "WorkloadFindings", "arms_of", "workload_jobs", "workloads_main"]

_CLOSE: Final = ("approx_prefix, library", "mooncake", "sticky")
"""Rivals that do not lose most cells."""
ARMS: Final = (TTFT, *(arm for arm in RIVALS if arm.name in _CLOSE))
_BY_SESSION: Final = next(arm for arm in RIVALS if arm.name == "session")
_ORDER: Final = ("conversation", "unique", "code", "middle", "agentic", "shared-prefix")
"""Workloads in the order in which they run."""
LOADS: Final = (2.0, 1.5, 1.0)
"""In the order in which they run."""
KNEES: Final[Mapping[str, float]] = {
    "conversation": 4.278,
    "middle": 4.278,
    "code": 42.776,
    "agentic": 0.25,
    "shared-prefix": 7.5,
    "unique": 81.324,
}
"""Load 1 of each workload, as a multiple of the trace's own speed."""


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
        knees[name] = KNEES[name]
        for load in LOADS:
            jobs = workload_jobs(name, load, scale, KNEES[name])
            found = [one for one in _found(runner, jobs, only_known=only_known) if one is not None]
            if len(found) == len(jobs):
                for (world, arm, _, _), result in zip(jobs, found, strict=True):
                    results.setdefault((world, arm.name), []).append(result)
    return WorkloadFindings(scale, knees, results, runner.seconds)


def _found(runner: Runner, jobs: Sequence[Job], *, only_known: bool) -> Sequence[Result | None]:
    return runner.known(jobs) if only_known else runner.run(jobs)

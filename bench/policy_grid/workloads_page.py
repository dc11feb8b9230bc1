"""Writes the section about other workloads and higher loads. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import bench.policy_grid.workloads
from bench.machine import facts
from bench.policy_grid.cells import TTFT, WORKLOADS
from bench.policy_grid.compare import Difference, difference, mean
from bench.policy_grid.report import first, good
from bench.policy_grid.workloads import LOADS, arms_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from bench.policy_grid.cells import Arm, World
    from bench.policy_grid.runner import Result
    from bench.policy_grid.workloads import WorkloadFindings

__all__ = ["HEADING", "section"]

HEADING: Final = "## Other workloads, and loads up to twice the knee"


def section(findings: WorkloadFindings) -> str:
    """The section, from its heading on."""
    how = (bench.policy_grid.workloads.__doc__ or "").split("\n\n", 2)[2].strip("\n").split("\n")
    parts = [
        [HEADING, "", *how, "", *_facts(findings)],
        list(_verdict(findings)),
        list(_table(findings)),
    ]
    return "\n\n".join("\n".join(lines) for lines in parts) + "\n"


def _facts(findings: WorkloadFindings) -> Iterator[str]:
    scale = findings.scale
    yield from (f"- {fact}" for fact in facts())
    yield (
        f"- {scale.workers} workers as above (2 for agents), {scale.seeds} seeds; "
        f"{scale.requests} requests a replay of conversations and agents, "
        f"{round(scale.requests * 2.5):,} of the others"
    )
    knees = ", ".join(f"{name} {speed:g}x" for name, speed in findings.knees.items() if speed)
    yield f"- Load 1: {knees}"
    yield f"- {findings.cpu_seconds / 60:.0f} minutes of CPU"
    ran = {(world.workload, world.load) for world in findings.worlds}
    missing = [
        f"{name} at {load:g}"
        for name in WORKLOADS
        for load in sorted(LOADS)
        if (name, load) not in ran
    ]
    yield f"- Cells that did not run: {', '.join(missing) or 'none'}"


def _verdict(findings: WorkloadFindings) -> Iterator[str]:
    worlds = findings.worlds
    lost = [
        (world, arm)
        for world in worlds
        for arm in arms_of(world.workload)
        if _against(findings, world, arm, good).word == "worse"
    ]
    yield (
        f"`ttft` is the best or equal in the share of good requests in "
        f"{len(worlds) - len({world for world, _ in lost})} of {len(worlds)} cells."
    )
    if not lost:
        return
    yield "Cells that it loses:"
    yield ""
    for world, arm in lost:
        one = _against(findings, world, arm, good)
        yield (
            f"- {world.workload} at load {world.load:g}: {arm.name} has {-one.mean:.1%} more "
            f"({-one.high:.1%} to {-one.low:.1%})"
        )


def _against(
    findings: WorkloadFindings, world: World, arm: Arm, read: Callable[[Result], float]
) -> Difference:
    ours, theirs = (
        [read(result) for result in findings.results[world, one.name]] for one in (TTFT, arm)
    )
    return difference(ours, theirs)


def _table(findings: WorkloadFindings) -> Iterator[str]:
    yield (
        "| workload | load | policy | good | TTFT mean s | p99 s | hits | `ttft` against it, good "
        "(95 %) | |"
    )
    yield "| --- | ---: | --- | ---: | ---: | ---: | ---: | ---: | --- |"
    for world in findings.worlds:
        rows = [(mean(_values(findings, world, arm, good)), arm) for arm in arms_of(world.workload)]
        for _, arm in sorted(rows, key=lambda row: -row[0]):
            yield _row(findings, world, arm)


def _row(findings: WorkloadFindings, world: World, arm: Arm) -> str:
    one = _against(findings, world, arm, good)
    against = f"{one.mean:+.1%} ({one.low:+.1%} to {one.high:+.1%}) | {one.word}"
    p99 = mean(_values(findings, world, arm, lambda result: float(result["ttft"]["p99"])))
    hits = mean(_values(findings, world, arm, lambda result: float(result["hit_rate"])))
    return (
        f"| {world.workload} | {world.load:g} | {'**ttft**' if arm == TTFT else arm.name} "
        f"| {mean(_values(findings, world, arm, good)):.1%} "
        f"| {mean(_values(findings, world, arm, first)):.2f} | {p99:.2f} | {hits:.1%} "
        f"| {' | ' if arm == TTFT else against} |"
    )


def _values(
    findings: WorkloadFindings, world: World, arm: Arm, read: Callable[[Result], float]
) -> list[float]:
    return [read(result) for result in findings.results[world, arm.name]]

"""Runs `pdserve simulate --plan`: how many workers, in which modes, an objective needs.

The search is `pdserve.sim.capacity`.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pdserve.cli.outputs import check_writable, write
from pdserve.cli.simulate.plan_report import CapacityPlan, plan_as_json, plan_report, unreachable
from pdserve.errors import ConfigError
from pdserve.launch import exit_codes

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from pdserve.ids import Seconds
    from pdserve.sim.capacity.idle import IdleWorker, RequestFloor
    from pdserve.sim.capacity.search import PlanCell, PlanSearch
    from pdserve.sim.capacity.trial import TrialPlan

__all__ = ["PLAN_MODES", "parse_modes", "run_plan"]

PLAN_MODES: Final = ("aggregated", "split")
_DRAW_EVERY: Final[Seconds] = 0.2
_SMALL: Final = 500
"""Traces of fewer requests are replayed in this process: others take a second to start."""


def run_plan(parsed: argparse.Namespace, plan: TrialPlan, title: dict[str, Any]) -> int:
    """Searches, prints a table and the answer, and writes the requested files.

    Args: `title` says what was replayed, for the report. The idle times of `plan` are measured
    here.
    """
    from pdserve.sim.capacity.plot import draw_plan

    _check(parsed)
    check_writable(Path(path) for path in (parsed.json, parsed.plot) if path)
    floor, idle, plan = _floor(plan)
    if floor.tally.lost:
        raise ConfigError(unreachable(plan, floor, idle))
    search = _searched(parsed, plan, floor.least_workers(), floor.tally.total)
    made = CapacityPlan(plan, search, idle, title, parsed.price)
    print(plan_report(made))
    if parsed.json:
        write(Path(parsed.json), plan_as_json(made))
    if parsed.plot:
        draw_plan(search, plan.objective, parsed.price, Path(parsed.plot), made.title_text)
    return exit_codes.OK if search.answer else exit_codes.FAILED


def parse_modes(text: str) -> tuple[str, ...]:
    """Reads `aggregated`, `split` or `aggregated,split`. Errors: `ValueError`."""
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    if not set(names) <= set(PLAN_MODES):
        raise ValueError(f"{text!r} is not a choice of {' and '.join(PLAN_MODES)}")
    return names


def _check(parsed: argparse.Namespace) -> None:
    for flag, given in (
        ("--workers", parsed.workers is not None),
        ("--prefill", parsed.prefill),
        ("--decode", parsed.decode),
    ):
        if given:
            raise ConfigError(f"{flag} has no effect beside --plan, which chooses the workers")
    if not parsed.slo and parsed.slo_ttft is None and parsed.slo_itl is None:
        raise ConfigError("--plan needs an objective, such as --slo-ttft 500ms --slo-itl 50ms")
    if parsed.price < 0:
        raise ConfigError("--price must not be negative")
    for flag, value in (("--seeds", parsed.seeds), ("--most-workers", parsed.most_workers)):
        if value < 1:
            raise ConfigError(f"{flag} must be at least 1")


def _floor(plan: TrialPlan) -> tuple[Any, IdleWorker, TrialPlan]:
    """Reads the whole trace, which also finds every bad line, and measures one idle worker."""
    from dataclasses import replace

    from pdserve.sim.capacity.idle import TraceFloor, measure_idle, request_floors
    from pdserve.sim.capacity.trial import seeded_trace

    floors: list[RequestFloor] = list(request_floors(seeded_trace(plan, 0)))
    if not floors:
        raise ConfigError("the trace has no request: nothing to plan for")
    idle = measure_idle(plan.config, max(one.prompt_tokens for one in floors))
    plan = replace(plan, idle=idle.ttft)
    return TraceFloor(floors, plan.objective, idle), idle, plan


def _searched(parsed: argparse.Namespace, plan: TrialPlan, floor: int, total: int) -> PlanSearch:
    from pdserve.sim.capacity.search import PlanSearch
    from pdserve.sim.capacity.trial_pool import TrialPool

    processes = min(parsed.processes or _cores(), _cores()) if total >= _SMALL else 1
    search = PlanSearch(
        floor=min(floor, parsed.most_workers),
        most=parsed.most_workers,
        seeds=parsed.seeds,
        width=processes,
        modes=parsed.modes,
    )
    progress = _PlanProgress(search)
    with TrialPool(plan, processes, progress.draw) as pool:
        for cells in search.steps():
            search.known.update(pool.run(cells))
    progress.close()
    return search


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _PlanProgress:
    """One progress line on a terminal's standard error; a line at the end elsewhere."""

    def __init__(self, search: PlanSearch) -> None:
        self._search = search
        self._begin = time.monotonic()
        self._shown = sys.stderr.isatty()
        self._next = 0.0
        self._requests = 0

    def draw(self, running: Sequence[PlanCell], requests: int) -> None:
        """Shows the clusters that are replayed now, if it is time."""
        self._requests = requests
        if self._shown and (now := time.monotonic()) >= self._next:
            self._next = now + _DRAW_EVERY
            names = "; ".join(f"{cell.shape}, seed {cell.seed}" for cell in running)
            sys.stderr.write(f"\r{self._line()}, now {names}\x1b[K")
            sys.stderr.flush()

    def close(self) -> None:
        """Prints the final state, below the line if there was one."""
        before = "\r\x1b[K" if self._shown else ""
        sys.stderr.write(f"{before}{self._line()}\n")

    def _line(self) -> str:
        took = time.monotonic() - self._begin
        return f"{len(self._search.known)} replays, {self._requests} requests in {took:.0f} s"

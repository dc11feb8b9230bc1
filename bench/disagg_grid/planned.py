"""Does a planner that switches modes find the better side? `python bench/disagg.py --planner`.

Each cell begins at its ratio and is replayed for twenty minutes of virtual time, of which the first
ten do not count: there the planner may settle. Beside it both sides with the same requests:
aggregated workers, and `always` at the cell's ratio. Where `always` serves less than half as many
requests well as aggregated workers do in a replay of 200 seconds, of which the first 100 do not
count, that is its figure (in brackets): it drowns, and longer replays only make that worse.

The fixed ratio with the decode workers' choice (`predict`), without a planner, comes from a replay
of 200 seconds, too. The same cells with 400 requests are in [disagg.md](disagg.md).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from statistics import median
from typing import TYPE_CHECKING, Final

from bench.disagg_grid.cells import KINDS, Arm, Scale, World
from bench.disagg_grid.report import dig, rate_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from bench.disagg_grid.runner import Job, Result

    Ask = Callable[[Scale, Sequence[Job]], list[Result] | None]
    """Replays jobs at a scale; None: it may not any more."""

__all__ = ["LONG", "SHORT", "CellResults", "PlannedCell", "cells", "planned_page", "results_of"]

LONG: Final = Scale(seeds=1, seconds=1200.0, warm_up=600.0)
SHORT: Final = replace(LONG, seconds=200.0, warm_up=100.0)
_NEAR: Final = 0.95
_AIM: Final = 0.95
_DROWNED: Final = 0.5
"""Part of what aggregated workers serve well below which `always` drowns."""


@dataclass(frozen=True, slots=True)
class PlannedCell:
    """One world, and the ratio at which it begins."""

    world: World
    prefill: int
    workers: int

    def arm(self, side: str) -> Arm:
        """The cluster of one side."""
        if side == "aggregated":
            return Arm(workers=self.workers)
        split = Arm(0, self.prefill, self.workers - self.prefill, "predict")
        if side == "always":
            return replace(split, disagg="always")
        return replace(split, planned=side == "planned")

    @property
    def words(self) -> str:
        """The cell in a line of text."""
        ratio = f"{self.prefill}:{self.workers - self.prefill}"
        world = self.world
        return f"{world.kind.preset}, {rate_of(world)}, load {world.load:g}, {ratio}"


def cells(scale: Scale) -> list[PlannedCell]:
    """The cells of the page of bench/disagg.py. Any first part of the list is spread over ratios,
    loads and networks; the slower model comes first, it has fewer requests."""
    grid = product(scale.loads, scale.prefills)
    places = sorted(grid, key=lambda one: _place(scale, *one))
    return [
        PlannedCell(World(kind, load, _bandwidth(scale, number, half)), prefill, scale.workers)
        for half, kind in product((0, 1), reversed(KINDS))
        for number, (load, prefill) in enumerate(places)
    ]


def _place(scale: Scale, load: float, prefill: int) -> int:
    """Goes along the diagonals of (load, ratio): neighbours differ in both."""
    loads, ratios = len(scale.loads), len(scale.prefills)
    number, ratio = scale.loads.index(load), scale.prefills.index(prefill)
    return (number - ratio) % loads * ratios + ratio


def _bandwidth(scale: Scale, number: int, half: int) -> float:
    """The network changes at every second place, so that each load and ratio has both; the second
    half has the other one at each place."""
    return scale.bandwidths[((number + 1) // 2 + half) % len(scale.bandwidths)]


@dataclass(frozen=True, slots=True)
class CellResults:
    """The replays of one cell."""

    aggregated: Result
    always: Result
    predict: Result
    planned: Result
    drowned: bool = False
    """True if `always` is from a short replay."""


def results_of(cell: PlannedCell, knees: Mapping[str, float], ask: Ask) -> CellResults | None:
    """Replay what the cell needs; None: not all of it was replayed."""
    always, predict = _job(cell, "always", knees), _job(cell, "predict", knees)
    short = ask(SHORT, [always, predict])
    long = ask(LONG, [_job(cell, "aggregated", knees), _job(cell, "planned", knees)])
    if short is None or long is None:
        return None
    found = CellResults(long[0], short[0], short[1], long[1], drowned=True)
    if _good(found.always) < _DROWNED * _good(found.aggregated):
        return found
    whole = ask(LONG, [always])
    return replace(found, always=whole[0], drowned=False) if whole else None


def _job(cell: PlannedCell, side: str, knees: Mapping[str, float]) -> Job:
    knee = knees[cell.world.kind.preset]
    return _world(cell.world, side), cell.arm(side), 1, knee


def _world(world: World, side: str) -> World:
    """Aggregated workers move no KV, so they serve once for all networks."""
    return replace(world, bandwidth=LONG.bandwidths[0]) if side == "aggregated" else world


def _good(result: Result) -> float:
    return dig(result, ["good"])


@dataclass(frozen=True, slots=True)
class _Row:
    cell: PlannedCell
    results: CellResults

    def good(self, side: str) -> float:
        return _good(getattr(self.results, side))

    def share(self, side: str) -> float:
        """Of the better of both sides."""
        better = max(self.good("aggregated"), self.good("always"))
        return self.good(side) / better if better else 1.0

    @property
    def scaling(self) -> Result:
        """The planner's account."""
        found: Result = self.results.planned["scaling"]
        return found

    @property
    def settled(self) -> float:
        """Seconds until the ratio that it kept."""
        return float(self.scaling["ratios"][-1][0])

    @property
    def ratio(self) -> str:
        """The ratio that it kept."""
        return str(self.scaling["ratios"][-1][1])


def planned_page(
    found: Mapping[PlannedCell, CellResults],
    every: Sequence[PlannedCell],
    facts: Sequence[str],
) -> str:
    """The page of the cells that have run, of `every`."""
    rows = [_Row(cell, results) for cell, results in found.items()]
    head = ["# A planner that switches modes, in simulation", "", *_how(), ""]
    head += [*(f"- {fact}" for fact in facts), "", *_verdict(rows, len(every)), ""]
    missing = [cell.words for cell in every if cell not in found]
    return "\n".join([*head, *_table(rows), *_not_run(missing)]) + "\n"


def _not_run(missing: Sequence[str]) -> Iterator[str]:
    if missing:
        yield from ("", "## Cells that did not run", "", *(f"- {words}" for words in missing))


def _how() -> list[str]:
    parts = (__doc__ or "").split("\n\n", 1)
    return ["Repeat with `python bench/disagg.py --planner`.", "", *parts[1].strip().split("\n")]


def _verdict(rows: Sequence[_Row], every: int) -> Iterator[str]:
    near = {side: sum(row.share(side) >= _NEAR for row in rows) for side in ("predict", "planned")}
    yield "## What it says"
    yield ""
    yield f"- {len(rows)} of {every} cells ran."
    if not rows:
        return
    reached = "reached" if near["planned"] >= _AIM * len(rows) else "not reached"
    yield (
        f"- With the planner {near['planned']} of {len(rows)} cells are within {1 - _NEAR:.0%} of "
        f"the better side (aim {_AIM:.0%}; {reached}); at the fixed ratio {near['predict']} are."
    )
    yield (
        f"- The ratio that it kept came after {median(row.settled for row in rows):.0f} s (p50), "
        f"at most {max(row.settled for row in rows):.0f} s."
    )
    for row in rows:
        if row.share("planned") < _NEAR:
            yield f"- Lost: {row.cell.words}: {row.share('planned'):.0%} of the better side."


def _table(rows: Sequence[_Row]) -> Iterator[str]:
    names = ("cell", "aggregated", "always", "predict", "of the better side", "planner")
    yield _line(*names, "of the better side", "ratio that it kept", "after s", "switches")
    yield _line("---", *["---:"] * 9)
    for row in rows:
        yield _line(
            row.cell.words,
            f"{row.good('aggregated'):.1%}",
            f"({row.good('always'):.1%})" if row.results.drowned else f"{row.good('always'):.1%}",
            f"{row.good('predict'):.1%}",
            f"{row.share('predict'):.0%}",
            f"{row.good('planned'):.1%}",
            f"{row.share('planned'):.0%}",
            row.ratio,
            f"{row.settled:.0f}",
            f"{len(row.scaling['switches'])}",
        )


def _line(*values: str) -> str:
    return f"| {' | '.join(values)} |"

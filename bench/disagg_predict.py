"""Does `predict` ever serve fewer requests well than `rule`? Production code, simulated engines.

    python bench/disagg_predict.py [--seeds 8] [--only TEXT]... [--data FILE]

Both choices of a decode worker over the cells of `bench/disagg.py`, seed by seed with the same
requests. Prints a row for each cell. *Noise* is two standard errors of the paired difference, or
one point of a hundred if that is more. `--only` takes the cells whose words contain the text, as in
`25 GB/s, load 1, 6:2`.

Each finished replay is a line of `--data`, so that an interrupted run goes on.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import mean, stdev
from typing import TYPE_CHECKING, Final, Literal

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.disagg_grid.cells import KINDS, Arm, Scale, World
from bench.disagg_grid.report import rate_of
from bench.disagg_grid.runner import Runner

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

KNEES: Final = {"h100-8b": 33.64, "h100-70b-tp4": 16.0}
"""Requests per second at load 1, as `bench/disagg.py` has found them."""
CHOICES: Final[tuple[Literal["predict", "rule"], ...]] = ("predict", "rule")
_LEAST: Final = 0.01
"""A difference below it is noise, however little seeds differ."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One cluster at one load."""

    world: World
    prefill: int
    decode: int

    @property
    def words(self) -> str:
        world, ratio = self.world, f"{self.prefill}:{self.decode}"
        return f"{world.kind.preset}, {rate_of(world)}, load {world.load:g}, {ratio}"

    def jobs(
        self, choice: Literal["predict", "rule"], seeds: int
    ) -> list[tuple[World, Arm, int, float]]:
        """The replays of one choice, in order of seeds."""
        arm, rate = Arm(0, self.prefill, self.decode, choice), KNEES[self.world.kind.preset]
        return [(self.world, arm, seed, rate) for seed in range(1, seeds + 1)]


@dataclass(frozen=True, slots=True)
class Pair:
    """Shares of good requests in one cell, by seed."""

    predict: Sequence[float]
    rule: Sequence[float]

    @property
    def points(self) -> list[float]:
        """What `predict` gains, by seed."""
        return [one - other for one, other in zip(self.predict, self.rule, strict=True)]

    @property
    def noise(self) -> float:
        """The least difference that is none by chance."""
        points = self.points
        error = stdev(points) / len(points) ** 0.5 if len(points) > 1 else 1.0
        return max(_LEAST, 2 * error)

    @property
    def verdict(self) -> str:
        """`more`, `fewer`, or `within noise`: what `predict` serves well."""
        gain = mean(self.points)
        if abs(gain) <= self.noise:
            return "within noise"
        return "more" if gain > 0 else "fewer"


def cells(scale: Scale) -> Iterator[Cell]:
    """All cells, one preset and network after the other."""
    worlds = product(KINDS, scale.loads, scale.bandwidths, scale.prefills)
    for kind, load, bandwidth, prefill in worlds:
        yield Cell(World(kind, load, bandwidth), prefill, scale.workers - prefill)


def row(cell: Cell, pair: Pair) -> str:
    """One line of the table."""
    world, points = cell.world, pair.points
    columns = (
        world.kind.preset,
        rate_of(world),
        f"{world.load:g}",
        f"{cell.prefill}:{cell.decode}",
        f"{mean(pair.predict):.1%}",
        f"{mean(pair.rule):.1%}",
        f"{100 * mean(points):+.1f}",
        f"{100 * pair.noise:.1f}",
        f"{100 * min(points):+.1f} to {100 * max(points):+.1f}",
        pair.verdict,
    )
    return f"| {' | '.join(columns)} |"


def _is_wanted(cell: Cell, words: Sequence[str]) -> bool:
    return not words or any(one in cell.words for one in words)


_HEAD: Final = (
    "| preset | network | load | P:D | predict | rule | points | noise | of single seeds | "
    "predict serves |\n| --- | ---: | ---: | --- | ---: | ---: | ---: | ---: | ---: | --- |"
)


def main() -> int:
    """Runs what is missing and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--seeds", type=int, default=8)
    text = "cells whose words contain this; may be repeated"
    parser.add_argument("--only", action="append", default=[], help=text)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--data", type=Path, default=Path("build/disagg_predict.jsonl"))
    options = parser.parse_args()
    scale = replace(Scale(), seeds=options.seeds)
    chosen = [cell for cell in cells(scale) if _is_wanted(cell, options.only)]
    runner = Runner(scale, options.data, options.processes)
    try:
        runner.run([job for c in chosen for one in CHOICES for job in c.jobs(one, scale.seeds)])
        print(_HEAD)
        for cell in chosen:
            good = (
                [result["good"] for result in runner.run(cell.jobs(one, scale.seeds))]
                for one in CHOICES
            )
            print(row(cell, Pair(*good)))
    finally:
        runner.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())

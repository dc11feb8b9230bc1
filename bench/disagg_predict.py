"""Does `predict` ever serve fewer requests well than `rule`? Production code, simulated engines.

    python bench/disagg_predict.py [--seeds 8] [--only TEXT]... [--data FILE] [--write PAGE]

The cells are those of `bench/disagg.py`: eight workers, chats of 300 tokens, a fifth of prompts of
12,000 tokens, 400 requests a replay. Both choices of a decode worker serve the same requests, seed
by seed. A decode worker begins with the rate that its paths have when they are made, and with
nothing else learnt.

*Points*: good requests with `predict` less those with `rule`, in percent of all requests. *Noise*:
two standard errors of the paired difference, or one point if that is more. The question is where
`predict` serves fewer, so a cell in which it serves more with three seeds gets no further ones.
Among 48 equal cells one would seem worse by chance. So a cell in which it serves fewer gets as many
seeds again, and counts with all of them.

`--only` takes the cells whose words contain the text, as in `25 GB/s, load 1, 6:2`. Each finished
replay is a line of `--data`, so that an interrupted run goes on.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from dataclasses import dataclass, replace
from itertools import product
from math import inf
from pathlib import Path
from statistics import mean, stdev
from typing import TYPE_CHECKING, Final, Literal

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.disagg_grid.cells import KINDS, Arm, Scale, World
from bench.disagg_grid.report import rate_of
from bench.disagg_grid.runner import Runner
from bench.machine import facts

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from bench.disagg_grid.runner import Job

KNEES: Final = {"h100-8b": 33.64, "h100-70b-tp4": 16.0}
"""Requests per second at load 1, as `bench/disagg.py` has found them."""
CHOICES: Final[tuple[Literal["predict", "rule"], ...]] = ("predict", "rule")
_LEAST: Final = 0.01
"""A difference below it is noise, however little seeds differ."""
_FIRST: Final = 3
"""Seeds with which every cell begins; with fewer there is no verdict."""
_WHY: Final = (
    "**Why, in overload over 10 GbE.** The network carries less than one long prompt a second into "
    "a decode worker, and more come. `rule` sends them away while at most ten wait. Each of them "
    "is late (TTFT 6 to 36 s, p90), but more of the chats keep their pace. `predict` computes a "
    "prompt here if that brings its first token sooner (1 to 15 s), and the streams there "
    "stutter. What `rule` gains shrinks with time: after 400 requests most of its long prompts are "
    "still on their way. Then decode workers have no room for more, and compute them here, too. "
    "With 1,600 requests (`--requests 1600`, only the second seed) `predict` and `rule` serve 15% "
    "and 15% well in place of 30% and 48% (h100-8b, load 1.5, 4:4), 18% and 12% in place of 21% "
    "and 46% (h100-70b-tp4, load 1.5, 4:4), and 2% and 8% in place of 12% and 31% (h100-8b, "
    "load 1, 6:2). Aggregated workers serve 81% to 93% well at these loads "
    "([disagg.md](disagg.md)), so the remedy is another ratio and not another choice."
)


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

    def job(self, choice: Literal["predict", "rule"], seed: int) -> Job:
        """The replay of one choice with this seed."""
        arm, rate = Arm(0, self.prefill, self.decode, choice), KNEES[self.world.kind.preset]
        return self.world, arm, seed, rate


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
        """`more`, `fewer`, or `within noise`: what `predict` serves well. `?`: too few seeds."""
        if len(self.points) < _FIRST:
            return "?"
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
        f"{len(points)}",
        f"{mean(pair.predict):.1%}",
        f"{mean(pair.rule):.1%}",
        f"{100 * mean(points):+.1f}",
        "-" if pair.verdict == "?" else f"{100 * pair.noise:.1f}",
        f"{100 * min(points):+.1f} to {100 * max(points):+.1f}",
        pair.verdict,
    )
    return f"| {' | '.join(columns)} |"


def page(found: Mapping[Cell, Pair], every: int, facts: Sequence[str]) -> str:
    """The page of the cells that ran, of `every`."""
    how = (__doc__ or "").split("\n\n")[2:-1]
    lines = ["# `predict` against `rule`, in simulation", "", _REPEAT, ""]
    lines += [*"\n\n".join(how).split("\n"), "", *(f"- {fact}" for fact in facts), ""]
    lines += ["## What it says", "", *_verdict(found, every), "", "## All cells", "", _HEAD]
    return "\n".join([*lines, *(row(cell, pair) for cell, pair in found.items())]) + "\n"


def _verdict(found: Mapping[Cell, Pair], every: int) -> Iterator[str]:
    counts = Counter(pair.verdict for pair in found.values())
    points = [mean(pair.points) for pair in found.values()]
    yield (
        f"- {len(found)} of {every} cells ran. `predict` serves more requests well than `rule` in "
        f"{counts['more']} of them, fewer in {counts['fewer']}, and as many, within noise, in "
        f"{counts['within noise']}."
    )
    if counts["?"]:
        yield f"- {counts['?']} cells have fewer than {_FIRST} seeds yet, and no verdict."
    yield (
        f"- By cell, it gains {100 * min(points):+.1f} to {100 * max(points):+.1f} points, "
        f"{100 * mean(points):+.1f} on average."
    )
    for cell, pair in found.items():
        if pair.verdict == "fewer":
            yield (
                f"- Fewer: {cell.words}: {100 * mean(pair.points):+.1f} points, with noise of "
                f"{100 * pair.noise:.1f} over {len(pair.points)} seeds."
            )
    if counts["fewer"]:
        yield "- So `rule` stays the default of `--disagg`."
        yield from ("", _WHY)


def _is_wanted(cell: Cell, words: Sequence[str]) -> bool:
    return not words or any(one in cell.words for one in words)


_REPEAT: Final = "Repeat with `python bench/disagg_predict.py`; `--only` takes some of the cells."
_HEAD: Final = (
    "| preset | network | load | P:D | seeds | predict | rule | points | noise | of single seeds | "
    "predict serves |\n"
    "| --- | ---: | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: | --- |"
)


def main() -> int:
    """Runs what is missing, prints the page and writes it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--seeds", type=int, default=8)
    text = "cells whose words contain this; may be repeated"
    parser.add_argument("--only", action="append", default=[], help=text)
    parser.add_argument("--requests", type=int, default=Scale().requests, help="of each replay")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--data", type=Path, default=Path("build/disagg_predict.jsonl"))
    text = "begin no seed after so many minutes of CPU; results in --data count"
    parser.add_argument("--minutes", type=float, default=inf, help=text)
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    every = list(cells(Scale()))
    chosen = [cell for cell in every if _is_wanted(cell, options.only)]
    if not chosen:
        parser.error(f"no cell has these words; one is {every[0].words!r}")
    scale = replace(Scale(), requests=options.requests)
    runner = Runner(scale, options.data, options.processes)
    try:
        found = compare(runner, chosen, options.seeds, 60 * options.minutes)
    finally:
        runner.close()
    text = page(found, len(every), [*facts(), *_world(runner)])
    print(text)
    if options.write:
        options.write.write_text(text, encoding="utf-8")
    return 0


def compare(
    runner: Runner, chosen: Sequence[Cell], seeds: int, seconds: float = inf
) -> dict[Cell, Pair]:
    """Both choices in these cells, each with as many seeds as its verdict needs. No seed begins
    after so many seconds of process time; cells without a result are left out."""
    found = _measure(runner, chosen, min(_FIRST, seeds), seconds)
    unsettled = [cell for cell, pair in found.items() if pair.verdict != "more"]
    found |= _measure(runner, unsettled, seeds, seconds)
    fewer = [cell for cell, pair in found.items() if pair.verdict == "fewer"]
    return found | _measure(runner, fewer, 2 * seeds, seconds)


def _measure(
    runner: Runner, chosen: Sequence[Cell], seeds: int, seconds: float
) -> dict[Cell, Pair]:
    for seed in range(1, seeds + 1):
        if runner.seconds < seconds:
            runner.run([cell.job(one, seed) for cell in chosen for one in CHOICES])
    pairs = {cell: _pair(runner, cell, seeds) for cell in chosen}
    return {cell: pair for cell, pair in pairs.items() if pair.rule}


def _pair(runner: Runner, cell: Cell, seeds: int) -> Pair:
    """The seeds that ran with both choices."""
    predict, rule = [], []
    for seed in range(1, seeds + 1):
        results = runner.known([cell.job(one, seed) for one in CHOICES])
        if results is not None:
            predict.append(results[0]["good"])
            rule.append(results[1]["good"])
    return Pair(predict, rule)


def _world(runner: Runner) -> list[str]:
    knees = ", ".join(f"{rate:g}/s with {name}" for name, rate in KNEES.items())
    return [f"load 1: {knees}", f"{runner.seconds / 60:.0f} minutes of CPU"]


if __name__ == "__main__":
    sys.exit(main())

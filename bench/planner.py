"""Does the planner keep an objective at less cost than other rules? Production code, virtual time.

    python bench/planner.py [--quick | --all | --page] [--processes 2] [--data FILE] [--write PAGE]

Each arm decides how many aggregated workers there are, over the same virtual actuator: a start
takes as long for each, a worker that leaves drains by the production order, and what was booked is
paid from the boot to the end. pdserve's arm is the production planner. Kubernetes' HPA, KEDA,
AIBrix's KPA and APA, llm-d's saturation rule and Dynamo's load-based rule are small functions
written from their documentation and from notes; their own code did not run. *Clairvoyant* knows the
trace and has what a what-if of the next requests asks for. *Static* arms have one size; the best by
hindsight is the smallest within half a point of any larger one.

Loads mix chats of 300 tokens with a share of prompts of 12,000 (bench/disagg.py). A request is good
if its first token and its mean time between tokens kept the objective.

Each finished replay is a line of `--data`, so that an interrupted run goes on. The page shows what
has run, and lists what has not.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.machine import facts
from bench.pages import kept
from bench.planner_arms.cells import ARMS, Cell
from bench.planner_arms.loads import LOADS
from bench.planner_arms.report import page
from bench.planner_arms.runner import Results

FIRST: Final = ("step", "ramp", "length shift")
"""Loads that run without `--all`."""
_OTHER_STARTS: Final = (10.0, 300.0)
_AT_ALL_STARTS: Final = ("pdserve", "HPA 70%", "Dynamo (rewritten)", "clairvoyant")
_SEEDS: Final = (1, 2, 3)
_NOTES: Final = "## Notes"


def planned() -> list[Cell]:
    """All cells: every arm at 60 s; some arms at other start-ups; three seeds of the day."""
    found = []
    for name in LOADS:
        for seed in _SEEDS if name == "day" else _SEEDS[:1]:
            static = [f"static {size}" for size in LOADS[name].sizes]
            found += [Cell(load=name, arm=arm, seed=seed) for arm in (*ARMS, *static)]
        found += [
            Cell(load=name, arm=arm, start_up=start_up)
            for start_up in _OTHER_STARTS
            for arm in _AT_ALL_STARTS
        ]
    return found


def chosen(options: argparse.Namespace) -> list[Cell]:
    """The cells that are to run."""
    if options.quick:
        return [Cell(load="step", arm=arm, limit=150.0) for arm in (*ARMS, "static 2")]
    if options.all:
        return planned()
    return [cell for cell in planned() if cell.load in FIRST and cell.start_up == 60.0]


def main() -> int:
    """Runs what is missing and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--quick", action="store_true", help="150 s of one load, all arms")
    parser.add_argument("--all", action="store_true", help="all loads and start-ups, for hours")
    parser.add_argument("--page", action="store_true", help="run nothing, show what has run")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--data", type=Path, default=Path("build/planner.jsonl"))
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    cells = chosen(options)
    results = Results(options.data)
    if not options.page:
        results.run(cells, options.processes)
    every = cells if options.quick else planned()
    minutes = results.cpu(every) / 60
    text = page(
        results.known(every),
        every,
        [*facts(), f"{minutes:.0f} minutes of CPU, which do not show in simulated time"],
        _how(options),
    )
    if options.write:
        text += kept(options.write, _NOTES)
        options.write.write_text(text, encoding="utf-8")
    print(text)
    return 0


def _how(options: argparse.Namespace) -> list[str]:
    words = "".join(f" --{name}" for name in ("quick", "all") if getattr(options, name))
    parts = __doc__.split("\n\n")
    return [
        f"Repeat with `python bench/planner.py{words}`.",
        "",
        *"\n\n".join(parts[2:-1]).strip().split("\n"),
    ]


if __name__ == "__main__":
    sys.exit(main())

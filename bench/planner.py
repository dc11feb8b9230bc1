"""Does the planner keep an objective at less cost than other rules? Production code, virtual time.

    python bench/planner.py [--quick | --loads NAME,NAME] [--trace FILE] [--code FILE]
                            [--page] [--processes 2] [--data FILE] [--write PAGE]

Each arm decides how many aggregated workers there are, over the same virtual actuator: a start
takes as long for each, a worker that leaves drains by the production order, and what was booked is
paid from the boot to the end. pdserve's arm is the production planner. Kubernetes' HPA, KEDA,
AIBrix's KPA and APA, llm-d's saturation rule and Dynamo's load-based rule are small functions
written from their documentation and from notes; their own code did not run, nor was Dynamo's wheel
tried. Dynamo's rule adds a worker if any one is over, which is sooner than its target `sla` does.
*Clairvoyant* knows the trace and has what a what-if of the next requests asks for. *pdserve 90%* is
the same planner with a looser objective: rules that know none miss more requests, and so cost less.
*Static* arms have one size; the best by hindsight is the smallest within half a point of any larger
one.

Made loads mix chats of 300 tokens with a share of prompts of 12,000 (bench/disagg.py). A request is
good if its first token and its mean time between tokens kept the objective. Under *mode shift* the
workers are prefill and decode workers, their number is fixed, and pdserve switches modes; static
arms are all ratios, and as many aggregated workers beside them.

Start-ups of 60 s, and of 10 s and 300 s for some arms. Each finished replay is a line of `--data`,
so that an interrupted run goes on. The page shows what has run, and lists what has not.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.machine import facts
from bench.pages import kept
from bench.planner_arms.cells import ARMS, PLANNERS, Cell
from bench.planner_arms.loads import LOADS, STEADY, load_of
from bench.planner_arms.report import page
from bench.planner_arms.runner import Results

if TYPE_CHECKING:
    from collections.abc import Iterator

_OTHER_STARTS: Final = (10.0, 300.0)
_COMPARED: Final = (*PLANNERS, "HPA 70%", "Dynamo (rewritten)", "clairvoyant")
"""Arms that run at all start-ups, and with more than one seed."""
_SEEDS: Final = (1, 2, 3)
_NOTES: Final = "## Notes"


def planned() -> list[Cell]:
    """All cells, what matters most first: constant loads, every arm at 60 s, other start-ups, other
    seeds."""
    found = [Cell(load=name, arm=arm) for name in STEADY for arm in load_of(name).statics]
    found += [Cell(load=name, arm=arm) for name in LOADS for arm in _arms(name)]
    scaled = [name for name in LOADS if load_of(name).split is None]
    found += [
        Cell(load=name, arm=arm, start_up=start_up)
        for name in scaled
        for start_up in _OTHER_STARTS
        for arm in _COMPARED
    ]
    return found + list(_seeded())


def _arms(name: str) -> tuple[str, ...]:
    load = load_of(name)
    return (*load.statics, *(("pdserve",) if load.split else ARMS))


def _seeded() -> Iterator[Cell]:
    """More seeds, of made loads only: a trace has its own arrivals."""
    for name, load in LOADS.items():
        if load.part is None:
            arms = ("pdserve",) if load.split else _COMPARED
            for seed in _SEEDS[1:]:
                yield from (Cell(load=name, arm=arm, seed=seed) for arm in (*load.statics, *arms))


def chosen(options: argparse.Namespace) -> list[Cell]:
    """The cells that are to run."""
    if options.quick:
        return [Cell(load="step", arm=arm, limit=150.0) for arm in (*ARMS, "static 2")]
    names = options.loads.split(",") if options.loads else [*LOADS, *STEADY]
    return [cell for cell in planned() if cell.load in names]


def main() -> int:
    """Runs what is missing and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--quick", action="store_true", help="150 s of one load, all arms")
    parser.add_argument("--loads", default="", help="names, with commas; all by default")
    parser.add_argument("--arms", default="", help="run these only; names, with commas")
    parser.add_argument("--seeds", type=int, default=len(_SEEDS), help="run only the first ones")
    parser.add_argument("--trace", type=Path, help="conversation_trace.jsonl of Mooncake")
    parser.add_argument("--code", type=Path, help="AzureLLMInferenceTrace_code.csv")
    parser.add_argument("--page", action="store_true", help="run nothing, show what has run")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--data", type=Path, default=Path("build/planner.jsonl"))
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    files = {"conversation": options.trace, "code": options.code}
    results = Results(options.data, {name: file for name, file in files.items() if file})
    cells = chosen(options)
    if not options.page:
        results.run([cell for cell in cells if _is_asked(cell, options)], options.processes)
    every = cells if options.quick else planned()
    text = page(results.known(every), every, [*facts(), *_made(results, every)], _how(options))
    if options.write:
        text += kept(options.write, _NOTES)
        options.write.write_text(text, encoding="utf-8")
    print(text)
    return 0


def _is_asked(cell: Cell, options: argparse.Namespace) -> bool:
    arms = options.arms.split(",") if options.arms else [cell.arm]
    return cell.arm in arms and cell.seed <= options.seeds


def _made(results: Results, cells: list[Cell]) -> Iterator[str]:
    """With which commits, and in which time."""
    for commit, count in results.commits(cells).items():
        yield f"{count} replays at {commit[:1].lower()}{commit[1:]}"
    yield f"{results.cpu(cells) / 60:.0f} minutes of CPU, which do not show in simulated time"


def _how(options: argparse.Namespace) -> list[str]:
    quick = " --quick" if options.quick else ""
    files = "" if options.quick else " --trace FILE --code FILE"
    parts = __doc__.split("\n\n")
    return [
        f"Repeat with `python bench/planner.py{quick}{files}`.",
        "",
        *"\n\n".join(parts[2:-1]).strip().split("\n"),
    ]


if __name__ == "__main__":
    sys.exit(main())

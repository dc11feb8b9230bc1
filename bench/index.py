"""The router's index: its two trees against Dynamo's radix tree, and hashing against Dynamo's.

    python bench/index.py                                    # the two trees of pdserve
    python bench/index.py --dynamo PYTHON --rounds 7 --write bench/results/index.md

PYTHON is the interpreter of a separate virtual environment in which `pip install ai-dynamo-runtime`
has run. Every arm is a process, all on one processor, and they take turns: in a round each arm
measures all figures. Figures are medians of the rounds with ranges. Ratios are medians of those
within a round, so that other work slows both sides. Memory is measured in fresh processes. Nothing
passes or fails.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.machine import facts
from pdserve import accel

ROOT = Path(__file__).parent.parent
OURS, PURE, DYNAMO = "pdserve", "pure", "Dynamo"

ABOUT = """\
1,000 workers hold 1,000 blocks each: all share the first 500, then there are ten variants.
*Branching*: 400 chains that leave each other anywhere; each of 1,000 workers holds 300 to 1,000
blocks of one, and events of all workers are mixed. Each tree is a process of its own, all on one
processor; they took turns for {rounds} rounds. Medians and ranges; ratios are medians of those
within a round. A walk answers in the form that is cheapest to make: u32 by worker slot
(`match_into`), Dynamo's score object; then as a dict by worker. Dynamo's events are JSON, as its
binding takes them, and reading that is part of its figure. Repeat with `python bench/index.py`.

Routers ask with a dict by worker, so the rows with a dict are what production does, and the aims
judge those. `match_into` is called by this benchmark and by tests only. Within the clock Dynamo's
arm converts a Python list of ints, as its walk that finds nothing shows; pdserve's ids are packed
before. Rates of events are against reading JSON, which is what Dynamo's binding takes."""

FIGURES = {
    "match 1000": ("walk, 1,000 deep, 1,000 workers, p50", "us", 1.0),
    "match 1000 p99": ("the same, p99", "us", 1.0),
    "dict": ("the same with a dict by worker, p50", "us", 1.0),
    "dict p99": ("the same, p99", "us", 1.0),
    "match 500": ("walk, 500 deep, p50", "us", 1.0),
    "match 64": ("walk, 64 deep, p50", "us", 1.0),
    "miss": ("walk of 1,000 that no worker has, p50", "us", 1.0),
    "decision": ("256 workers, 128 k tokens, dict, p50", "us", 1.0),
    "decision p99": ("the same, p99", "us", 1.0),
    "branching": ("branching: walk, p50", "us", 1.0),
    "branching p99": ("the same, p99", "us", 1.0),
    "branching dict": ("branching: walk with a dict by worker, p50", "us", 1.0),
    "branching dict p99": ("the same, p99", "us", 1.0),
    "events": ("stored, 64 to an event, worker-blocks", "M/s", 1e-6),
    "single events": ("stored, one to an event", "M/s", 1e-6),
    "unique events": ("stored, 64 to an event, blocks no worker has", "M/s", 1e-6),
    "branching events": ("branching: stored, 64 to an event", "M/s", 1e-6),
    "removed events": ("removed, 64 to an event, last first", "M/s", 1e-6),
    "remove worker": ("remove a worker of 1,000 blocks", "us", 1.0),
    "shared grown": ("memory per shared worker-block, resident", "B", 1.0),
    "shared counted": ("the same by its own counters", "B", 1.0),
    "unique grown": ("memory per block that one worker has, resident", "B", 1.0),
    "unique counted": ("the same by its own counters", "B", 1.0),
    "branching grown": ("branching: memory per worker-block, resident", "B", 1.0),
    "branching counted": ("the same by its own counters", "B", 1.0),
    "hash 4096/16": ("hash 4 k tokens in blocks of 16", "Mtok/s", 1e-6),
    "hash 65536/64": ("hash 64 k tokens in blocks of 64", "Mtok/s", 1e-6),
    "hash 131072/32": ("hash 128 k tokens in blocks of 32", "Mtok/s", 1e-6),
}
"""Name → what it is, its unit and the factor to that."""

AIMS = (
    ("walk, 1,000 deep, 1,000 workers, dict: times as fast as Dynamo", "dict", 2.0),
    ("events: times Dynamo's rate", "events", 2.0),
    ("branching: walk, dict, times as fast as Dynamo", "branching dict", 2.0),
    ("branching: events, times Dynamo's rate", "branching events", 2.0),
    ("memory per shared worker-block: Dynamo's, times ours", "shared grown", 2.0),
    ("hashing 64 k tokens: of Dynamo's rate, though keyed", "hash 65536/64", 1.0),
    ("hashing 128 k tokens: of Dynamo's rate, though keyed", "hash 131072/32", 1.0),
)
"""In production's form: see `ABOUT`."""
LIMITS = (
    ("256 workers, 128 k tokens: the walk's p99, us", "decision p99", 1000.0),
    ("walk, 1,000 deep, 1,000 workers, dict, p50, us", "dict", 31.0),
    ("memory per shared worker-block, B", "shared grown", 18.0),
)


class Process:
    """An arm in its own process, which measures on command."""

    def __init__(self, name: str, python: str, processor: int | None) -> None:
        self.name = name
        self.command = [python, "-m", "bench.index_arms.serve", name]
        if processor is not None:
            self.command.append(str(processor))
        self.figures: dict[str, list[float]] = {}

    def start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def ask(self, process: subprocess.Popen[str], command: str) -> dict[str, float]:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(command + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name}: its process ended; is its package installed there?")
        found: dict[str, float] = json.loads(line)
        return found

    def memory(self) -> None:
        """Measures memory in fresh processes, so that no freed memory is reused."""
        for kind in ("shared", "unique", "branching"):
            with self.start() as process:
                found = self.ask(process, f"memory {kind}")
                assert process.stdin is not None
                process.stdin.close()
            for name, value in found.items():
                self.add(f"{kind} {name}", value)

    def add(self, name: str, value: float) -> None:
        self.figures.setdefault(name, []).append(value)


def measure(arms: list[Process], rounds: int) -> None:
    with ExitStack() as stack:
        running = [(arm, stack.enter_context(arm.start())) for arm in arms]
        for number in range(rounds):
            first = number % len(running)
            for arm, process in running[first:] + running[:first]:
                for name, value in arm.ask(process, "round").items():
                    arm.add(name, value)
            print(f"round {number + 1} of {rounds}", file=sys.stderr)
        for _, process in running:
            assert process.stdin is not None
            process.stdin.close()
    for _ in range(min(rounds, 3)):
        for arm in arms:
            arm.memory()


def shown(values: list[float] | None, factor: float) -> str:
    if values is None:
        return ""
    cells = [
        f"{factor * value:,.{1 if factor * value >= 10 else 2}f}" for value in quantiles(values)
    ]
    return f"{cells[1]} [{cells[0]}, {cells[2]}]"


def quantiles(values: list[float]) -> tuple[float, float, float]:
    return min(values), statistics.median(values), max(values)


def better(ours: Process, other: Process, name: str) -> float:
    """Returns how many times better pdserve is: the median of the rounds' ratios."""
    ratios = [a / b for a, b in zip(ours.figures[name], other.figures[name], strict=True)]
    ratio = statistics.median(ratios)
    return ratio if FIGURES[name][1].endswith("/s") else 1 / max(ratio, 1e-9)


def table(arms: list[Process]) -> list[str]:
    lines = ["| what | " + " | ".join(arm.name for arm in arms) + " |"]
    lines.append("|---|" + "---:|" * len(arms))
    for name, (title, unit, factor) in FIGURES.items():
        cells = [shown(arm.figures.get(name), factor) for arm in arms]
        lines.append(f"| {title}, {unit} | " + " | ".join(cells) + " |")
    return lines


def aims(ours: Process, dynamo: Process | None) -> list[str]:
    lines = ["| aim | wanted | measured | |", "|---|---:|---:|---|"]
    for title, name, bound in AIMS:
        if dynamo is None:
            lines.append(f"| {title} | >= {bound:g} | | NOT measured: no `--dynamo` |")
            continue
        ratio = better(ours, dynamo, name)
        met = "met" if ratio >= bound else "NOT met"
        lines.append(f"| {title} | >= {bound:g} | {ratio:.3g} | {met} |")
    for title, name, bound in LIMITS:
        value = statistics.median(ours.figures[name])
        met = "met" if value <= bound else "NOT met"
        lines.append(f"| {title} | <= {bound:g} | {value:.3g} | {met} |")
    return lines


def report(arms: list[Process], machine: list[str], rounds: int) -> str:
    by_name = {arm.name: arm for arm in arms}
    return "\n".join(
        [
            "# The router's index",
            "",
            ABOUT.format(rounds=rounds),
            "",
            *(f"- {fact}" for fact in machine),
            "",
            *table(arms),
            "",
            *aims(by_name[OURS], by_name.get(DYNAMO)),
            "",
        ]
    )


def version(python: str) -> str:
    code = "from importlib.metadata import version; print(version('ai-dynamo-runtime'))"
    found = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    return found.stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dynamo", metavar="PYTHON", help="interpreter with ai-dynamo-runtime")
    parser.add_argument("--no-pin", action="store_true", help="leave processors to the system")
    parser.add_argument("--note", default="", help="a sentence for the result file")
    parser.add_argument("--write", type=Path, help="also write the report to this file")
    given = parser.parse_args()
    processor = None if given.no_pin else max(os.sched_getaffinity(0))
    arms = [Process(OURS, sys.executable, processor), Process(PURE, sys.executable, processor)]
    machine = [*facts(), accel.describe()]
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    machine.append(f"Load average at the start: {load}")
    if given.dynamo and (found := version(given.dynamo)):
        arms.append(Process(DYNAMO, given.dynamo, processor))
        machine.append(f"ai-dynamo-runtime {found}")
    else:
        machine.append("NOT measured: Dynamo, for want of an interpreter that has it (`--dynamo`)")
    if given.note:
        machine.append(given.note)
    measure(arms, given.rounds)
    text = report(arms, machine, given.rounds)
    print(text)
    if given.write:
        given.write.write_text(text)


if __name__ == "__main__":
    main()

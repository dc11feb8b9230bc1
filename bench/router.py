"""Measures the requests per second of the router role, and the cost of a decision.

    python bench/router.py [--seconds 5] [--decisions 2000]

The first table is about the whole role over the bus: one process is a router, on a core of its own;
another one plays frontends and workers, over TCP on this machine. The second table is about a
router core alone, by policy and size of cluster. If the machine has other work, compare the CPU
times: those of the router's process, and of the thread that decides. Writes
bench/results/router_role.md.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.machine import facts
from bench.router_arms.bus import Bus, Seen, measure
from bench.router_arms.core import CoreArm, policies

RESULT: Final = Path(__file__).parent / "results" / "router_role.md"
RATES: Final = {40: 100.0, 4096: 20.0}
"""Requests per second by blocks of a prompt: a few percent of what is possible."""
SIZES: Final = ((8, 40), (64, 40), (512, 40), (256, 4096))
"""Workers and blocks of a prompt, for the core alone."""


def over_the_bus(seconds: float) -> list[str]:
    """Measures the whole role over the bus; returns the first table."""
    made = [
        "| workers | blocks of a prompt | decisions per second of the router's CPU | us each | "
        "per second of the clock | held | pool events | answer p50, ms | p99, ms |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for workers, blocks in ((16, 40), (16, 4096), (2, 40), (64, 40)):
        seen = measure(Bus(workers=workers, blocks=blocks, rate=RATES[blocks], seconds=seconds))
        made.append(_row(workers, blocks, seen))
        print(made[-1], flush=True)
    return made


def _row(workers: int, blocks: int, seen: Seen) -> str:
    return (
        f"| {workers} | {blocks} | {seen.decisions / seen.cpu:,.0f} | "
        f"{seen.cpu / seen.decisions * 1e6:.0f} | {seen.decisions / seen.wall:,.0f} | "
        f"{seen.held} | {seen.events} | {seen.p50 * 1e3:.2f} | {seen.p99 * 1e3:.2f} |"
    )


def by_function(blocks: int, seconds: float) -> list[str]:
    """Returns a profile's table."""
    bus = Bus(blocks=blocks, rate=RATES[blocks], seconds=seconds, profile=True)
    made = ["| share of the time | calls | function |", "|---:|---:|---|"]
    made += [f"| {share:.1%} | {calls:,} | `{where}` |" for share, calls, where in measure(bus).top]
    print("\n".join(made), flush=True)
    return made


def alone(decisions: int) -> list[str]:
    """Measures the core alone; returns a table with a row for each policy."""
    heads = [f"{workers} x {blocks}" for workers, blocks in SIZES]
    made = [
        f"| policy | {' | '.join(f'{head} p50 | p99' for head in heads)} |",
        f"|---|{'---:|' * (2 * len(SIZES))}",
    ]
    for policy in policies():
        cells = []
        for workers, blocks in SIZES:
            p50, p99 = CoreArm(policy, workers, blocks).measure(decisions)
            cells.append(f"{p50 * 1e6:.0f} | {p99 * 1e6:.0f}")
        made.append(f"| {policy} | {' | '.join(cells)} |")
        print(made[-1], flush=True)
    return made


INTRO: Final = f"""\
## Over the bus

A router in a process pinned to one core; four frontends and all workers in another one, on
another core, over TCP. Default policy. Each request is asked, decided, booked, held by its
worker, started, ended and released; the worker's pool tells what it stores and removes, ten load
reports a second come from each. Of a prompt's blocks (32 tokens) the first half is one of 32
beginnings that others share; a quarter of the prompts come again. 64 requests under way for
throughput; for latency {RATES[40]:.0f} (of 4,096 blocks {RATES[4096]:.0f}) come a second, and both
processes are in the time. Aim: 5,000 decisions per second of a core.
"""
PROFILE: Final = """
Where the time goes, with 16 workers, by functions' own time under `cProfile` (which makes
everything two to three times slower, many small calls most; native code counts with who calls
it). Prompts of 40 blocks:
"""
ALONE: Final = """
## One decision

`RouterCore.offer` alone: index walk, view, policy, booking, prediction of what will be cached; no
decoding, no network. Microseconds of the thread's CPU, of {decisions} decisions, by workers x
blocks of a prompt (4,096 are 131,072 tokens); two requests under way at each worker. Aim: p99
below 1,000 with 256 x 4096.
"""


def page(options: argparse.Namespace) -> list[str]:
    """Returns the lines of the result file."""
    return [
        "# The router role",
        "",
        "Repeat with `python bench/router.py`.",
        "",
        *(f"- {fact}" for fact in facts()),
        *([f"- {options.note}"] if options.note else []),
        "",
        INTRO,
        *over_the_bus(options.seconds),
        PROFILE,
        *by_function(40, options.seconds),
        "",
        "Of 4,096 blocks:",
        "",
        *by_function(4096, options.seconds),
        ALONE.format(decisions=options.decisions),
        *alone(options.decisions),
        "",
    ]


def main() -> None:
    """Measures, prints and writes the results."""
    parser = argparse.ArgumentParser(description="The router role: throughput, latency, costs.")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--decisions", type=int, default=2000)
    parser.add_argument("--note", default="", help="a line about the machine for the page")
    options = parser.parse_args()
    RESULT.write_text("\n".join(page(options)), encoding="utf-8")


if __name__ == "__main__":
    main()

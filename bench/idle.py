"""Measures what idle processes do: wake-ups and CPU time per second, and memory, per process.

    python bench/idle.py [--seconds N] [--rounds N] [--arm NAME] [--write bench/results/idle.md]

Real processes serve the bundled model with the torch engine; each answers one request, then nothing
is asked. A wake-up is a voluntary context switch of any thread, from /proc: a thread that waits and
is woken by a timer or a message makes one. Nothing passes or fails.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.machine import facts
from tests.chaos.cluster import Cluster
from tests.chaos.load import ask

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.chaos.cluster import Node

HERE = Path(__file__).parent
TICKS = os.sysconf("SC_CLK_TCK")
MIB = 1 << 20


@dataclass(frozen=True)
class Reading:
    """Counters of one process."""

    wakeups: int
    seconds: float
    """CPU time."""

    @classmethod
    def of(cls, pid: int) -> Reading:
        """Reads them; threads that end meanwhile are left out."""
        wakeups = 0
        for status in Path(f"/proc/{pid}/task").glob("*/status"):
            with contextlib.suppress(OSError):
                for line in status.read_text().splitlines():
                    if line.startswith("voluntary_ctxt_switches"):
                        wakeups += int(line.split()[1])
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return cls(wakeups, (int(fields[11]) + int(fields[12])) / TICKS)


@dataclass
class Row:
    """What one kind of process did, one value per process and round."""

    wakeups: list[float] = field(default_factory=list)
    percent: list[float] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)


def plain(*flags: str) -> Callable[[Cluster], list[Node]]:
    """One process with all roles."""

    def start(one: Cluster) -> list[Node]:
        return [one.start("all-in-one", "", *flags)]

    return start


def six(one: Cluster) -> list[Node]:
    """A router, a frontend, two prefill and two decode workers."""
    router = one.start("router", "router-1", "--listen", "127.0.0.1:0")
    seed = router.wait_for_line(r"router-1 at (127\.[0-9.:]+)")[1]
    workers = [
        one.start("worker", f"{mode}-{number}", "--mode", mode, "--join", seed)
        for mode in ("prefill", "decode")
        for number in (1, 2)
    ]
    frontend = one.start("frontend", "frontend-1", "--join", seed)
    return [frontend, router, *workers]


ARMS: dict[str, Callable[[Cluster], list[Node]]] = {
    "plain `pdserve`": plain(),
    "`pdserve --aggregated`": plain("--aggregated"),
    "a cluster of six": six,
}


@contextlib.contextmanager
def cluster() -> Iterator[Cluster]:
    """A cluster that is not checked when it ends."""
    with tempfile.TemporaryDirectory() as home:
        one = Cluster(Path(home))
        one.probes = False
        try:
            yield one
        finally:
            one.close(looking=False)


def role_of(process: psutil.Process, names: dict[int, str]) -> str:
    """What a process is, in the table."""
    return names.get(process.pid) or "engine"


def measure(start: Callable[[Cluster], list[Node]], seconds: float, rows: dict[str, Row]) -> None:
    """One round of one arm."""
    with cluster() as one:
        nodes = start(one)
        names = {n.process.pid: n.role for n in nodes}
        for node in nodes:
            node.wait_for_line("ready: " if node.role != "router" else " at ")
        answer = ask(nodes[0], max_tokens=4)
        assert answer.status == 200, answer
        time.sleep(8.0)
        everyone = [psutil.Process(pid) for pid in names]
        everyone += [child for one in tuple(everyone) for child in one.children(recursive=True)]
        before = {process.pid: Reading.of(process.pid) for process in everyone}
        began = time.monotonic()
        time.sleep(seconds)
        for process in everyone:
            now, then = Reading.of(process.pid), before[process.pid]
            took = time.monotonic() - began
            row = rows[role_of(process, names)]
            row.wakeups.append((now.wakeups - then.wakeups) / took)
            row.percent.append(100 * (now.seconds - then.seconds) / took)
            row.memory.append(process.memory_full_info().pss / MIB)


def spread(values: list[float], digits: int) -> str:
    """Median and range."""
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def report(arms: dict[str, dict[str, Row]], options: argparse.Namespace) -> str:
    """The result file."""
    machine = "\n".join(f"- {fact}" for fact in facts())
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    lines = []
    for arm, rows in arms.items():
        for role, row in rows.items():
            count = len(row.wakeups) // options.rounds
            lines.append(
                f"| {arm} | {role} | {count} | {spread(row.wakeups, 1)} | {spread(row.percent, 2)} "
                f"| {spread(row.memory, 0)} |"
            )
        wakeups = sum(sum(row.wakeups) for row in rows.values()) / options.rounds
        percent = sum(sum(row.percent) for row in rows.values()) / options.rounds
        memory = sum(sum(row.memory) for row in rows.values()) / options.rounds
        lines.append(
            f"| {arm} | **all** | | **{wakeups:.0f}** | **{percent:.2f}** | {memory:.0f} |"
        )
    table = "\n".join(lines)
    return f"""# Idle processes

What processes do while nothing is asked: wake-ups (voluntary context switches of all threads) and
CPU time, over {options.seconds:g} s that begin 8 s after the last answer; {options.rounds} rounds.
Medians over processes and rounds, with ranges; sums are means over rounds. Memory is the
proportional share (PSS). Repeat with `python bench/idle.py`.

{machine}
- Load averages at the end: {load} (other work ran on the machine)

| what | process | number | wake-ups/s | % of a core | MiB |
|---|---|---:|---:|---:|---:|
{table}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--arm", action="append", default=[], help="begins the arm's name")
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    named = {
        name: start
        for name, start in ARMS.items()
        if not options.arm or name.startswith(tuple(options.arm))
    }
    found: dict[str, dict[str, Row]] = {name: defaultdict(Row) for name in named}
    for _ in range(options.rounds):
        for name, start in named.items():
            measure(start, options.seconds, found[name])
    text = report(found, options)
    print(text)
    if options.write:
        # What was written by hand stays.
        old = options.write.read_text() if options.write.exists() else ""
        _, heading, notes = old.partition("\n## ")
        options.write.write_text(text + (heading + notes if heading else ""))


if __name__ == "__main__":
    main()

"""Measures the time from exec to serving and a node's memory, beside bare Python and aiohttp.

    python bench/startup.py [--rounds N] [--write bench/results/startup.md]

Real processes run with `--engine=instant` and the bundled model. The arms take turns. Figures are
medians over rounds with their range, ratios are medians of each round's ratio. A process serves
when a request is answered: by the process itself (all in one), or by a cluster that lacked just
this process. Nothing passes or fails.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.machine import facts
from tests.chaos.cluster import Cluster, Node, free_port
from tests.chaos.load import ask

if TYPE_CHECKING:
    from collections.abc import Callable

HERE = Path(__file__).parent
MIB = 1 << 20
PATIENCE = 60.0
_SETTLE = 1.5
"""Seconds in which an engine loads, and caches of files are written."""


@dataclass
class Arm:
    """A program that starts."""

    name: str
    run: Callable[[], tuple[float, float]]
    """Starts it. Returns seconds and resident MiB of the process (not of its engine)."""
    seconds: list[float] = field(default_factory=list)
    resident: list[float] = field(default_factory=list)


def python(code: str) -> tuple[float, float]:
    """Runs a Python process with this one statement."""
    began = time.time()
    done = subprocess.run(
        [sys.executable, "-c", code + "\nprint(open('/proc/self/statm').read().split()[1])"],
        capture_output=True,
        check=True,
    )
    return time.time() - began, int(done.stdout) * resource.getpagesize() / MIB


def served(frontend: Node) -> None:
    """Sends requests without a pause until one is answered."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, http.client.HTTPException):
            if ask(frontend, max_tokens=1).status == 200:
                return
        time.sleep(0.005)
    raise TimeoutError("nothing is served")


def all_in_one() -> tuple[float, float]:
    """Starts one process with all roles."""
    with cluster() as one:
        began = time.time()
        node = one.start("all-in-one", "", "--engine", "instant")
        return node.wait_said("ready: ") - began, node.rss() / MIB


def with_others(role: str) -> Callable[[], tuple[float, float]]:
    """Starts a cluster that lacks one role; the frontend's port is known before it starts."""

    def run() -> tuple[float, float]:
        with cluster() as one:
            roles = {"router": one.router, "worker": one.worker, "frontend": one.frontend}
            others = {name: start() for name, start in roles.items() if name != role}
            for node in others.values():
                node.wait_said(f"{node.name} at")
            time.sleep(_SETTLE)
            port = free_port()
            began = time.time()
            node = one.frontend("--port", str(port)) if role == "frontend" else roles[role]()
            frontend = others.get("frontend") or PortOnly(port)
            served(frontend)  # type: ignore[arg-type]
            took = time.time() - began
            return took, node.rss() / MIB

    return run


class PortOnly:
    """The port of a frontend that does not listen yet."""

    host = "127.0.0.1"

    def __init__(self, port: int) -> None:
        self.port = port


def three_at_once() -> tuple[float, float]:
    """Starts router, worker and frontend at the same moment."""
    with cluster() as one:
        port = free_port()
        began = time.time()
        nodes = [one.router(), one.worker(), one.frontend("--port", str(port))]
        served(PortOnly(port))  # type: ignore[arg-type]
        took = time.time() - began
        return took, max(node.rss() for node in nodes) / MIB


@contextlib.contextmanager
def cluster():  # type: ignore[no-untyped-def]
    """A cluster that is not checked when it ends."""
    with tempfile.TemporaryDirectory() as home:
        one = Cluster(Path(home))
        one.probes = False
        try:
            yield one
        finally:
            one.close(looking=False)


ARMS = (
    Arm("python -c pass", lambda: python("pass")),
    Arm("import aiohttp.web", lambda: python("import aiohttp.web")),
    Arm("pdserve, all in one", all_in_one),
    Arm("a frontend joins", with_others("frontend")),
    Arm("a worker joins", with_others("worker")),
    Arm("three shells at once", three_at_once),
)
ROUTER = Arm("a router", lambda: router_alone())


def router_alone() -> tuple[float, float]:
    """Starts a router; it serves when it listens and has joined."""
    with cluster() as one:
        began = time.time()
        node = one.router()
        return node.wait_said("router-1 at") - began, node.rss() / MIB


def spread(values: list[float], digits: int) -> str:
    """Median and range."""
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def report(arms: list[Arm], rounds: int) -> str:
    """Returns the result file."""
    bare, library = arms[0].seconds, arms[1].seconds

    def ratio(arm: Arm, base: list[float]) -> str:
        return f"{statistics.median(a / b for a, b in zip(arm.seconds, base, strict=True)):.1f}"

    rows = "\n".join(
        f"| {arm.name} | {spread(arm.seconds, 2)} | {ratio(arm, bare)} | {ratio(arm, library)} "
        f"| {spread(arm.resident, 0)} |"
        for arm in arms
    )
    machine = "\n".join(f"- {fact}" for fact in facts())
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    return f"""# Start-up

From exec to the first answer, with `--engine=instant` and the bundled model; medians of {rounds}
rounds in which all arms took turns, and ranges. Repeat with `python bench/startup.py`. Resident
memory is that of the node's own process; of three shells it is the largest one's.

{machine}
- Load averages at the end: {load} (other work ran on the machine)

| what | seconds | times bare Python | times the HTTP library | resident, MiB |
|---|---:|---:|---:|---:|
{rows}

A frontend or a worker joins a cluster that has the other two roles. A router counts as started when
it listens; it is offered to frontends 0.3 s later, when it has heard of the workers' load.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--write", type=Path, default=HERE / "results" / "startup.md")
    options = parser.parse_args()
    arms = [*ARMS[:3], ROUTER, *ARMS[3:]]
    for _ in range(options.rounds):
        for arm in arms:
            seconds, resident = arm.run()
            arm.seconds.append(seconds)
            arm.resident.append(resident)
            print(f"{arm.name:<24} {seconds:6.2f} s {resident:6.0f} MiB", flush=True)
    options.write.write_text(report(arms, options.rounds))


if __name__ == "__main__":
    main()

"""Measures the time from exec to serving and a node's memory, beside bare Python and aiohttp.

    python bench/startup.py [--rounds N] [--write bench/results/startup.md]

Real processes run with the bundled model and `--engine=instant`, where no other engine is named.
The arms take turns. Figures are medians over rounds with their range, ratios are medians of each
round's ratio. A process serves when a request is answered: by the process itself (all in one), or
by a cluster that lacked just this process. One arm's worker has a tokenizer of 131,000 tokens,
which is made here. Before the first round all modules are compiled. Nothing passes or fails.
"""

from __future__ import annotations

import argparse
import atexit
import compileall
import contextlib
import functools
import http.client
import json
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import pdserve
import pdserve_engines
from bench.machine import facts
from tests.chaos.cluster import Cluster, Node, free_port
from tests.chaos.load import ask

if TYPE_CHECKING:
    from collections.abc import Callable

HERE = Path(__file__).parent
MIB = 1 << 20
PATIENCE = 60.0
BUNDLED = Path(pdserve.__file__).parent / "bundled"
LARGE = 131_000
_LONGEST = 14
"""Characters of the longest token that is drawn."""
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


def until(holds: Callable[[], bool]) -> None:
    """Asks without a pause until a request is answered as wanted."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, http.client.HTTPException):
            if holds():
                return
        time.sleep(0.005)
    raise TimeoutError("nothing is served")


def served(frontend: Node | PortOnly) -> None:
    """Waits until a request is answered."""
    until(lambda: ask(frontend, max_tokens=1).status == 200)  # type: ignore[arg-type]


def lives(frontend: PortOnly) -> None:
    """Waits until `/live` is answered."""

    def answered() -> bool:
        connection = http.client.HTTPConnection(frontend.host, frontend.port, timeout=PATIENCE)
        with contextlib.closing(connection):
            connection.request("GET", "/live")
            return connection.getresponse().status == 200

    until(answered)


def all_in_one(
    engine: str, wait: Callable[[PortOnly], None] = served
) -> Callable[[], tuple[float, float]]:
    """Starts one process with all roles, and waits for its first answer."""

    def run() -> tuple[float, float]:
        with cluster() as one:
            port = PortOnly(free_port())
            began = time.time()
            node = one.start("all-in-one", "", "--engine", engine, "--port", str(port.port))
            wait(port)
            return time.time() - began, node.rss() / MIB

    return run


def with_others(
    role: str, model: Callable[[], Path] | None = None
) -> Callable[[], tuple[float, float]]:
    """Starts a cluster that lacks one role; the frontend's port is known before it starts. Workers
    serve the model in the folder that `model` makes."""

    def run() -> tuple[float, float]:
        with cluster() as one:
            folder = "" if model is None else model()
            roles = {
                "router": one.router,
                "worker": lambda: one.worker(model=folder),
                "frontend": one.frontend,
            }
            others = {name: start() for name, start in roles.items() if name != role}
            for node in others.values():
                node.wait_said(f"{node.name} at")
            time.sleep(_SETTLE)
            port = free_port()
            began = time.time()
            node = one.frontend("--port", str(port)) if role == "frontend" else roles[role]()
            served(others.get("frontend") or PortOnly(port))
            took = time.time() - began
            return took, node.rss() / MIB

    return run


@functools.cache
def large_model() -> Path:
    """A model's folder with a tokenizer of 131,000 tokens."""
    made = Path(tempfile.mkdtemp(prefix="pdserve-startup-"))
    _ = atexit.register(shutil.rmtree, made, ignore_errors=True)
    folder = Path(shutil.copytree(BUNDLED, made / BUNDLED.name))
    change(folder / "tokenizer.json", lambda file: add_words(file["model"]))
    change(folder / "config.json", lambda file: file.update(vocab_size=2 * LARGE))
    return folder


def change(path: Path, how: Callable[[dict[str, Any]], None]) -> None:
    """Changes what a JSON file describes."""
    described = json.loads(path.read_text())
    how(described)
    path.write_text(json.dumps(described))


def add_words(model: dict[str, Any]) -> None:
    """Adds merges of random tokens to a byte-level BPE model, up to `LARGE` tokens."""
    draw = random.Random(0)
    vocab, merges = model["vocab"], model["merges"]
    known = [token for token in vocab if token.isascii() and token.isalpha()]
    taken = max(vocab.values())
    while len(vocab) < LARGE:
        left, right = draw.choice(known), draw.choice(known)
        if len(left + right) > _LONGEST or left + right in vocab:
            continue
        taken += 1
        vocab[left + right] = taken
        merges.append([left, right])
        known.append(left + right)


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
        served(PortOnly(port))
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
    Arm("import torch", lambda: python("import torch")),
    Arm("all in one: /live", all_in_one("instant", lives)),
    Arm("all in one: answers", all_in_one("instant")),
    Arm("all in one with torch: /live", all_in_one("torch", lives)),
    Arm("all in one with torch: answers", all_in_one("torch")),
    Arm("a router", lambda: router_alone()),
    Arm("a frontend joins", with_others("frontend")),
    Arm("a frontend joins, 131,000 tokens", with_others("frontend", large_model)),
    Arm("a worker joins", with_others("worker")),
    Arm("three shells at once", three_at_once),
)


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

From exec to the first answer, with the bundled model, and with `--engine=instant` or the engine
named; medians of {rounds} rounds in which all arms took turns, and ranges. Repeat with
`python bench/startup.py`. Resident memory is that of the node's own process; of three shells it is
the largest one's.

{machine}
- Load averages at the end: {load} (other work ran on the machine)

| what | seconds | times bare Python | times the HTTP library | resident, MiB |
|---|---:|---:|---:|---:|
{rows}

A frontend or a worker joins a cluster that has the other two roles. In one row the worker has a
tokenizer of 131,000 tokens, which the frontend reads before it answers. `/live` and errors are
answered while the engine loads. An all-in-one's engine process starts first and imports torch while
the node imports its own modules. A router counts as started when it listens; it is offered to
frontends 0.3 s later, when it has heard of the workers' load.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--write", type=Path, default=HERE / "results" / "startup.md")
    options = parser.parse_args()
    arms = [*ARMS]
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    for package in (pdserve, pdserve_engines):
        _ = compileall.compile_dir(package.__path__[0], quiet=1)
    for _ in range(options.rounds):
        for arm in arms:
            seconds, resident = arm.run()
            arm.seconds.append(seconds)
            arm.resident.append(resident)
            print(f"{arm.name:<34} {seconds:6.2f} s {resident:6.0f} MiB", flush=True)
    options.write.write_text(report(arms, options.rounds))


if __name__ == "__main__":
    main()

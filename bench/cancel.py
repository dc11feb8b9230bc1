"""Measures how soon a worker frees a cancelled request, by what the worker was doing.

    python bench/cancel.py [--rounds N] [--write bench/results/cancel.md]

Real processes. The client closes its connection. Then the worker's metric `pdserve_cancel_seconds`
shows that nothing of the request is held, or the router's metrics show that no request waits. The
result has two times: from the disconnect until `/metrics` shows it, and the worker's part of that.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.machine import facts
from tests.chaos.cluster import Cluster, Node, eventually
from tests.chaos.load import Stream, ask, wait_served

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HERE = Path(__file__).parent
SIM = ("--engine", "sim", "--engine-option", "content=on", "--engine-option", "blocks=1024")
SLOW = ("--engine-option", "slowdown=15", "--max-batch-tokens", "32", "--max-sequences", "4")
"""Engine options with which a block takes a tenth of a second."""
SENT = r'transfer_bytes_total{.*direction="sent".*}'
WAITING = r'handoffs{state="(?:admit|queue)"}'
HELD = r"router_held{.*}"
_PROMPTS = iter(range(1, 1_000_000))


@dataclass
class Row:
    """The times of one stage."""

    seen: list[float] = field(default_factory=list)
    """Seconds from the client's disconnect until `/metrics` shows the end."""
    worker: list[float] = field(default_factory=list)
    """Seconds that the worker itself reports."""


ROWS: dict[str, Row] = {}


def prompt(tokens: int) -> str:
    """Returns a prompt that was not sent before."""
    return f"{next(_PROMPTS)} " + "~" * tokens


def stream(frontend: Node, worker: str, text: str, tokens: int) -> Stream:
    message = {"role": "user", "content": text}
    return Stream(frontend, tokens=tokens, worker=worker, messages=[message], temperature=0)


def total(node: Node, pattern: str) -> float:
    """Sum of the samples whose names match."""
    _, page = node.get("/metrics", node.probes)
    return sum(
        map(float, re.findall(rf"^pdserve_(?:{pattern})(?:\{{.*\}})? (\S+)$", page, re.MULTILINE))
    )


def cancelled(node: Node, stage: str, what: str) -> float:
    return total(node, rf'cancel_seconds_{what}{{stage="{stage}"}}')


def measure(name: str, node: Node, stage: str, one: Stream) -> None:
    """Disconnects the client and waits for the worker's report."""
    count, seconds = (cancelled(node, stage, what) for what in ("count", "sum"))
    began = time.monotonic()
    one.hang_up()
    while cancelled(node, stage, "count") == count:
        if time.monotonic() - began > 5.0:
            print(f"{name}: not in time, it had got further")
            return
        time.sleep(0.002)
    row = ROWS.setdefault(name, Row())
    row.seen.append(time.monotonic() - began)
    row.worker.append(cancelled(node, stage, "sum") - seconds)


@contextmanager
def busy(streams: list[Stream]) -> Iterator[None]:
    """Keeps other streams running; disconnects them at the end."""
    try:
        yield
    finally:
        for other in streams:
            if other.running:
                other.hang_up()


def waits(node: Node, count: int) -> Callable[[], bool]:
    return lambda: total(node, "num_requests_waiting") >= count


def runs(node: Node, count: int) -> Callable[[], bool]:
    return lambda: total(node, "num_requests_running") >= count


def _more(node: Node, pattern: str, before: float) -> bool:
    return total(node, pattern) > before


def _is_idle(node: Node) -> bool:
    return not total(node, "num_requests_(?:running|waiting)")


def idle(*nodes: Node) -> None:
    """Waits until nothing of an earlier round is left."""
    for node in nodes:
        eventually(partial(_is_idle, node), "it is busy")


# ---------------------------------------------------------------------- scenes


def aggregated(
    label: str, frontend: Node, worker: Node, long: int, rounds: int, until_begun: float = 0.5
) -> None:
    """Measures a worker that prefills and decodes and runs four sequences at a time. It needs some
    time for a prompt of `long` tokens, and computes it `until_begun` seconds after the request."""
    for _ in range(rounds):
        idle(worker)
        one = stream(frontend, worker.name, prompt(5), 1000)
        one.wait_tokens(1)
        measure(f"{label}: decoding", worker, "decoding", one)
        idle(worker)
        one = stream(frontend, worker.name, prompt(long), 20)
        time.sleep(until_begun)
        if one.running and not one.texts:
            measure(f"{label}: prefilling", worker, "prefilling", one)
        others = [stream(frontend, worker.name, prompt(5), 1000) for _ in range(4)]
        with busy(others):
            for other in others:
                other.wait_tokens(1)
            one = stream(frontend, worker.name, prompt(5), 20)
            eventually(waits(worker, 1), "no request waits")
            measure(f"{label}: queued", worker, "queued", one)


def handed_over(frontend: Node, prefill: Node, decode: Node, rounds: int) -> None:
    """Measures a prompt that one worker computes for another."""
    label = "sim, two workers"
    for _ in range(rounds):
        idle(prefill, decode)
        before = total(prefill, SENT)
        one = stream(frontend, decode.name, prompt(1200), 20)
        eventually(partial(_more, prefill, SENT, before), "nothing is sent")
        count = cancelled(prefill, "[a-z_]+", "count")
        began = time.monotonic()
        measure(f"{label}: transferring, decode worker", decode, "remote_filling", one)
        while cancelled(prefill, "[a-z_]+", "count") == count and time.monotonic() < began + 5.0:
            time.sleep(0.002)
        if cancelled(prefill, "[a-z_]+", "count") > count:
            row = ROWS.setdefault(f"{label}: transferring, prefill worker", Row())
            row.seen.append(time.monotonic() - began)
        idle(prefill, decode)
        others = [stream(frontend, decode.name, prompt(1200), 20) for _ in range(12)]
        with busy(others):
            number = settled(decode)
            one = stream(frontend, decode.name, prompt(1200), 20)
            eventually(partial(_more, decode, WAITING, number), "it does not wait")
            measure(f"{label}: waiting for the prefill worker", decode, "remote_queued", one)


def waiting(decode: Node) -> float:
    """Number of prompts that no prefill worker has claimed."""
    return total(decode, WAITING)


def settled(decode: Node) -> float:
    """Waits until all prompts that can be claimed are, and returns the number of waiting ones."""
    eventually(lambda: total(decode, r'handoffs{state="fill"}') >= 1, "nothing is begun")
    eventually(lambda: waiting(decode) >= 1, "no request waits")
    time.sleep(0.2)
    return waiting(decode)


def held(frontend: Node, router: Node, rounds: int) -> None:
    """Measures a request that waits in a router."""
    name = "sim, one worker: held by the router"
    for _ in range(rounds):
        others = [stream(frontend, "", prompt(700), 20) for _ in range(8)]
        with busy(others):
            eventually(lambda: total(router, HELD) >= 1, "no request is held")
            number = total(router, HELD)
            one = stream(frontend, "", prompt(700), 20)
            eventually(partial(_more, router, HELD, number), "it is not held")
            number = total(router, HELD)
            began = time.monotonic()
            one.hang_up()
            while total(router, HELD) >= number:
                time.sleep(0.002)
            ROWS.setdefault(name, Row()).seen.append(time.monotonic() - began)


def one_worker(cluster: Cluster, *flags: str, hold: str = "0") -> tuple[Node, Node, Node]:
    """Starts a router, a worker and a frontend and waits until they are ready."""
    router = cluster.router("--hold-work", hold)
    worker = cluster.start("worker", "w1", "--join", cluster.address, *flags)
    frontend = cluster.frontend()
    cluster.wait_ready()
    wait_served(frontend, **asked(prompt(3)))
    return router, worker, frontend


def run(home: Path, rounds: int) -> None:
    """Runs all scenes."""
    with Cluster(home / "one") as cluster:
        _, worker, frontend = one_worker(cluster, *SIM, *SLOW)
        aggregated("sim, one worker", frontend, worker, 1200, rounds)
    with Cluster(home / "held") as cluster:
        router, worker, frontend = one_worker(cluster, *SIM, *SLOW, hold="1s")
        held(frontend, router, rounds)
    with Cluster(home / "two") as cluster:
        cluster.router("--hold-work", "0")
        join = ("--join", cluster.address)
        prefill = cluster.start("worker", "p1", *join, *SIM, *SLOW, "--mode", "prefill")
        decode = cluster.start(
            "worker", "d1", *join, *SIM, "--mode", "decode", "--disagg", "always"
        )
        frontend = cluster.frontend()
        cluster.wait_ready()
        eventually(
            lambda: (
                "remote" in str(ask(frontend, **asked(prompt(40))).headers.get("x-pdserve-prefill"))
            ),
            "prompts stay here",
        )
        handed_over(frontend, prefill, decode, rounds)
    with Cluster(home / "torch") as cluster:
        _, worker, frontend = one_worker(cluster, "--max-sequences", "4")
        aggregated("bundled model", frontend, worker, 1500, rounds, 0.1)


def asked(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 2}


# ---------------------------------------------------------------------- the result


def line(name: str) -> str:
    row = ROWS[name]
    cells = []
    for values in (row.seen, row.worker):
        cells += [f"{of(values) * 1000:.0f}" if values else "" for of in (statistics.median, max)]
    return f"| {name} | {' | '.join(cells)} | {len(row.seen)} |"


def report() -> str:
    """Returns the result file."""
    machine = "\n".join(f"- {fact}" for fact in facts())
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    lines = "\n".join(map(line, ROWS))
    return f"""# How soon a cancelled request is gone

Clients hang up; milliseconds from there until `/metrics` shows that the worker holds nothing of the
request any more, median and worst, and of that the worker's own part: from hearing of it to the
engine's word that all blocks are free. Repeat with `python bench/cancel.py`.

{machine}
- Load averages at the end: {load} (other work ran on the machine)

| what it was doing | hang-up to free | worst | in the worker | worst | samples |
|---|---:|---:|---:|---:|---:|
{lines}

An engine gets the cancellation between two steps. The sim engine's steps take a tenth of a second
here while it computes a prompt. The bundled model computes on the CPU, where a prompt's steps take
0.6 s at most, whatever `--max-batch-tokens` allows.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--write", type=Path, default=HERE / "results" / "cancel.md")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        run(Path(home), options.rounds)
    options.write.write_text(report())
    print(options.write.read_text())


if __name__ == "__main__":
    main()

"""How soon a worker is free of a request whose client has hung up, by what it was doing.

    python bench/cancel.py [--rounds N] [--write bench/results/cancel.md]

Real processes: the client closes its connection, and what is looked for is the worker's own word
that nothing is held any more (`pdserve_cancel_seconds`), or the router's that nobody waits. Both
are written down: from the hang-up until it shows in `/metrics`, and the worker's part of that.
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
"""A tenth of a second for each block."""
SENT = r'transfer_bytes_total{.*direction="sent".*}'
WAITING = r'handoffs{state="(?:admit|queue)"}'
HELD = r"router_held{.*}"
_PROMPTS = iter(range(1, 1_000_000))


@dataclass
class Row:
    """One stage."""

    seen: list[float] = field(default_factory=list)
    """Seconds from the hang-up until the metrics say so."""
    worker: list[float] = field(default_factory=list)
    """The worker's part."""


ROWS: dict[str, Row] = {}


def prompt(tokens: int) -> str:
    """One that nobody has asked before."""
    return f"{next(_PROMPTS)} " + "~" * tokens


def stream(frontend: Node, worker: str, text: str, tokens: int) -> Stream:
    message = {"role": "user", "content": text}
    return Stream(frontend, tokens=tokens, worker=worker, messages=[message], temperature=0)


def total(node: Node, pattern: str) -> float:
    """Sum of the samples that match."""
    _, page = node.get("/metrics", node.probes)
    return sum(map(float, re.findall(rf"^pdserve_{pattern} (\S+)$", page, re.MULTILINE)))


def cancelled(node: Node, stage: str, what: str) -> float:
    return total(node, rf'cancel_seconds_{what}{{stage="{stage}"}}')


def measure(name: str, node: Node, stage: str, one: Stream) -> None:
    """Hang up and wait for the worker's word."""
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
    """Others that take the places; hung up at the end."""
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
    """Nothing of an earlier round is left."""
    for node in nodes:
        eventually(partial(_is_idle, node), "it is busy")


# ---------------------------------------------------------------------- scenes


def aggregated(
    label: str, frontend: Node, worker: Node, long: int, rounds: int, until_begun: float = 0.5
) -> None:
    """Of a worker that does everything by itself and runs four sequences at a time; a prompt of
    `long` tokens takes it a while, and is being computed after `until_begun` seconds."""
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
            eventually(waits(worker, 1), "nobody waits")
            measure(f"{label}: queued", worker, "queued", one)


def handed_over(frontend: Node, prefill: Node, decode: Node, rounds: int) -> None:
    """Of a prompt that one worker computes for another."""
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
    """Prompts that no prefill worker has asked for."""
    return total(decode, WAITING)


def settled(decode: Node) -> float:
    """The same, once all that can be begun has been."""
    eventually(lambda: total(decode, r'handoffs{state="fill"}') >= 1, "nothing is begun")
    eventually(lambda: waiting(decode) >= 1, "nobody waits")
    time.sleep(0.2)
    return waiting(decode)


def held(frontend: Node, router: Node, rounds: int) -> None:
    """Of a request that waits in a router: the router forgets it."""
    name = "sim, one worker: held by the router"
    for _ in range(rounds):
        others = [stream(frontend, "", prompt(700), 20) for _ in range(8)]
        with busy(others):
            eventually(lambda: total(router, HELD) >= 1, "nobody is held")
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
    """Router, worker and frontend, ready."""
    router = cluster.router("--hold-work", hold)
    worker = cluster.start("worker", "w1", "--join", cluster.address, *flags)
    frontend = cluster.frontend()
    cluster.wait_ready()
    wait_served(frontend, **asked(prompt(3)))
    return router, worker, frontend


def run(home: Path, rounds: int) -> None:
    """All scenes."""
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
    """The result file."""
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

An engine hears of it between two steps. The sim engine's steps take a tenth of a second here while
a prompt is computed; the bundled model computes on the CPU, where prompts are cut into steps of at
most 0.6 s, whatever `--max-batch-tokens` allows.
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

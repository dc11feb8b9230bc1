"""The long lives that are watched, each for as much work as it is given.

`bench/soak.py` runs them in full and prints tables, the tests beside this file run a slice. A scene
starts its own cluster, takes a sample after each portion of work, and returns once everything that
requests hold has come back.
"""

from __future__ import annotations

import random
import re
import time
from typing import TYPE_CHECKING, Any

from pdserve.blocks.hashing import HASH_SECRET_TEST
from tests.chaos.cluster import eventually
from tests.chaos.load import wait_served
from tests.e2e.model import write_model
from tests.soak.churn import Asking, Churn
from tests.soak.load import Load, build
from tests.soak.memory import Watch
from tests.soak.quiet import Rest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.chaos.cluster import Cluster, Node

STREAM_RATE = 1.0
"""Tokens per second of each stream that is held open."""
HELD = 120.0
"""Seconds that a stream stays open if its client waits for its end."""

MANY = ("--max-sequences", "4096", "--max-batch-tokens", "4096")


def serving(cluster: Cluster, model: Path, *, rate: float = 0.0) -> list[Node]:
    """Router, worker and frontend, ready; the worker's tokens come at once, or at a rate."""
    nodes = [
        cluster.router(),
        cluster.worker(*MANY, model=model, rate=rate),
        cluster.frontend("--max-in-flight", "4096"),
    ]
    cluster.wait_ready()
    wait_served(nodes[2])
    return nodes


def requests(
    cluster: Cluster,
    folder: Path,
    *,
    count: int,
    portions: int,
    seed: int,
    say: Callable[[str], None],
) -> Watch:
    """`count` short requests, none like another, through frontend, router and worker."""
    nodes = serving(cluster, write_model(folder / "tiny"))
    load = Load(build(folder), nodes[2], "tiny", random.Random(seed))
    _answered(load.send(200))
    rest, watch = Rest(nodes), Watch(nodes)
    for number in range(portions + 1):
        rest.wait()
        watch.sample(number * (count // portions))
        if number < portions:
            report = _answered(load.send(count // portions))
            done = (number + 1) * (count // portions)
            say(f"{done:,} requests, {report['requests_per_second']:.0f}/s")
    return watch


def _answered(report: dict[str, Any]) -> dict[str, Any]:
    assert report["errors"] == 0, report
    return report


def members(
    cluster: Cluster,
    folder: Path,
    *,
    count: int,
    portions: int,
    seed: int,
    say: Callable[[str], None],
) -> Watch:
    """`count` changes of membership: nodes of every role join, and leave or crash, among a router,
    a worker and a frontend that stay and that are asked meanwhile. Names come again."""
    secret = folder / "secret"
    secret.write_text(HASH_SECRET_TEST.hex())
    secret.chmod(0o600)
    cluster.flags = (*cluster.flags, "--hash-secret-file", str(secret))
    nodes = serving(cluster, write_model(folder / "tiny"))
    keys = folder / "config" / "pdserve" / "cluster.key"
    with Churn(cluster.address, keys, seed) as churn, Asking(nodes[2], churn.MODEL) as asking:
        churn.come_and_go(12)
        # The logs that routers and workers keep for readers who fall behind: full before it begins.
        _answered(Load(build(folder), nodes[2], "tiny", random.Random(seed)).send(4 * count))
        rest, watch = Rest(nodes), Watch(nodes)
        for number in range(portions + 1):
            asking.pause()
            rest.wait()
            watch.sample(number * (count // portions))
            asking.resume()
            if number < portions:
                report = churn.come_and_go(count // portions // 2)
                say(f"{(number + 1) * (count // portions):,} changes, {report} {asking.statuses}")
    return watch


def streams(
    cluster: Cluster,
    folder: Path,
    *,
    count: int,
    portions: int,
    seed: int,
    say: Callable[[str], None],
) -> Watch:
    """`count` streams open at once, in each round for `HELD` seconds; then their clients vanish, or
    in every second round wait for the end."""
    nodes = serving(cluster, write_model(folder / "tiny"), rate=STREAM_RATE)
    load = Load(build(folder), nodes[2], "tiny", random.Random(seed))
    rest, watch = Rest(nodes), Watch(nodes)
    with load.streams(count, tokens=1, vanish=False):
        pass  # what so many at once take at their height stays with the allocator
    for number in range(portions + 1):
        rest.wait()
        watch.sample(number * count)
        if number < portions:
            vanish = number % 2 == 0
            tokens = int(HELD * STREAM_RATE) * (10 if vanish else 1)
            before = answered(nodes[2])
            with load.streams(count, tokens=tokens, vanish=vanish):
                wait_open(nodes[2], count, before)
                say(f"round {number + 1}: {count:,} streams are open")
                if vanish:
                    time.sleep(HELD / 2)
    return watch


def answered(frontend: Node) -> float:
    """Chats that have been answered to the end."""
    return frontend.count('pdserve_http_responses_total{route="/v1/chat/completions",status="200"}')


def wait_open(frontend: Node, count: int, before: float) -> None:
    """Until so many requests are being answered; with a short `HELD` the first may have ended, when
    the last begins."""

    def answers() -> list[str]:
        _, page = frontend.get("/metrics", frontend.probes)
        counted = "pdserve_http_(responses_total|requests_in_flight|connections)"
        return [line for line in page.splitlines() if re.match(counted, line)]

    in_flight = "pdserve_http_requests_in_flight"
    eventually(
        lambda: answered(frontend) - before + frontend.count(in_flight) >= count, answers, 120.0
    )


def handoffs(
    cluster: Cluster,
    folder: Path,
    *,
    count: int,
    portions: int,
    seed: int,
    say: Callable[[str], None],
) -> Watch:
    """`count` prompts computed by a prefill worker for a decode worker, both with the torch engine
    and a model of a megabyte."""
    model = write_model(folder / "tiny")
    join: tuple[str, ...] = ("--join", cluster.address, "--engine", "torch", "--model", str(model))
    join += ("--kv-memory", "8MiB")  # soon full: what caches hold is no slope
    router = cluster.router()
    prefill = cluster.start("worker", "prefill", *join, "--mode", "prefill")
    decode = cluster.start("worker", "decode", *join, "--mode", "decode", "--disagg", "always")
    frontend = cluster.frontend()
    nodes = [router, prefill, decode, frontend]
    cluster.wait_ready()
    eventually(lambda: "remote" in served_where(frontend), "no prompt is handed over")
    load = Load(build(folder), frontend, "tiny", random.Random(seed), least=40)
    rest, watch = Rest(nodes), Watch(nodes)
    for number in range(portions + 1):
        rest.wait()
        watch.sample(number * (count // portions))
        if number < portions:
            _answered(load.send(count // portions, connections=8))
            say(f"{(number + 1) * (count // portions):,} handoffs")
    done = decode.count('pdserve_handoff_attempts_total{outcome="done"}')
    assert done >= 0.9 * count, f"{done:g} of {count} prompts were handed over"
    return watch


def served_where(frontend: Node) -> str:
    """Where the prompt of a request was computed."""
    text = f"{random.random()} " + "~" * 64
    answer = wait_served(frontend, messages=[{"role": "user", "content": text}])
    return str(answer.headers.get("x-pdserve-prefill", ""))


UNITS = {
    "requests": "request",
    "members": "change",
    "streams": "stream",
    "handoffs": "handoff",
}
"""What one piece of a scene's work is called."""

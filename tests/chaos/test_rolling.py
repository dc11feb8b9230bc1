"""A cluster is restarted node by node under load, and nobody notices."""

from __future__ import annotations

import json
import threading
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from pdserve.launch import exit_codes
from tests.chaos.cluster import eventually
from tests.chaos.load import Stream, wait_served

if TYPE_CHECKING:
    from pathlib import Path

    from tests.chaos.cluster import Cluster, Node

STREAMS = 50
TOKENS = 48
USAGE: dict[str, Any] = {"stream_options": {"include_usage": True}}
PROMPTS = [f"{number} green bottles hanging on the wall, " * 8 for number in range(10)]
PACE = {"base": 0.05, "sequence": 0.0, "weights": 0.0, "token": 1e-5, "pair": 0.0, "kv": 0.0}
"""Twenty tokens a second for each stream, however many there are."""
SPAN = TOKENS * PACE["base"]
"""Seconds that a stream takes."""


def question(number: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": PROMPTS[number % len(PROMPTS)]}]


class Load:
    """So many streams at any time, at different points: each that ends is followed by another."""

    def __init__(self, frontend: Node) -> None:
        self._frontend = frontend
        self._over = threading.Event()
        self.done: list[tuple[int, Stream]] = []
        self._threads = [threading.Thread(target=self._run, args=(n,)) for n in range(STREAMS)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _run(self, number: int) -> None:
        # In step with each other, all could be near their ends when a worker drains, and stay.
        self._over.wait(number / STREAMS * SPAN)
        while not self._over.is_set():
            stream = Stream(self._frontend, tokens=TOKENS, messages=question(number), **USAGE)
            self.done.append((number, stream.wait()))
            number += 1


@pytest.mark.long(one_in=3)
@pytest.mark.timeout(240)
def test_every_worker_and_router_is_restarted_and_no_request_fails(
    cluster: Cluster, tmp_path: Path
) -> None:
    timing = tmp_path / "timing.json"
    timing.write_text(json.dumps({"roofline": PACE}))
    options = {"content": "on", "blocks": "4000", "timing": timing}
    engine = [f for name, value in options.items() for f in ("--engine-option", f"{name}={value}")]
    engine = ["--engine", "sim", *engine, "--max-sequences", "256"]

    def worker(name: str) -> Node:
        return cluster.start("worker", name, "--join", cluster.address, *engine)

    routers = [cluster.router(), cluster.router()]
    workers = [worker(f"worker-{number}") for number in (1, 2, 3)]
    frontend = cluster.frontend()
    cluster.wait_ready()
    wait_served(frontend, max_tokens=2)
    alone = [
        Stream(frontend, tokens=TOKENS, messages=question(number)) for number in range(len(PROMPTS))
    ]
    expected = [stream.wait().text for stream in alone]
    assert all(stream.done for stream in alone), alone
    assert len(set(expected)) == len(PROMPTS)

    with Load(frontend) as load:
        eventually(lambda: len(load.done) > 0, "the load has begun")
        for node in workers:
            assert node.end() == exit_codes.OK
            worker(node.name).wait_ready()
        for node, other in zip(routers, reversed(routers), strict=True):
            seed = cluster.address if other is routers[0] else address(other)
            assert node.end() == exit_codes.OK
            listen = address(node)
            cluster.start("router", node.name, "--listen", listen, "--join", seed).wait_ready()

    assert all(stream.done for _, stream in load.done), [s for _, s in load.done if not s.done]
    for number, stream in load.done:
        assert stream.text == expected[number % len(PROMPTS)]
    moved = Counter(stream.usage["pdserve"].get("migrations", 0) for _, stream in load.done)
    assert len(load.done) > 2 * STREAMS
    assert sum(count for times, count in moved.items() if times) > STREAMS // 3, moved


def address(router: Node) -> str:
    """Where it listens."""
    return router.wait_for_line(r"router \S+ at ([0-9.]+:\d+)")[1]

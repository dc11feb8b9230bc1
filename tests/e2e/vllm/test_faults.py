"""Engines with vLLM that are killed, frozen or drained in the middle of a stream: the client gets
every token once, and no process of vLLM is left."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

from tests.e2e.vllm.cluster import (
    TokenStream,
    VllmCluster,
    answer_of,
    processes_of_vllm,
    vllm_worker,
    wait_gone,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.chaos.cluster import Node

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900), pytest.mark.long(one_in=2, turn=0)]

TOKENS = 1200
"""Of an answer: long enough that a fault in its middle comes before its end."""


class Disturbed:
    """A stream that is running, and the answer that it must give."""

    def __init__(self, cluster: VllmCluster, prompt: str) -> None:
        self.front = cluster.front
        self.expected = answer_of(self.front, prompt, TOKENS)
        assert len(self.expected) == TOKENS
        self.before = moves(self.front)
        self.stream = TokenStream(self.front, prompt, TOKENS)
        self.stream.read(40)
        self.node = cluster.workers[self.stream.worker]
        self.engine = processes_of_vllm(self.node)

    def check(self, reason: str) -> None:
        """Read to the end: the answer is whole, the stream has moved once, and the processes of the
        old engine have gone."""
        assert self.stream.read() == self.expected
        told = self.stream.usage["pdserve"]
        assert told["migrations"] == 1
        assert told["worker"] != self.node.name
        after = moves(self.front)
        assert after.pop(reason, 0) == self.before.pop(reason, 0) + 1
        assert after == self.before
        wait_gone(self.engine)


def moves(front: Node) -> dict[str, float]:
    """Completed migrations by reason."""
    page = front.get("/metrics")[1]
    found = {}
    for line in page.splitlines():
        if line.startswith("pdserve_migrations_total{") and 'outcome="completed"' in line:
            found[line.partition('reason="')[2].partition('"')[0]] = float(line.split()[-1])
    return {reason: count for reason, count in found.items() if count}


@pytest.fixture
def disturbed(cluster: VllmCluster, request: pytest.FixtureRequest) -> Iterator[Disturbed]:
    """A stream in its middle."""
    running = Disturbed(cluster, f"The story of {request.node.name}. " * 4)
    yield running
    running.stream.close()


def restarted(node: Node, before: float) -> None:
    """Until the node has started another engine."""
    node.wait_count("pdserve_engine_restarts_total", before + 1, 300)


def test_a_killed_engine_process_is_replaced_and_its_stream_goes_on(disturbed):
    node = disturbed.node
    before = node.count("pdserve_engine_restarts_total")
    node.core().kill()
    disturbed.check("engine_died")
    restarted(node, before)


@pytest.mark.long
def test_a_killed_worker_process_of_vllm_is_noticed_at_once(disturbed):
    node = disturbed.node
    before = node.count("pdserve_engine_restarts_total")
    vllm_worker(node).kill()
    disturbed.check("engine_died")
    assert node.said("a worker process of vLLM has died"), node.lines
    restarted(node, before)


@pytest.mark.long
def test_a_frozen_engine_process_is_killed_and_its_stream_goes_on(disturbed):
    node = disturbed.node
    before = node.count("pdserve_engine_restarts_total")
    stalls = node.count("pdserve_engine_stalls_total")
    node.core().suspend()
    disturbed.check("engine_stalled")
    assert node.count("pdserve_engine_stalls_total") == stalls + 1
    restarted(node, before)


@pytest.mark.long
def test_a_frozen_worker_process_of_vllm_is_a_stalled_engine(disturbed):
    node = disturbed.node
    before = node.count("pdserve_engine_restarts_total")
    vllm_worker(node).suspend()
    disturbed.check("engine_stalled")
    restarted(node, before)


# ---------------------------------------------------------------- whole nodes


@pytest.fixture
def doomed(tiny: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Disturbed]:
    """A stream in its middle, in a cluster of its own: one of its nodes ends in this test."""
    with VllmCluster(tmp_path / "cluster", tiny) as cluster:
        cluster.open()
        running = Disturbed(cluster, f"The story of {request.node.name}. " * 4)
        yield running
        running.stream.close()


@pytest.mark.long
def test_a_killed_node_takes_its_engine_along_and_the_stream_goes_on(doomed):
    doomed.node.kill()
    doomed.check("worker_lost")


@pytest.mark.long
def test_a_drained_node_hands_its_stream_over_and_ends(doomed):
    doomed.node.process.send_signal(signal.SIGTERM)
    doomed.check("drain")
    assert doomed.node.process.wait(60) == 0


@pytest.mark.long
def test_ctrl_c_reaches_vllm_too_and_the_node_still_drains_first(doomed):
    """A terminal sends it to every process of its group."""
    for process in doomed.engine:
        process.send_signal(signal.SIGINT)
    doomed.node.process.send_signal(signal.SIGINT)
    doomed.check("drain")
    assert doomed.node.process.wait(60) == 0
    assert not doomed.node.said("has died")

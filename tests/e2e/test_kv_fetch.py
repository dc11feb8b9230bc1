"""KV that one real worker fetches from another: for a request, as an heir, and to be warmed.

Whether a block was fetched is asked where it arrived. The sim engine's tokens depend on every byte.
"""

from __future__ import annotations

import signal
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from tests.chaos.cluster import Cluster, eventually
from tests.e2e.tiers import (
    BLOCK,
    BLOCKS,
    ENGINE,
    FRAME,
    OUTPUT,
    REUSED,
    ask,
    command,
    prompt,
    wait_served,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.chaos.cluster import Node
    from tests.e2e.tiers import Answer

pytestmark = pytest.mark.timeout(180)


ALONE = BLOCKS * BLOCK + OUTPUT - 1.0
"""Tokens that a request computes which finds nothing; the last token of its answer is not one."""


@dataclass
class Workers:
    """Workers without lower tiers, which fetch whatever they can."""

    cluster: Cluster
    front: Node
    nodes: dict[str, Node]

    def start(self, *names: str) -> None:
        for name in names:
            flags = ("--join", self.cluster.address, *ENGINE)
            self.nodes[name] = self.cluster.start("worker", name, *flags)

    def wait_ready(self, *names: str) -> None:
        """Until they serve, and know each other: nothing is fetched from an unknown node."""
        for name in names:
            self.nodes[name].wait_ready()
        wait_served(self.front, *names)
        others = sum(not node.killed for node in self.nodes.values()) - 1
        for name in names:
            self.nodes[name].wait_count('pdserve_node_members{member="worker"}', float(others))

    def ask(self, worker: str, seed: object) -> Answer:
        """What the worker answers; the router knows its blocks by then, as sources of others."""
        answer = ask(self.front, prompt(seed), worker)
        eventually(lambda: worker in holding(self, seed), "the router does not know its blocks")
        return answer

    def pulls(self, worker: str) -> list[str]:
        """How its fetches have ended, for messages."""
        _, page = self.nodes[worker].get("/metrics", self.nodes[worker].probes)
        return [line for line in page.splitlines() if line.startswith("pdserve_kv_pull")]


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    with Cluster(tmp_path_factory.mktemp("fetch")) as cluster:
        cluster.router()
        found = Workers(cluster, cluster.frontend(), {})
        found.start("owner", "asker")
        cluster.wait_ready()
        found.wait_ready("owner", "asker")
        yield found


def holding(workers: Workers, seed: object) -> set[str]:
    """Workers that have all of a prompt on their devices, by their own events."""
    explained = workers.front.post("/route", {"prompt": prompt(seed)})
    return {one["worker"] for one in explained["candidates"] if one["overlap_tokens"] >= REUSED}


def computed(node: Node) -> int:
    """Tokens that went through its model."""
    return int(node.count("pdserve_computed_tokens_total"))


def wait_released(node: Node) -> None:
    """Until no block of the worker is held, nor waits for a peer's writes to be over."""
    for state in ("used", "quarantined"):
        node.wait_count(f"pdserve_kv_blocks_{state}", 0.0)


def test_a_prefix_of_another_worker_is_fetched(workers):
    asker = workers.nodes["asker"]
    cold = workers.ask("asker", "own")
    asker.wait_count("pdserve_computed_tokens_total", ALONE)
    there = workers.ask("owner", "theirs")
    fetched = workers.ask("asker", "theirs")
    shown = (fetched.text, fetched.cached, fetched.node)
    assert shown == (there.text, {"peer": REUSED}, "owner"), workers.pulls("asker")
    asker.wait_count("pdserve_computed_tokens_total", 2 * ALONE - REUSED)
    asker.wait_count("pdserve_kv_pulled_bytes_total", float((BLOCKS - 1) * FRAME))
    again = workers.ask("asker", "theirs")
    assert (again.text, again.cached) == (there.text, {"device": REUSED})
    assert workers.ask("owner", "own") == cold._replace(
        worker="owner", cached={"peer": REUSED}, node="asker"
    )
    for node in (asker, workers.nodes["owner"]):
        wait_released(node)


def test_many_requests_for_one_prefix_fetch_it_once(workers):
    asker = workers.nodes["asker"]
    there = workers.ask("owner", "popular")
    before, answers = computed(asker), []
    threads = [
        threading.Thread(target=lambda: answers.append(workers.ask("asker", "popular")))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [answer.text for answer in answers] == [there.text] * 4
    assert {sum(answer.cached.values()) for answer in answers} == {REUSED}
    assert any("peer" in answer.cached for answer in answers)
    eventually(lambda: computed(asker) > before, "the requests were not counted")
    wait_released(asker)


@pytest.mark.long
def test_an_owner_that_hangs_costs_a_computation(workers):
    core = workers.nodes["owner"].core()
    there = workers.ask("owner", "hung")
    core.suspend()
    try:
        computed_here = workers.ask("asker", "hung")
    finally:
        core.resume()
    assert (computed_here.text, computed_here.cached) == (there.text, {})
    again = workers.ask("asker", "hung")
    assert (again.text, again.cached) == (there.text, {"device": REUSED})
    wait_released(workers.nodes["asker"])


def test_an_owner_that_is_killed_in_the_middle_of_a_fetch_costs_only_time(workers):
    owner, asker = workers.nodes["owner"], workers.nodes["asker"]
    workers.ask("owner", "before")
    # There is a path now. Until then the fetch would wait for one, of which the counts say nothing.
    assert workers.ask("asker", "before").node == "owner"
    wait_released(asker)
    there = workers.ask("owner", "lost")
    found: list[Answer] = []
    request = threading.Thread(target=lambda: found.append(workers.ask("asker", "lost")))
    owner.pause()
    request.start()
    try:
        eventually(
            lambda: found or asker.count("pdserve_kv_blocks_used") >= BLOCKS - 1,
            "the fetch has not begun",
        )
    finally:
        owner.kill()
        request.join()
    assert [(answer.text, answer.cached) for answer in found] == [(there.text, {})]
    asker.wait_count('pdserve_kv_pulls_ended_total{outcome="gone"}', 1.0)
    wait_released(asker)


# ---------------------------------------------------------------------- the next life


@pytest.fixture(scope="module")
def heir(workers: Workers) -> Node:
    """A new worker, which has nothing; besides `asker` there is no other."""
    if workers.nodes["owner"].process.poll() is None:
        workers.nodes["owner"].kill()
    workers.nodes["asker"].wait_said("worker owner died")
    workers.start("heir")
    workers.wait_ready("heir")
    return workers.nodes["heir"]


def test_a_new_worker_is_warmed_from_another(workers, heir):
    there = workers.ask("asker", "warm")
    done = command(workers.cluster, "tier", "warm", "--from", "asker", "--worker", "heir")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("heir: pulled ")
    again = workers.ask("heir", "warm")
    assert (again.text, again.cached) == (there.text, {"device": REUSED})


def test_a_worker_that_leaves_gives_its_newest_blocks_to_an_heir(workers, heir):
    there = workers.ask("asker", "last words")
    workers.ask("heir", "first words")  # others know by then what it serves
    assert workers.nodes["asker"].end(signal.SIGTERM) == 0
    workers.nodes["asker"].wait_for_line(r"\d+ cached blocks moved; workers asked: 1")
    again = workers.ask("heir", "last words")
    assert (again.text, again.cached) == (there.text, {"device": REUSED})
    wait_released(heir)


# ---------------------------------------------------------------------- copies of a hot prefix


COPIES = 2
CROWD = ("w1", "w2", "w3", "w4")


@pytest.fixture(scope="module")
def crowd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    """Four workers of a cluster whose routers let two of them keep what they fetch."""
    with Cluster(tmp_path_factory.mktemp("copies")) as cluster:
        cluster.router("--kv-copies", str(COPIES))
        found = Workers(cluster, cluster.frontend(), {})
        found.start(*CROWD)
        cluster.wait_ready()
        found.wait_ready(*CROWD)
        yield found


def test_a_hot_prefix_lies_on_k_workers_and_not_on_more(crowd):
    """Every worker is asked for it between other work, for some of which it has to make room."""
    texts = set()
    for worker in CROWD:
        for number in range(2):
            crowd.ask(worker, f"before {number} {worker}")
        found = crowd.ask(worker, "hot")
        texts.add(found.text)
        assert found.cached == ({"peer": REUSED} if worker != "w1" else {})
        wait_released(crowd.nodes[worker])
    assert len(texts) == 1
    for worker in CROWD:
        for number in range(2):
            crowd.ask(worker, f"after {number} {worker}")
    eventually(lambda: holding(crowd, "hot") == {"w1", "w2"}, lambda: holding(crowd, "hot"))
    again = crowd.ask("w2", "hot")
    assert (again.text in texts, again.cached) == (True, {"device": REUSED})

"""Hosts that fall silent, ways that break and packets that get lost, between network namespaces."""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING

import pytest

from tests.chaos.cluster import Cluster, Node, eventually
from tests.chaos.load import ask, running_on, streams, wait_served, warm_up
from tests.chaos.netns import Host, Network, network
from tests.chaos.test_security import key_file
from tests.e2e.server import PATIENCE

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.timeout(300), pytest.mark.long]

STREAMS = 8


class Hosts:
    """A cluster with a host for every node."""

    def __init__(self, net: Network, cluster: Cluster, tmp_path: Path) -> None:
        self.net = net
        self.cluster = cluster
        keys = key_file(tmp_path / "shared.key", secrets.token_hex(32))
        self._flags = ("--metrics-port", "0", "--cluster-key-file", str(keys))
        self._seed = ""
        self.of: dict[str, Host] = {}

    def start(self, role: str, *flags: str) -> Node:
        host = self.net.host()
        number = 1 + sum(node.role == role for node in self.cluster.nodes)
        name = f"{role}-{number}"
        join = ("--join", self._seed) if self._seed else ()
        listen = f"{host.address}:7700"
        self._seed = self._seed or listen
        where = ("--host", host.address, "--listen", listen)
        node = Node(role, name, *self._flags, *where, *join, *flags, prefix=host.prefix)
        node.host = host.address
        self.of[name] = host
        return self.cluster.add(node)


@pytest.fixture
def hosts(tmp_path):
    with network() as net, Cluster(tmp_path) as cluster:
        try:
            yield Hosts(net, cluster, tmp_path)
        finally:
            net.heal()


@pytest.fixture
def started(hosts):
    """A router, two workers and a frontend, each on a host of its own, ready."""
    engine = ("--engine", "instant", "--engine-option", "tokens_per_second=50")
    router = hosts.start("router")
    workers = [hosts.start("worker", *engine) for _ in range(2)]
    frontend = hosts.start("frontend")
    hosts.cluster.wait_ready()
    warm_up(frontend, workers)
    return router, workers, frontend


def test_a_host_that_falls_silent_is_buried_and_comes_back(hosts, started):
    router, workers, frontend = started
    others = [router, workers[1], frontend]
    with streams([frontend], STREAMS, tokens=700) as running:
        theirs, _ = running_on(workers, STREAMS)
        hosts.of["worker-1"].silent()
        silent = time.time()
        for node in others:
            node.wait_said("worker-1 died", since=silent)
        assert ask(frontend).status == 200
        assert theirs
    assert all(stream.done for stream in running), running
    assert len({stream.text for stream in running}) == 1
    hosts.of["worker-1"].heal()
    workers[0].wait_said("rejoining with epoch")
    healed = time.time()
    for node in others:
        node.wait_said("worker-1 joined", since=silent)
    assert healed
    warm_up(frontend, workers)
    running_on(workers, 0)


def test_a_broken_way_between_two_is_no_death(hosts, started):
    """Frontend and worker do not hear each other; the router hears both."""
    _, workers, frontend = started
    hosts.of["frontend-1"].deaf_to(hosts.of["worker-1"])
    hosts.of["worker-1"].deaf_to(hosts.of["frontend-1"])
    broken = time.time()
    end = broken + 20
    while time.time() < end:  # requests go by the other worker, some after a second attempt
        assert ask(frontend).status in (200, 503)
    eventually(lambda: ask(frontend).status == 200, "the other worker serves")
    for node in hosts.cluster.nodes:
        assert not node.said("died, life"), node.lines
    for name in ("frontend-1", "worker-1"):
        hosts.of[name].heal()
    before = workers[0].count("pdserve_generation_tokens_total")

    def used() -> bool:
        ask(frontend)
        return workers[0].count("pdserve_generation_tokens_total") > before

    eventually(used, "the worker is used again")


def test_two_halves_become_one_again(hosts, started):
    """Router and frontend here, both workers there: nothing can be served, until it can."""
    router, workers, frontend = started
    here = [hosts.of[node.name] for node in (router, frontend)]
    there = [hosts.of[node.name] for node in workers]
    for one, others in ((here, there), (there, here)):
        for host in one:
            host.deaf_to(*others)
    apart = time.time()

    def buried() -> bool:
        return all(n.said(f"{w.name} died", apart) for n in (router, frontend) for w in workers)

    # Each half is too small to be sure that it is not the one cut off, and waits a minute more.
    while not buried():
        assert ask(frontend).status == 503  # an end in any case, and no hanging
        assert time.time() < apart + 2 * PATIENCE
        time.sleep(0.5)
    assert ask(frontend).code == "no_worker"
    for host in (*here, *there):
        host.heal()
    wait_served(frontend)
    warm_up(frontend, workers)


def test_lost_packets_are_nothing(hosts, started):
    """One in twenty: TCP repairs what it can, and membership is patient with the rest."""
    _, workers, frontend = started
    for host in hosts.of.values():
        host.losing(5)
    with streams([frontend], STREAMS, tokens=500) as running:
        assert wait_served(frontend).status == 200
    for host in hosts.of.values():
        host.heal()
    assert all(stream.done for stream in running), running
    assert len({stream.text for stream in running}) == 1
    for node in hosts.cluster.nodes:
        assert not node.said("died, life"), node.lines
    running_on(workers, 0)

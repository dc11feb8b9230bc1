"""Slow, stalled and cut connections between the roles: every way leads through a fault proxy."""

from __future__ import annotations

import contextlib
import time

import pytest

from tests.chaos.load import ask, running_on, streams, wait_served, warm_up
from tests.chaos.proxy import Proxy

pytestmark = pytest.mark.timeout(300)

STREAMS = 8


@pytest.fixture
def ways(cluster, seed):
    """A proxy before each of a router, two workers and a frontend: others know no other address."""
    with contextlib.ExitStack() as stack:
        ways = [stack.enter_context(Proxy(seed + i)) for i in range(4)]
        cluster.address = ways[0].address
        # The cluster ends before its ways do.
        stack.callback(cluster.close)
        yield ways


def start(cluster, ways):
    """All four, ready."""

    def behind(proxy):
        return ("--listen", proxy.target, "--advertise", proxy.address)

    router = cluster.start("router", "", *behind(ways[0]))
    workers = [cluster.worker(*behind(way)) for way in ways[1:3]]
    frontend = cluster.frontend(*behind(ways[3]))
    cluster.wait_ready()
    warm_up(frontend, workers)
    return router, workers, frontend


@pytest.mark.long
def test_a_slow_network_is_only_slow(cluster, ways):
    for way in ways:
        way.delay = 0.03
    _, workers, frontend = start(cluster, ways)
    with streams([frontend], STREAMS, tokens=100) as running:
        assert wait_served(frontend).status == 200
    assert all(stream.done for stream in running), running
    assert len({stream.text for stream in running}) == 1
    assert all(way.carried for way in ways)
    running_on(workers, 0)
    for node in cluster.nodes:
        assert not node.said("died, life"), node.lines


@pytest.mark.long
def test_a_short_stall_is_nothing(cluster, ways):
    _, workers, frontend = start(cluster, ways)
    with streams([frontend], STREAMS, tokens=200) as running:
        for way in ways:
            way.stall()
        time.sleep(2)
        for way in ways:
            way.resume()
    assert all(stream.done for stream in running), running
    assert len({stream.text for stream in running}) == 1
    running_on(workers, 0)
    for node in cluster.nodes:
        assert not node.said("died, life"), node.lines


@pytest.mark.long
def test_connections_cut_in_the_middle_of_a_frame_come_back(cluster, ways, long):
    """The nodes live: nobody is declared dead, and requests finish whole."""
    _, workers, frontend = start(cluster, ways)
    whole = ask(frontend, max_tokens=100, ignore_eos=True).body["choices"][0]["message"]["content"]
    for _ in range(10 if long else 2):
        with streams([frontend], STREAMS, tokens=100) as running:
            for way in ways:
                way.cut()
        for stream in running:
            assert stream.done, stream
            assert stream.text == whole
        wait_served(frontend)
        running_on(workers, 0)
    assert sum(way.cuts for way in ways) > 0
    warm_up(frontend, workers)
    for node in cluster.nodes:
        node.wait_ready()
        assert not node.said("died, life"), node.lines

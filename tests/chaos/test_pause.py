"""Processes that stand still: shortly, and nothing happens; long, and they come back as new."""

from __future__ import annotations

import re
import time

import pytest

from tests.chaos.cluster import holding
from tests.chaos.load import ask, running_on, streams, wait_served, warm_up

pytestmark = pytest.mark.timeout(300)

SHORT, LONG = 2.0, 12.0
"""Seconds. A process that stands still for five may not be buried, see `gossip.config`."""
STREAMS = 8


@pytest.mark.long
@pytest.mark.parametrize("role", ["router", "worker", "frontend"])
def test_a_short_pause_is_nothing(cluster, role):
    router, workers, frontend = cluster.serving(workers=2)
    warm_up(frontend, workers)
    paused = {"router": router, "worker": workers[0], "frontend": frontend}[role]
    with streams([frontend], STREAMS, tokens=250) as running, holding(cluster, paused):
        time.sleep(SHORT)
    assert all(stream.done for stream in running), running
    assert len({stream.text for stream in running}) == 1
    assert wait_served(frontend).status == 200
    for node in cluster.nodes:
        assert not node.said("died, life"), node.lines
        assert not node.said("rejoining"), node.lines


@pytest.mark.long
@pytest.mark.parametrize("role", ["router", "worker", "frontend"])
def test_a_long_pause_is_a_death_and_a_new_life(cluster, role):
    router, workers, frontend = cluster.serving(workers=2)
    warm_up(frontend, workers)
    paused = {"router": router, "worker": workers[0], "frontend": frontend}[role]
    others = [node for node in cluster.nodes if node is not paused]
    with streams([frontend], STREAMS, tokens=1000) as running:
        running_on(workers, STREAMS)
        with holding(cluster, paused):
            time.sleep(LONG)
            for node in others:
                node.wait_said(f"{paused.name} died")
            if role == "worker":
                assert ask(frontend).status == 200
            if role == "router":
                assert ask(frontend, max_tokens=2).code == "no_router"
        paused.wait_said("rejoining with epoch")
        back = time.time()
        for node in others:
            node.wait_said(f"{paused.name} joined", since=back - 60)
    assert all(stream.done for stream in running), running
    assert len({stream.text for stream in running}) == 1
    wait_served(frontend)
    warm_up(frontend, workers)
    for node in others:
        lives = re.findall(rf"{paused.name} joined, life (\d+)", "\n".join(node.lines))
        assert len(lives) >= 2, node.lines
        assert sorted(map(int, lives)) == list(map(int, lives))
    assert sum(running_on(workers, 0)) == 0

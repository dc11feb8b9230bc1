"""kill -9 under streaming load: who had nothing to do with it does not notice."""

from __future__ import annotations

import pytest

from tests.chaos.cluster import eventually
from tests.chaos.load import ask, running_on, streams, warm_up

pytestmark = pytest.mark.timeout(300)

STREAMS = 12
TOKENS = 250


def same_text(running):
    """What each of those that ended well consists of, which is the same."""
    (text,) = {stream.text for stream in running if stream.done}
    return text


def test_a_killed_worker_takes_no_request_along(cluster):
    router, workers, frontend = cluster.serving(workers=2)
    warm_up(frontend, workers)
    with streams([frontend], STREAMS, tokens=TOKENS) as running:
        theirs, others = running_on(workers, STREAMS)
        assert theirs
        assert others
        killed = workers[0].kill()
        assert ask(frontend).status == 200  # by the other one, at the second attempt at the latest
    assert all(stream.done for stream in running), running
    assert same_text(running)
    for peer in (router, workers[1], frontend):
        assert peer.wait_said("worker-1 died") >= killed - 0.1
        assert not peer.said("worker-2 died")
    eventually(lambda: running_on(workers[1:], 0) == [0], "all requests are let go")


@pytest.mark.long
def test_a_killed_router_takes_nothing_along(cluster):
    routers = [cluster.router(), cluster.router()]
    workers = [cluster.worker(), cluster.worker()]
    frontend = cluster.frontend()
    cluster.wait_ready()
    warm_up(frontend, workers)
    for router in routers:  # whichever the frontend asks
        with streams([frontend], STREAMS, tokens=TOKENS) as running:
            router.kill()
            assert ask(frontend).status == 200
            back = cluster.router(name=router.name)
            assert ask(frontend).status == 200
        assert all(stream.done for stream in running), running
        assert same_text(running)
        back.wait_said("frontend-1 joined")
        back.wait_ready()
        warm_up(frontend, workers)


@pytest.mark.long
def test_a_killed_frontend_frees_what_its_clients_had(cluster):
    router, workers, first = cluster.serving(workers=2)
    second = cluster.frontend()
    cluster.wait_ready()
    warm_up(first, workers)
    warm_up(second, workers)
    with streams([first, second], STREAMS, tokens=800) as running:
        running_on(workers, STREAMS)
        first.kill()
        eventually(
            lambda: sum(running_on(workers, STREAMS // 2)) == STREAMS // 2, "requests are let go"
        )
        assert ask(second).status == 200
    gone, stayed = running[0::2], running[1::2]
    assert not any(stream.done for stream in gone), gone
    assert all(stream.done for stream in stayed), stayed
    assert router.said("frontend-1 died")


@pytest.mark.long
def test_a_killed_engine_is_its_workers_own_affair(cluster):
    """The node lives on: peers hear of an engine that restarts, and of no death."""
    router, workers, frontend = cluster.serving(workers=2)
    warm_up(frontend, workers)
    with streams([frontend], STREAMS, tokens=TOKENS) as running:
        theirs, _ = running_on(workers, STREAMS)
        workers[0].core().kill()
        assert ask(frontend).status == 200
    assert theirs
    assert all(stream.done for stream in running), running
    assert same_text(running)
    workers[0].expected_errors = True
    workers[0].wait_ready()
    warm_up(frontend, workers)
    assert not any(node.said("died, life|left, life") for node in (router, frontend))

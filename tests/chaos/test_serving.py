"""Three shells serve: in any order of start, several of each, and after any of them comes back."""

from __future__ import annotations

import itertools

import pytest

from pdserve.launch import exit_codes
from tests.chaos.cluster import eventually
from tests.chaos.load import Stream, ask, running_on, streams, wait_served, warm_up
from tests.e2e.server import PATIENCE

pytestmark = pytest.mark.timeout(300)


def unhealthy(node):
    """What its probes say if they say no."""
    status, health = node.health()
    return health if status == 503 else None


ORDERS = list(itertools.permutations(("router", "worker", "frontend")))


@pytest.mark.long
@pytest.mark.parametrize("order", ORDERS, ids="-".join)
def test_any_order_of_start_serves(cluster, order):
    """One after the other: each has settled, with what there is, before the next begins."""
    settled = {"router": " at ", "worker": "worker-1 at ", "frontend": "frontend-1 at "}
    for role in order:
        node = getattr(cluster, role)()
        node.wait_said(settled[role])
    frontend = next(node for node in cluster.nodes if node.role == "frontend")
    answer = wait_served(frontend, max_tokens=8)
    assert answer.body["usage"]["completion_tokens"] == 8
    cluster.wait_ready()


def test_three_shells_at_once_heal_from_each_others_ends(cluster):
    """Started together; then each is killed and started again under its name."""
    router, (worker,), frontend = cluster.serving()
    wait_served(frontend)

    worker.kill()
    refused = ask(frontend)
    while refused.status == 200 or refused.code == "worker_lost":  # nobody had noticed yet
        refused = ask(frontend)
    assert (refused.status, refused.code) == (503, "no_worker")
    assert int(refused.headers["retry-after"]) >= 1
    assert ask(frontend, model="no-such-model").status == 404
    health = eventually(lambda: unhealthy(frontend), "the worker's end is seen")
    assert "no worker" in health["reason"]
    worker = cluster.worker(name=worker.name)
    wait_served(frontend)

    router.kill()
    router = cluster.router(name=router.name)
    wait_served(frontend)

    frontend.kill()
    frontend = cluster.frontend(name=frontend.name)
    wait_served(frontend)
    assert worker.count("pdserve_num_requests_running") == 0


@pytest.mark.long
def test_several_of_each_share_the_work(cluster):
    routers = [cluster.router("--policy", "round_robin"), cluster.router("--policy", "round_robin")]
    workers = [cluster.worker(rate=100) for _ in range(3)]
    frontends = [cluster.frontend(), cluster.frontend()]
    cluster.wait_ready()
    for frontend in frontends:
        warm_up(frontend, workers)
    with streams(frontends, 12, tokens=400) as running:
        assert all(count > 0 for count in running_on(workers, 12))
        routers[0].kill()
        for frontend in frontends:
            assert wait_served(frontend).status == 200
    assert all(stream.done for stream in running), running
    assert len({stream.text for stream in running}) == 1


def test_a_bare_frontend_serves_models_it_has_never_seen(cluster, tiny_model):
    frontend = cluster.frontend()
    frontend.wait_said("listening on")
    for _ in range(2):  # before and after it has given up waiting for the cluster
        assert frontend.get("/health")[0] == frontend.health()[0] == 503
        refused = ask(frontend)
        assert refused.status == 503
        assert int(refused.headers["retry-after"]) >= 1
        frontend.wait_said("frontend-1 at ")

    router = cluster.router()
    first = cluster.worker(name="first", model=tiny_model)
    second = cluster.worker("--served-model-name", "second,alias", name="second")
    eventually(lambda: ask(frontend, model="tiny").status == 200, "tiny is served")
    eventually(lambda: ask(frontend, model="second").status == 200, "second is served")
    status, models = frontend.get("/v1/models")
    assert status == 200
    assert {m["id"] for m in models["data"]} >= {"tiny", "second"}
    answers = {ask(frontend, model=m, max_tokens=16).body["model"] for m in ("tiny", "alias")}
    assert len(answers) == 2
    assert all(w.count("pdserve_generation_tokens_total") > 0 for w in (first, second))

    second.kill()
    eventually(lambda: ask(frontend, model="second").code == "no_worker", "a worker's end is seen")
    assert ask(frontend, model="tiny").status == 200
    assert ask(frontend, model="third").status == 404
    assert router.health()[0] == 200


def test_without_a_router_requests_wait_and_streams_go_on(cluster):
    router = cluster.router()
    cluster.worker(rate=20)
    frontend = cluster.frontend("--router-wait", "500ms")
    cluster.wait_ready()
    wait_served(frontend)
    stream = Stream(frontend, tokens=120)
    stream.wait_tokens(1)
    router.kill()
    eventually(lambda: ask(frontend).code == "no_router", "the router's end is seen")
    refused = ask(frontend)
    assert refused.status == 503
    assert int(refused.headers["retry-after"]) >= 1
    assert frontend.health()[0] == 503
    assert stream.running
    cluster.router(name="another")
    wait_served(frontend)
    assert stream.wait().done, stream
    assert frontend.health()[0] == 200


def test_a_second_router_at_the_same_address_is_one_clear_line(cluster):
    first = cluster.router()
    first.wait_ready()
    second = cluster.start("router", "", "--listen", cluster.address)
    second.expected, second.expected_errors = exit_codes.CANNOT_LISTEN, True
    second.wait_said(f"cannot listen on {cluster.address}: Address already in use.*--listen")
    second.process.wait(PATIENCE)

"""Sums over the nodes of a status."""

from __future__ import annotations

from collections import Counter

import pytest

from pdserve.cli.console.overview import latency, overview
from pdserve.ids import NodeId
from pdserve.messages.routing import WorkerLoad
from pdserve.messages.status import (
    FrontendStats,
    LatencyCounts,
    ModelStatus,
    ModelWindow,
    NodeReport,
    RouterStats,
)
from tests.cli.test_status_tables import member, status

INF = float("inf")


@pytest.mark.parametrize(
    ("counts", "share", "value"),
    [
        ({}, 0.5, None),
        ({1.0: 0, INF: 0}, 0.5, None),
        ({1.0: 10}, 0.5, 0.5),
        ({1.0: 0, 2.0: 10}, 0.5, 1.5),
        ({2.0: 0, INF: 10}, 0.99, 2.0),
        ({1.0: 1, 2.0: 0, 3.0: 1}, 1.0, 3.0),
    ],
)
def test_quantiles_are_those_of_prometheus(
    counts: dict[float, float], share: float, value: float | None
) -> None:
    assert latency(Counter(counts), share) == (value if value is None else pytest.approx(value))


def window(model: str, requests: int, **fields: object) -> ModelWindow:
    return ModelWindow(model=model, seconds=10.0, requests=requests, **fields)  # type: ignore[arg-type]


def test_frontends_are_summed_by_model_and_workers_and_routers_too() -> None:
    early = LatencyCounts((0.1, 0.2), (0, 4))
    late = LatencyCounts((0.5, 1.0), (0, 4))
    first = FrontendStats(
        2,
        recent=(
            window("a", 40, errors=10, output_tokens=50, ttft=early, slo={"both": (3, 1)}),
            window("", 10, errors=10),
        ),
    )
    second = FrontendStats(1, recent=(window("a", 20, ttft=late, slo={"both": (4, 0)}),))
    load = WorkerLoad(running=3, waiting=2, blocks_total=8, blocks_used=2)
    seen = overview(
        status(
            member("f1", "frontend", NodeReport(frontend=first)),
            member("f2", "frontend", NodeReport(frontend=second)),
            member("w1", "worker", NodeReport(worker=load)),
            member("w2", "worker", NodeReport(worker=load)),
            member("r1", "router", NodeReport(router=RouterStats(held=5))),
            member("w3", "worker", silence="no answer"),
        )
    )
    assert (seen.all.requests, seen.all.errors) == (7.0, 2.0)
    assert (seen.models["a"].requests, seen.models["a"].errors) == (6.0, 1.0)
    assert set(seen.models) == {"a"}
    assert (seen.running, seen.waiting, seen.held, seen.active) == (6, 4, 5, 3)
    assert seen.kv_use == 0.25
    assert seen.all.kept("both") == 0.875
    assert seen.all.kept("ttft") is None
    assert latency(seen.all.ttft, 0.5) == pytest.approx(0.2)
    assert latency(seen.all.ttft, 1.0) == pytest.approx(1.0)


def test_the_window_is_chosen() -> None:
    stats = FrontendStats(recent=(window("a", 10),), minute=(window("a", 20),))
    there = status(member("f1", "frontend", NodeReport(frontend=stats)))
    assert overview(there).all.requests == 1.0
    assert overview(there, minute=True).all.requests == 2.0


def test_nodes_of_an_older_release_have_no_windows() -> None:
    seen = overview(status(member("f1", "frontend", NodeReport(frontend=FrontendStats(2)))))
    assert (seen.seconds, seen.active, seen.all.requests) == (0.0, 2, 0.0)


def test_a_server_without_a_cluster_is_named_by_its_address() -> None:
    nodes = (
        member("r1", "router", host="box", pid=1),
        member("f1", "frontend", host="box", pid=1, http="127.0.0.1:8000"),
    )
    model = ModelStatus(name="tiny", workers=(NodeId("w"),))
    alone = status(*nodes, models=(model,))
    assert overview(alone).title == "cluster test, 2 nodes: tiny"
    private = type(alone)(cluster="private", asked=alone.asked, now=1.0, members=nodes)
    assert overview(private).title == "pdserve at 127.0.0.1:8000: no model yet"

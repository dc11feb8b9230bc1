from __future__ import annotations

import dataclasses

from pdserve.observe.exposition import render
from pdserve.observe.metrics import Metrics
from pdserve.observe.node_metrics import NODE_METRICS, NodeSample, merge_by_role


def page(*samples: NodeSample) -> list[str]:
    metrics = Metrics()
    for sample in samples:
        metrics.attach_node(lambda sample=sample: sample)  # type: ignore[misc]
    return render(metrics.families()).decode().splitlines()


def test_every_field_of_a_sample_has_a_name() -> None:
    fields = {field.name for field in dataclasses.fields(NodeSample)} - {"role"}
    assert {metric.field for metric in NODE_METRICS} == fields


def test_nodes_of_one_process_are_told_apart_by_role() -> None:
    lines = page(
        NodeSample(role="router", members={"worker": 2, "frontend": 1}, routed=7, lives=1),
        NodeSample(role="worker", members={"router": 1}, lives=3),
    )
    assert 'pdserve_node_members{member="worker",role="router"} 2.0' in lines
    assert 'pdserve_node_members{member="router",role="worker"} 1.0' in lines
    assert 'pdserve_node_lives_total{role="worker"} 3.0' in lines
    assert 'pdserve_router_routed_total{role="router"} 7.0' in lines


def test_what_is_not_of_a_role_is_absent() -> None:
    text = "\n".join(page(NodeSample(role="worker")))
    assert "pdserve_router_routed" not in text
    assert "pdserve_rerouted" not in text


def test_without_nodes_nothing_is_said_of_them() -> None:
    assert "pdserve_node_" not in "\n".join(page())


def test_nodes_of_one_role_are_one_series() -> None:
    """Prometheus refuses a page with two series of the same labels."""
    one = NodeSample(
        role="worker", members={"router": 1, "worker": 1}, links=2, rerouted=None, refused=1
    )
    other = NodeSample(role="worker", members={"router": 2, "frontend": 1}, links=3, rerouted=4)
    router = NodeSample(role="router", links=9)
    merged = merge_by_role([one, router, other])
    assert [sample.role for sample in merged] == ["worker", "router"]
    assert merged[0].members == {"router": 2, "worker": 1, "frontend": 1}  # the larger one
    assert (merged[0].links, merged[0].rerouted, merged[0].refused) == (5, 4, 1)
    assert merged[1] == router
    series = [line.rpartition(" ")[0] for line in page(one, router, other) if line[0] != "#"]
    assert len(series) == len(set(series))

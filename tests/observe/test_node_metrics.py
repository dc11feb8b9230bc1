from __future__ import annotations

import dataclasses

from pdserve.observe.metrics import Metrics
from pdserve.observe.node_metrics import NODE_METRICS, NodeSample


def page(*samples: NodeSample) -> list[str]:
    metrics = Metrics()
    for sample in samples:
        metrics.attach_node(lambda sample=sample: sample)  # type: ignore[misc]
    return metrics.render()[0].decode().splitlines()


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

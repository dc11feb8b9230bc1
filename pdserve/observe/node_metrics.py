"""What a node reports at a scrape: the names and meanings of the cluster's metrics.

A process may hold several nodes, so every one of these carries the node's role. Counters are totals
over the process's life, whatever number of lives the node had in it. Who fills a sample is the
process's start-up; this file knows names only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["NODE_METRICS", "NodeMetric", "NodeSample"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSample:
    """One node, now. Mappings are by the second label's value."""

    role: str
    members: Mapping[str, float] = field(default_factory=dict)
    suspects: float = 0
    unreachable: float = 0
    links: float = 0
    lives: float = 0
    handshakes_refused: Mapping[str, float] = field(default_factory=dict)
    topic_events: Mapping[str, float] = field(default_factory=dict)
    routed: float | None = None
    """None: not a router."""
    refused: float = 0
    bookings: float = 0
    bookings_ended: Mapping[str, float] = field(default_factory=dict)
    rerouted: float | None = None
    """None: not a frontend."""


@dataclass(frozen=True, slots=True)
class NodeMetric:
    """One name; `field` is the sample's, `label` that of a mapping's keys, `combine` what several
    processes that share a port are together."""

    name: str
    kind: str
    field: str
    help: str
    label: str = ""
    combine: Literal["sum", "max"] = "sum"


NODE_METRICS = (
    NodeMetric(
        "node_members",
        "gauge",
        "members",
        "Other members of the cluster, by their role.",
        "member",
        combine="max",
    ),
    NodeMetric(
        "node_suspects", "gauge", "suspects", "Members that some cannot hear.", combine="max"
    ),
    NodeMetric(
        "node_unreachable",
        "gauge",
        "unreachable",
        "Members that this node has lost its link to.",
        combine="max",
    ),
    NodeMetric("node_links", "gauge", "links", "Links to other nodes."),
    NodeMetric(
        "node_lives_total",
        "counter",
        "lives",
        "Lives this node has begun; above 1, the cluster held it for dead.",
        combine="max",
    ),
    NodeMetric(
        "node_handshakes_refused_total",
        "counter",
        "handshakes_refused",
        "Connections that were turned away, by reason.",
        "error",
    ),
    NodeMetric(
        "node_topic_events_total",
        "counter",
        "topic_events",
        "What happened to followed logs: gaps, replays, snapshots, lagged, divergences.",
        "event",
    ),
    NodeMetric("router_routed_total", "counter", "routed", "Requests that were given a worker."),
    NodeMetric("router_refused_total", "counter", "refused", "Requests that were given none."),
    NodeMetric("router_bookings", "gauge", "bookings", "Bookings of this router that are open."),
    NodeMetric(
        "router_bookings_ended_total",
        "counter",
        "bookings_ended",
        "Bookings by how they ended: released, let_go, worker_gone, asker_gone, never_seen.",
        "reason",
    ),
    NodeMetric(
        "rerouted_requests_total",
        "counter",
        "rerouted",
        "Times a worker did not take a request and the router was asked again.",
    ),
)
"""In the order of `docs/metrics.md`."""

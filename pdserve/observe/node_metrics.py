"""Defines the cluster metrics of a node.

A process may hold several nodes, so each metric carries the node's role. Counters are totals over
the process's life, over all lives of the node. The process's start-up fills the samples.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["NODE_METRICS", "NodeMetric", "NodeSample", "RouterSample", "merge_by_role"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSample:
    """One router's decisions at a scrape."""

    decisions: Mapping[str, float] = field(default_factory=dict)
    held: float | None = None
    ever_held: float | None = None
    held_seconds: float | None = None
    held_ended: Mapping[str, float] = field(default_factory=dict)
    kv_copies: Mapping[str, float] = field(default_factory=dict)
    prompt_tokens: Mapping[str, float] = field(default_factory=dict)
    first_token_seconds: Mapping[str, float] = field(default_factory=dict)
    prediction: Mapping[str, float] = field(default_factory=dict)
    index_blocks: Mapping[str, float] = field(default_factory=dict)
    index_bytes: float | None = None
    approximate_workers: float | None = None
    silent_routers: float | None = None
    arrivals: Mapping[str, float] = field(default_factory=dict)
    arrived_work: Mapping[str, float] = field(default_factory=dict)
    kv_token_seconds: Mapping[str, float] = field(default_factory=dict)
    prefill_items: Mapping[str, float] = field(default_factory=dict)
    prefill_tokens: Mapping[str, float] = field(default_factory=dict)
    prefill_claims: Mapping[str, float] = field(default_factory=dict)
    prefill_workers: Mapping[str, float] = field(default_factory=dict)
    prefill_credits: Mapping[str, float] = field(default_factory=dict)
    prefill_events: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSample(RouterSample):
    """One node at a scrape. Mappings are keyed by the second label's value."""

    role: str
    members: Mapping[str, float] = field(default_factory=dict)
    suspects: float = 0
    unreachable: float = 0
    links: float = 0
    lives: float = 0
    handshakes_refused: Mapping[str, float] = field(default_factory=dict)
    requests_refused: float = 0
    topic_events: Mapping[str, float] = field(default_factory=dict)
    routed: float | None = None
    """The router's decisions; None: not a router."""
    refused: float = 0
    bookings: float = 0
    bookings_ended: Mapping[str, float] = field(default_factory=dict)
    rerouted: float | None = None
    """Requests routed again; None: not a frontend."""


@dataclass(frozen=True, slots=True)
class NodeMetric:
    """Definition of one metric: `field` is the sample's field, `label` names a mapping's keys,
    `combine` says how nodes of one role, and processes that share a port, are merged.
    """

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
        "node_suspects",
        "gauge",
        "suspects",
        "Members that are suspected to be dead.",
        combine="max",
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
        "Epochs that this node has begun; above 1, the cluster declared it dead and it rejoined.",
        combine="max",
    ),
    NodeMetric(
        "node_handshakes_refused_total",
        "counter",
        "handshakes_refused",
        "Connections that were refused, by reason.",
        "error",
    ),
    NodeMetric(
        "node_requests_refused_total",
        "counter",
        "requests_refused",
        "Requests and streams of peers that were refused: too many, or too many bytes.",
    ),
    NodeMetric(
        "node_topic_events_total",
        "counter",
        "topic_events",
        "Events of the topic logs that this node reads: gaps, replays, snapshots, lagged, "
        "divergences.",
        "event",
    ),
    NodeMetric(
        "router_routed_total", "counter", "routed", "Requests for which the router chose a worker."
    ),
    NodeMetric("router_refused_total", "counter", "refused", "Requests that the router refused."),
    NodeMetric("router_bookings", "gauge", "bookings", "Bookings of this router that are open."),
    NodeMetric(
        "router_bookings_ended_total",
        "counter",
        "bookings_ended",
        "Bookings by how they ended: released, let_go, worker_gone, asker_gone, never_seen.",
        "reason",
    ),
    NodeMetric(
        "router_decisions_total",
        "counter",
        "decisions",
        "Requests for which the router chose a worker, by the policy or its fallback.",
        "policy",
    ),
    NodeMetric("router_held", "gauge", "held", "Requests that wait in this router for a worker."),
    NodeMetric(
        "router_held_total",
        "counter",
        "ever_held",
        "Requests that have waited in this router for a worker.",
    ),
    NodeMetric(
        "router_held_seconds_total",
        "counter",
        "held_seconds",
        "Time that requests waited in this router for a worker.",
    ),
    NodeMetric(
        "router_held_ended_total",
        "counter",
        "held_ended",
        "Requests whose wait in this router ended without a worker: expired, withdrawn.",
        "reason",
    ),
    NodeMetric(
        "router_kv_copies_total",
        "counter",
        "kv_copies",
        "Requests whose worker was expected to fetch a prefix from another one, by what becomes of"
        " the copy: kept, or let_go since enough workers had the prefix.",
        "copy",
    ),
    NodeMetric(
        "router_prompt_tokens_total",
        "counter",
        "prompt_tokens",
        "Prompt tokens of requests whose first token has come: all; of these, the tokens that the"
        " router expected to be cached (expected) and that the worker found cached (cached).",
        "tokens",
    ),
    NodeMetric(
        "router_first_token_seconds_total",
        "counter",
        "first_token_seconds",
        "Time from decision to first token, as predicted and as observed.",
        "time",
    ),
    NodeMetric(
        "router_prediction_ratio",
        "gauge",
        "prediction",
        "Time to first token, observed over predicted: quantiles of the last requests.",
        "quantile",
        combine="max",
    ),
    NodeMetric(
        "router_index_blocks",
        "gauge",
        "index_blocks",
        "Blocks in the prefix index: distinct blocks, blocks summed over workers, and blocks "
        "refused because the index is full.",
        "kind",
    ),
    NodeMetric("router_index_bytes", "gauge", "index_bytes", "Memory of the prefix index."),
    NodeMetric(
        "router_approximate_workers",
        "gauge",
        "approximate_workers",
        "Workers whose cached blocks are estimated, because their engines send no KV events.",
        combine="max",
    ),
    NodeMetric(
        "router_silent_routers",
        "gauge",
        "silent_routers",
        "Other routers whose bookings arrive late and therefore count less.",
        combine="max",
    ),
    NodeMetric(
        "router_arrivals_total",
        "counter",
        "arrivals",
        "Requests that reached this router for the first time, by model: placed, held and refused "
        "ones.",
        "model",
    ),
    NodeMetric(
        "router_arrived_work_seconds_total",
        "counter",
        "arrived_work",
        "Predicted prefill time of these requests on a worker of speed 1, without the tokens that "
        "the best worker for each has cached.",
        "model",
    ),
    NodeMetric(
        "router_kv_token_seconds_total",
        "counter",
        "kv_token_seconds",
        "KV tokens times the seconds that they were held, of requests that have ended, by model.",
        "model",
    ),
    NodeMetric(
        "prefill_queue_items",
        "gauge",
        "prefill_items",
        "Prompts that wait in this router for a prefill worker, by model.",
        "model",
    ),
    NodeMetric(
        "prefill_queue_tokens",
        "gauge",
        "prefill_tokens",
        "Tokens of these prompts, without those that the best prefill worker for each has cached.",
        "model",
    ),
    NodeMetric(
        "prefill_queue_claims",
        "gauge",
        "prefill_claims",
        "Prompts that a prefill worker has claimed and not finished, by model.",
        "model",
    ),
    NodeMetric(
        "prefill_queue_workers",
        "gauge",
        "prefill_workers",
        "Prefill workers connected to this router's queue, by model.",
        "model",
    ),
    NodeMetric(
        "prefill_queue_credits",
        "gauge",
        "prefill_credits",
        "Prompts that these prefill workers can take now.",
        "model",
    ),
    NodeMetric(
        "prefill_queue_events_total",
        "counter",
        "prefill_events",
        "Events of prompts in the queues: enqueued, claimed, held, redelivered, returned, "
        "cancelled, replaced, abandoned, ended_OUTCOME, refused_REASON.",
        "event",
    ),
    NodeMetric(
        "rerouted_requests_total",
        "counter",
        "rerouted",
        "Times that a worker refused a request and the router was asked again.",
    ),
)
"""All node metrics, in the order of `docs/metrics.md`."""


def merge_by_role(samples: Iterable[NodeSample]) -> list[NodeSample]:
    """One sample for each role: plain `pdserve` has two nodes of the role `worker`, and a page must
    not have two series with the same labels."""
    merged: dict[str, NodeSample] = {}
    for sample in samples:
        known = merged.get(sample.role)
        merged[sample.role] = sample if known is None else _merged(known, sample)
    return list(merged.values())


def _merged(one: NodeSample, other: NodeSample) -> NodeSample:
    values = {
        metric.field: _combined(metric, getattr(one, metric.field), getattr(other, metric.field))
        for metric in NODE_METRICS
    }
    return replace(one, **values)


def _combined(metric: NodeMetric, one: Any, other: Any) -> Any:
    """Of two values of the metric's field: numbers, None, or mappings."""
    if one is None or other is None:
        return other if one is None else one
    if not isinstance(one, int | float):
        names = dict.fromkeys((*one, *other))
        return {name: _combined(metric, one.get(name), other.get(name)) for name in names}
    return max(one, other) if metric.combine == "max" else one + other

"""Collects the metric samples of one role in this process at a scrape."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Final

from pdserve.observe.node_metrics import NodeSample, RouterSample

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdserve.runtime.node import Node
    from pdserve.runtime.topics.service import Topics

__all__ = ["sample_node"]

_TOPIC_EVENTS: Final = ("gaps", "replays", "snapshots", "lagged", "divergences")


def sample_node(
    node: Node,
    topics: Topics | None = None,
    *,
    routed: int | None = None,
    refused: int = 0,
    bookings: int = 0,
    bookings_ended: Mapping[str, float] | None = None,
    router: RouterSample | None = None,
    rerouted: int | None = None,
) -> NodeSample:
    """Samples of one node; the arguments after `topics` are the values of its role."""
    members = list(node.registry)
    return NodeSample(
        role=node.config.role,
        members=Counter(member.role for member in members),
        suspects=sum(member.suspect for member in members),
        unreachable=sum(not member.reachable for member in members),
        links=node.links,
        lives=node.lives,
        handshakes_refused=node.handshakes_refused(),
        requests_refused=node.bodies.refused,
        topic_events={} if topics is None else _topic_events(topics),
        routed=routed,
        refused=refused,
        bookings=bookings,
        bookings_ended=bookings_ended or {},
        **({} if router is None else asdict(router)),
        rerouted=rerouted,
    )


def _topic_events(topics: Topics) -> dict[str, float]:
    total = dict.fromkeys(_TOPIC_EVENTS, 0.0)
    for name, numbers in topics.stats().items():
        if name.startswith("followed/"):
            for event in _TOPIC_EVENTS:
                total[event] += numbers.get(event, 0)
    return total

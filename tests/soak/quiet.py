"""What a node holds for others while nobody asks anything: gauges that must come back."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tests.chaos.cluster import eventually

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.chaos.cluster import Node

ZERO = (
    "http_connections",
    "http_requests_in_flight",
    "num_requests_running",
    "num_requests_waiting",
    "kv_blocks_used",
    "kv_blocks_quarantined",
    "handoffs",
    "router_bookings",
    "router_held",
    "prefill_queue_items",
    "prefill_queue_claims",
)
"""Metrics whose samples are 0 on a node at rest."""
STEADY = ("event_loop_tasks", "node_links", "node_members")
"""Metrics that come back to what they were."""


def held(node: Node) -> dict[str, float]:
    """Sums by metric, of those that this node has."""
    _, page = node.get("/metrics", node.probes)
    found: dict[str, float] = {}
    for name, value in re.findall(r"^pdserve_(\w+)(?:\{.*\})? (\S+)$", page, re.MULTILINE):
        if name in ZERO + STEADY:
            found[name] = found.get(name, 0.0) + float(value)
    return found


class Rest:
    """What nodes hold now, while nothing is under way; and the way back to that."""

    def __init__(self, nodes: Iterable[Node]) -> None:
        self._before = [(node, held(node)) for node in nodes]

    def wait(self, timeout: float = 60.0) -> None:
        """Until all is as it was, tasks within one or two that come and go by themselves."""
        eventually(lambda: not self.kept(), lambda: self.kept(), timeout)

    def kept(self) -> list[str]:
        """What there is now and was not, in words."""
        return [
            f"{node.name}: {name} is {now:g}, was {before.get(name, 0.0):g}"
            for node, before in self._before
            for name, now in held(node).items()
            if now > (before.get(name, 0.0) + TASKS if name in STEADY else 0.0)
        ]


TASKS = 2

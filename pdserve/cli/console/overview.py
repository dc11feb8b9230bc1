"""Sums what a server or a cluster does now: rates, latencies, load, degradations. Pure.

The numbers are those of `ClusterStatus`, where each node counts for itself, or of two `/metrics`
pages. It does not know how they are shown.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from pdserve.ids import Seconds
    from pdserve.messages.status import ClusterStatus, LatencyCounts, ModelWindow, NodeReport

__all__ = ["Overview", "Traffic", "alone", "degradations", "latency", "overview"]

_OVER: Final = math.inf


@dataclass(slots=True)
class Traffic:
    """Requests of one model, or of all, in a window. Rates are per second."""

    requests: float = 0.0
    errors: float = 0.0
    input: float = 0.0
    """Prompt tokens."""
    output: float = 0.0
    prompt_tokens: int = 0
    uncached_tokens: int = 0
    ttft: Counter[float] = field(default_factory=Counter)
    """Observations by the upper bound of their bucket, in seconds."""
    itl: Counter[float] = field(default_factory=Counter)
    slo: dict[str, tuple[int, int]] = field(default_factory=dict)
    """By objective: requests that kept it, and that did not."""

    def add(self, window: ModelWindow) -> None:
        """Adds what one frontend did for one model."""
        seconds = window.seconds or 1.0
        self.requests += window.requests / seconds
        self.errors += window.errors / seconds
        self.input += window.prompt_tokens / seconds
        self.output += window.output_tokens / seconds
        self.prompt_tokens += window.prompt_tokens
        self.uncached_tokens += window.uncached_tokens
        _count(self.ttft, window.ttft)
        _count(self.itl, window.itl)
        for objective, (good, bad) in window.slo.items():
            before = self.slo.get(objective, (0, 0))
            self.slo[objective] = (before[0] + good, before[1] + bad)

    @property
    def cached(self) -> float | None:
        """Share of the prompts' tokens that was found in a prefix cache."""
        if not self.prompt_tokens:
            return None
        return max(0.0, 1 - self.uncached_tokens / self.prompt_tokens)

    def kept(self, objective: str) -> float | None:
        """Share of requests that kept an objective; None: none was judged."""
        good, bad = self.slo.get(objective, (0, 0))
        return good / (good + bad) if good + bad else None


def _count(into: Counter[float], counts: LatencyCounts) -> None:
    for bound, count in zip((*counts.bounds, _OVER), counts.counts, strict=False):
        # A bucket without observations tells where the next one begins.
        into[bound] += count


def latency(counts: Mapping[float, float], share: float) -> Seconds | None:
    """A quantile of observations by bucket, linear within a bucket; None without any."""
    wanted, low, seen = share * sum(counts.values()), 0.0, 0.0
    if wanted <= 0:
        return None
    for bound in sorted(counts):
        inside = counts[bound]
        if seen + inside >= wanted:
            # The last bucket has no upper bound: its lower one is the answer, as in Prometheus.
            return low if math.isinf(bound) else low + (bound - low) * (wanted - seen) / inside
        low, seen = bound, seen + inside
    return low


@dataclass(slots=True)
class Overview:
    """What is on top of every view."""

    title: str = ""
    seconds: Seconds = 0.0
    """Length of the window; 0: nothing has reported one."""
    all: Traffic = field(default_factory=Traffic)
    models: dict[str, Traffic] = field(default_factory=dict)
    running: int = 0
    waiting: int = 0
    held: int = 0
    active: int = 0
    """Requests in progress at frontends."""
    blocks_used: int = 0
    blocks: int = 0
    degraded: list[tuple[str, str]] = field(default_factory=list)
    """(node, name and remedy)."""

    @property
    def kv_use(self) -> float | None:
        """Share of KV blocks that sequences hold."""
        return self.blocks_used / self.blocks if self.blocks else None


def overview(status: ClusterStatus, *, minute: bool = False) -> Overview:
    """The overview of a server or cluster, over the last 10 s, or 60 s."""
    found = Overview(_title(status), degraded=list(degradations(status)))
    for report in _reports(status):
        if report.worker is not None:
            found.running += report.worker.running
            found.waiting += report.worker.waiting
            found.blocks += report.worker.blocks_total
            found.blocks_used += report.worker.blocks_used
        if report.router is not None:
            found.held += report.router.held
        if report.frontend is not None:
            found.active += report.frontend.active
            _add_traffic(found, report.frontend.minute if minute else report.frontend.recent)
        window = report.minute if minute else report.recent
        if window is not None:
            found.seconds = max(found.seconds, window.seconds)
    return found


def _add_traffic(found: Overview, windows: Iterable[ModelWindow]) -> None:
    for window in windows:
        found.seconds = max(found.seconds, window.seconds)
        found.all.add(window)
        if window.model:
            found.models.setdefault(window.model, Traffic()).add(window)


def _reports(status: ClusterStatus) -> Iterator[NodeReport]:
    return (member.report for member in status.members if member.report is not None)


def _title(status: ClusterStatus) -> str:
    count = len(status.members)
    nodes = f"{count} node{'' if count == 1 else 's'}"
    models = ", ".join(model.name for model in status.models) or "no model yet"
    return f"{alone(status) or f'cluster {status.cluster}, {nodes}'}: {models}"


def alone(status: ClusterStatus) -> str:
    """What a server without a cluster is called; empty: this is a cluster."""
    # It has one process, and nobody chose a name for its network.
    pids = {(member.host, member.pid) for member in status.members}
    http = next((member.http for member in status.members if member.http), "")
    return f"pdserve at {http}" if status.cluster == "private" and len(pids) == 1 else ""


def degradations(status: ClusterStatus) -> Iterator[tuple[str, str]]:
    """Degradations. Nodes of one process share theirs, which are listed once."""
    seen: set[tuple[str, int, str]] = set()
    for member in status.members:
        told = member.report.degraded if member.report is not None else {}
        for name in sorted({*told, *(member.degraded if member.report is None else ())}):
            key = (member.host, member.pid, name)
            if key not in seen:
                seen.add(key)
                yield member.node, f"{name}: {told[name]}" if name in told else name

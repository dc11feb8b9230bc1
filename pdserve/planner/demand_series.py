"""Defines the demand for a model as the planner sees it: by time, with what is not known of it.

`demand_reader.DemandReader` makes these records from the reports of the routers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import isfinite
from typing import TYPE_CHECKING, Final

from pdserve.perf_model.latency_model import LatencyModel

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdserve.ids import NodeId, Seconds
    from pdserve.messages.demand import FinishedRequest
    from pdserve.planner.recent_arrivals import RecentArrival

__all__ = ["DemandBucket", "DemandHealth", "DemandSeries", "believed_speed"]

_UNLEARNT: Final = LatencyModel()
_FASTEST, _SLOWEST = 0.1, 10.0
"""Speeds of workers that are believed: workers of one model differ less."""


def believed_speed(told: float) -> float:
    """A worker's speed as routers tell it, within what is believed; 1 for what is no number."""
    return min(_SLOWEST, max(_FASTEST, told)) if isfinite(told) else 1.0


@dataclass(frozen=True, slots=True)
class DemandBucket:
    """The demand for one model in one stretch of time. Parts that are estimated for silent routers
    need not be whole."""

    at: Seconds
    """Where it begins, on the planner's clock."""
    seconds: Seconds
    """How long it is."""
    arrivals: float = 0
    refused: float = 0
    """Of these, requests that ended without a worker."""
    work: Seconds = 0.0
    """Predicted prefill seconds at speed 1 of the arrivals, cached tokens left out."""
    work_squared: float = 0.0
    """The sum of the squares of those seconds."""
    kv_token_seconds: float = 0.0
    """KV tokens times the seconds that they were held, counted when they are given back."""
    output_tokens: float = 0
    first_tokens: float = 0
    finished: float = 0
    kept: Mapping[str, float] = field(default_factory=dict)
    """By objective (`ttft`, `itl`, `both`)."""
    missed: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """By objective and cause."""
    estimated: float = 0.0
    """Share of `arrivals` and `work` that is not reported but estimated, 0 to 1."""

    @property
    def work_rate(self) -> float:
        """Work per second: the number of workers of speed 1 that it keeps busy."""
        return self.work / self.seconds if self.seconds else 0.0

    def missed_for(self, objective: str) -> float:
        """Requests that missed an objective, whatever the cause."""
        return sum(self.missed.get(objective, {}).values())


@dataclass(frozen=True, slots=True)
class DemandHealth:
    """Whether the demand is known."""

    age: Seconds | None = None
    """Seconds since the oldest of the routers' newest reports, routers at rest left out; 0: all
    rest. None: no router has reported."""
    missing: tuple[NodeId, ...] = ()
    """Routers that have never reported, though they had time to."""
    silent: tuple[NodeId, ...] = ()
    """Routers that have stopped to report; their demand is estimated."""
    refused: Mapping[NodeId, str] = field(default_factory=dict)
    """Routers whose newest report made no sense, and why."""

    @property
    def known(self) -> bool:
        """True if each router has reported, in time and sensibly. No demand is known, too."""
        return self.age is not None and not (self.missing or self.silent or self.refused)

    @property
    def words(self) -> str:
        """Why the demand is not known; empty: it is."""
        said = [f"router {node} has not reported its demand" for node in self.missing]
        said += [f"router {node} no longer reports its demand" for node in self.silent]
        said += [f"router {node}: {why}" for node, why in self.refused.items()]
        if not said and self.age is None:
            said = ["no router has reported its demand"]
        return "; ".join(said)


@dataclass(frozen=True, slots=True)
class DemandSeries:
    """The demand for one model."""

    model: str
    health: DemandHealth
    """Of the routers, the same for all models."""
    buckets: tuple[DemandBucket, ...] = ()
    """Full buckets that every router has reported, the oldest first, without gaps. They begin with
    the first full one after a router's first report."""
    rest: DemandBucket | None = None
    """What came after `buckets`, as far as it is reported: it still grows. None: no time has
    passed since."""
    total: DemandBucket | None = None
    """Everything since the first report; estimates left out."""
    arrivals: tuple[RecentArrival, ...] = ()
    """Arrivals of the last 300 s, the oldest first."""
    lengths: tuple[FinishedRequest, ...] = ()
    """Lengths of the newest finished requests, the oldest first."""
    older_lengths: tuple[FinishedRequest, ...] = ()
    """Lengths of the newest finished requests of each order of prompt lengths."""
    held: int = 0
    """Requests that wait in routers now."""
    held_work: Seconds = 0.0
    """Their predicted prefill seconds at speed 1."""
    held_oldest: Seconds = 0.0
    """Seconds that the oldest of them has waited."""
    times: LatencyModel = _UNLEARNT
    """As learnt by the router that has seen most first tokens."""
    speeds: Mapping[NodeId, float] = field(default_factory=dict)
    """Factor by which each worker is slower than `times`; workers that are left out have 1."""
    first_tokens: int = 0
    """First tokens that the routers have seen since they began."""
    prediction_poor: bool = False
    """True if the predictions behind `times` and `work` have been wrong for a while."""

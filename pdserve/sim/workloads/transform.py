"""Transforms a trace before its replay: other arrivals, a part of it, jitter, speed, a limit.

The steps run in this order: the part refers to the original times, and the limit counts the final
requests. Requests that follow a dropped one are dropped too. Memory is bounded by the arrivals
within one jitter, plus one number per kept request.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING

from pdserve.errors import ConfigError
from pdserve.sim.workloads.lines import YEAR

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pdserve.ids import Seconds
    from pdserve.sim.workloads.trace_request import TraceRequest

__all__ = ["TraceTransform", "transform_trace"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceTransform:
    """How a trace is changed before its replay."""

    begin: float = 0.0
    end: float = 1.0
    """End of the part that is replayed; it and `begin` are fractions of the trace's time."""
    jitter: Seconds = 0.0
    """Each arrival is delayed by up to this many seconds: for timestamps that are multiples of
    it."""
    speed: float = 1.0
    """Divides the times between arrivals, and nothing else."""
    limit: int = 0
    """Most requests; 0: all."""
    seed: int = 0
    """Seed of the jitter and of drawn arrivals."""
    rate: float = 0.0
    """Requests per second whose arrivals are drawn instead of the trace's; 0: the trace's. Requests
    that follow others keep their conversation's."""

    def __post_init__(self) -> None:
        """Raises `ConfigError`."""
        if not 0 <= self.begin < self.end <= 1:
            raise ConfigError(
                f"the part {self.begin:g}:{self.end:g} is empty: give two fractions from 0 to 1"
            )
        if self.jitter < 0:
            raise ConfigError(f"jitter {self.jitter:g} must not be negative")
        if not self.speed > 0:
            raise ConfigError(f"speed {self.speed:g} must be positive")
        if self.rate < 0:
            raise ConfigError(f"rate {self.rate:g} must not be negative")
        if self.limit < 0:
            raise ConfigError(f"limit {self.limit} must not be negative (0: no limit)")


def transform_trace(trace: Iterable[TraceRequest], shape: TraceTransform) -> Iterator[TraceRequest]:
    """Yield the requests in order of arrival, from time 0; reads `trace` twice if only a part of it
    is wanted. Errors: `ConfigError` for an arrival more than a year after the beginning."""
    if shape.rate:
        trace = _Drawn(trace, shape)
    begin, end = 0.0, float("inf")
    if (shape.begin, shape.end) != (0.0, 1.0):
        last = max((request.at for request in trace), default=0.0)
        begin, end = shape.begin * last, shape.end * last
        if shape.end == 1.0:
            end = float("inf")
    kept = _limited(_jittered(_part(trace, begin, end), shape), shape.limit)
    for request in kept:
        at = (request.at - begin) / shape.speed
        if at > YEAR:
            raise ConfigError(
                f"request {request.number} arrives {at / YEAR:.3g} years after the beginning, and "
                "the replay would not end: give a greater --speed or --rate, or a smaller --jitter"
            )
        yield replace(request, at=at)


class _Drawn:
    """A trace with arrivals of a Poisson process, the same in each iteration."""

    def __init__(self, trace: Iterable[TraceRequest], shape: TraceTransform) -> None:
        self._trace = trace
        self._shape = shape

    def __iter__(self) -> Iterator[TraceRequest]:
        random, at = Random(f"arrivals {self._shape.seed}"), 0.0
        for request in self._trace:
            if request.after is None:
                at += random.expovariate(self._shape.rate)
            yield replace(request, at=at)


def _part(trace: Iterable[TraceRequest], begin: Seconds, end: Seconds) -> Iterator[TraceRequest]:
    return (request for request in trace if begin <= request.at < end)


def _jittered(trace: Iterable[TraceRequest], shape: TraceTransform) -> Iterator[TraceRequest]:
    """Sorted by their new arrival; traces are sorted by their old one, or nearly so."""
    random = Random(f"jitter {shape.seed}")
    waiting: list[tuple[Seconds, int, TraceRequest]] = []
    for request in trace:
        while waiting and waiting[0][0] <= request.at:
            yield heapq.heappop(waiting)[2]
        at = request.at
        if shape.jitter:
            # One draw for a conversation, whose requests keep their order.
            own = Random(f"jitter {shape.seed} {request.session}") if request.session else random
            at += own.uniform(0.0, shape.jitter)
        heapq.heappush(waiting, (at, request.number, replace(request, at=at)))
    while waiting:
        yield heapq.heappop(waiting)[2]


def _limited(trace: Iterable[TraceRequest], limit: int) -> Iterator[TraceRequest]:
    kept: set[int] = set()
    for request in trace:
        if request.after is not None and request.after not in kept:
            continue
        kept.add(request.number)
        yield request
        if len(kept) == limit:
            return

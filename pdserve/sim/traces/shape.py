"""What is done to a trace before it is replayed: a part of it, jitter, another speed, a limit.

In this order, so that a part is one of the trace as it was written, and the limit counts what is
asked. Requests that follow one that was left out are left out, too. Memory is bounded by what
arrives within one jitter, and by one number per request that is kept.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING

from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pdserve.ids import Seconds
    from pdserve.sim.traces.base import TraceRequest

__all__ = ["Shape", "shaped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How a trace is replayed."""

    begin: float = 0.0
    end: float = 1.0
    """The part that is asked, in fractions of the trace's time."""
    jitter: Seconds = 0.0
    """Each arrival is put off by up to this: for timestamps that are multiples of it."""
    speed: float = 1.0
    """Time between arrivals is divided by it; nothing else is."""
    limit: int = 0
    """Requests at most; 0: all."""
    seed: int = 0
    """Of the jitter."""

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
        if self.limit < 0:
            raise ConfigError(f"limit {self.limit} must not be negative (0: no limit)")


def shaped(trace: Iterable[TraceRequest], shape: Shape) -> Iterator[TraceRequest]:
    """In order of arrival, from 0; `trace` is read twice if a part of it is wanted."""
    begin, end = 0.0, float("inf")
    if (shape.begin, shape.end) != (0.0, 1.0):
        last = max((request.at for request in trace), default=0.0)
        begin, end = shape.begin * last, shape.end * last
        if shape.end == 1.0:
            end = float("inf")
    kept = _limited(_jittered(_part(trace, begin, end), shape), shape.limit)
    for request in kept:
        yield replace(request, at=(request.at - begin) / shape.speed)


def _part(trace: Iterable[TraceRequest], begin: Seconds, end: Seconds) -> Iterator[TraceRequest]:
    return (request for request in trace if begin <= request.at < end)


def _jittered(trace: Iterable[TraceRequest], shape: Shape) -> Iterator[TraceRequest]:
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

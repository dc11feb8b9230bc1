"""Defines the objective of a plan, and counts the requests of a replay that keep it. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.ids import Seconds
    from pdserve.sim.replay.record import ReplayRecord

__all__ = ["Objective", "ObjectivePart", "SloLimit", "SloTally"]

_EPSILON: Final = 1e-9
"""Shares such as 0.99 are not exact in binary."""


class SloLimit(NamedTuple):
    """A limit of one time of a request."""

    time: Seconds
    share: float | None = None
    """Share of the requests that must keep this limit alone; None: the limit is one of those that
    a good request keeps together."""


class ObjectivePart(NamedTuple):
    """A share of the requests that must keep some limits together."""

    names: tuple[str, ...]
    """`ttft`, `itl` or both."""
    share: float

    def allowed(self, total: int) -> int:
        """Most requests of `total` that may miss."""
        return int((1 - self.share) * total + _EPSILON)


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """What a cluster must keep. A request that is not answered misses every limit."""

    ttft: SloLimit | None = None
    itl: SloLimit | None = None
    """Limit of a request's mean inter-token latency."""
    cold: float = 0.0
    """Adds this many times the prompt's time on an idle worker to `ttft`."""
    good: float = 0.99
    """Share of the requests that must keep the limits without a share of their own."""

    @property
    def limits(self) -> dict[str, SloLimit]:
        """The limits by name."""
        pairs = (("ttft", self.ttft), ("itl", self.itl))
        return {name: limit for name, limit in pairs if limit is not None}

    @property
    def parts(self) -> tuple[ObjectivePart, ...]:
        """All that must hold at once."""
        limits = self.limits
        joint = tuple(name for name, limit in limits.items() if limit.share is None)
        own = [ObjectivePart((n,), x.share) for n, x in limits.items() if x.share is not None]
        return (*([ObjectivePart(joint, self.good)] if joint else []), *own)

    def misses(self, record: ReplayRecord, idle: Callable[[int], Seconds]) -> frozenset[str]:
        """The limits that the request misses; `idle`: seconds to the first token by length."""
        if not record.completed:
            return frozenset(self.limits)
        found = set()
        if self.ttft is not None:
            allowed = self.ttft.time + (self.cold * idle(record.prompt_tokens) if self.cold else 0)
            if record.ttft > allowed:
                found.add("ttft")
        if self.itl is not None and record.itl > self.itl.time:
            found.add("itl")
        return frozenset(found)


class SloTally:
    """Counts the requests of one replay, which has `total` of them."""

    def __init__(self, objective: Objective, total: int) -> None:
        self._parts = objective.parts
        self.total = total
        self.ended = 0
        self.missed = dict.fromkeys(objective.limits, 0)
        """Requests that missed each limit."""
        self.part_missed = [0] * len(self._parts)

    def count(self, misses: frozenset[str]) -> None:
        """One more request has ended, and missed these limits."""
        self.ended += 1
        for name in misses:
            self.missed[name] += 1
        for index, part in enumerate(self._parts):
            self.part_missed[index] += not misses.isdisjoint(part.names)

    @property
    def lost(self) -> bool:
        """True if the objective is missed, whatever the other requests do."""
        return any(
            missed > part.allowed(self.total)
            for part, missed in zip(self._parts, self.part_missed, strict=True)
        )

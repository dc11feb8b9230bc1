"""Holds the result of each request of a replay, as its client saw it."""

from __future__ import annotations

from array import array
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final

from pdserve.errors import (
    DeadlineExceeded,
    NoRouter,
    NotReady,
    NoWorker,
    Overloaded,
    WorkerLost,
)

if TYPE_CHECKING:
    from pdserve.errors import PdserveError
    from pdserve.ids import Seconds
    from pdserve.messages.request import FirstTokenStats, TokenDelta

__all__ = ["OUTCOMES", "ReplayRecord", "outcome_of"]

OUTCOMES: Final = (
    "completed",
    "cancelled",
    "rejected",
    "deadline",
    "no worker",
    "lost",
    "failed",
    "not asked",
)
"""Each request of a trace has exactly one. `not asked`: it follows a request that did not complete,
so it could not be sent."""


@dataclass(slots=True, kw_only=True)
class ReplayRecord:
    """One request; times are seconds since the trace's beginning, -1: never."""

    number: int
    arrival: Seconds
    prompt_tokens: int
    wanted_tokens: int
    session: str = ""
    tenant: str = ""
    routed: Seconds = -1.0
    """The time when a worker accepted it."""
    first: Seconds = -1.0
    end: Seconds = -1.0
    worker: str = ""
    router: str = ""
    cached_tokens: int = 0
    output_tokens: int = 0
    queue_seconds: Seconds = 0.0
    """Seconds in the engine before anything was computed for it."""
    prefill_seconds: Seconds = 0.0
    predicted: Seconds = -1.0
    """Predicted time to first token, from arrival as `ttft`; -1: no prediction."""
    held: Seconds = 0.0
    """Seconds that the router held it."""
    preemptions: int = 0
    prefill: str = ""
    """`remote` or `local`: where its prompt was prefilled; empty: its worker had no choice."""
    prefill_worker: str = ""
    prefill_reason: str = ""
    received_tokens: int = 0
    """Prompt tokens whose KV came from the prefill worker."""
    sources: dict[str, int] = field(default_factory=dict)
    """Those of `cached_tokens` that were not on the device, by where they were."""
    outcome: str = ""
    reason: str = ""
    last: Seconds = -1.0
    """The time when its last tokens came."""
    gaps: array[float] = field(default_factory=lambda: array("d"))
    """Times between tokens: duration, count, duration, count, … Tokens of steps that the engine
    simulated as one count as evenly spaced, because nothing disturbs such steps."""

    @property
    def completed(self) -> bool:
        return self.outcome == "completed"

    @property
    def ttft(self) -> Seconds:
        """Seconds from arrival to the first token; -1: there was none."""
        return -1.0 if self.first < 0 else self.first - self.arrival

    @property
    def itl(self) -> Seconds:
        """Mean seconds between its tokens; -1 with fewer than two. A mean, because several tokens
        may come at once."""
        if self.output_tokens < 2 or self.end < 0:
            return -1.0
        return (self.end - self.first) / (self.output_tokens - 1)

    @property
    def steps(self) -> list[tuple[Seconds, int]]:
        """Times between its tokens, each with its count."""
        return [
            (gap, int(times)) for gap, times in zip(self.gaps[::2], self.gaps[1::2], strict=True)
        ]

    def plain(self) -> dict[str, Any]:
        """The record for JSON, without its long fields."""
        made = asdict(self)
        del made["gaps"], made["last"]
        return made

    def take(self, delta: TokenDelta, at: Seconds) -> None:
        """Note that tokens have come."""
        if delta.started is not None:
            self._started(delta.started)
        if delta.tokens:
            count = len(delta.tokens)
            if self.first < 0:
                self.first = at
            else:
                self.gaps.extend(((at - self.last) / count, count))
            self.last = at
            self.output_tokens += count
        if delta.finish is not None:
            finish = delta.finish
            self.cached_tokens = finish.cached_tokens
            self.queue_seconds = finish.queue_seconds
            self.prefill_seconds = finish.prefill_seconds
            self.preemptions = finish.preemptions

    def _started(self, started: FirstTokenStats) -> None:
        for one in started.sources:
            self.sources[one.source] = self.sources.get(one.source, 0) + one.tokens
        if started.prefill:
            self._prefilled(started)

    def _prefilled(self, started: FirstTokenStats) -> None:
        """Reads the value of the header `x-pdserve-prefill`: `remote; node=p1; reason=rule`."""
        where, node, reason = started.prefill.split("; ")
        self.prefill = where
        self.prefill_worker = node.removeprefix("node=")
        self.prefill_reason = reason.removeprefix("reason=")
        self.received_tokens = started.received_tokens


def outcome_of(error: PdserveError) -> str:
    """The outcome of a request that ended with `error`."""
    kinds: tuple[tuple[type[PdserveError] | tuple[type[PdserveError], ...], str], ...] = (
        (Overloaded, "rejected"),
        (DeadlineExceeded, "deadline"),
        ((NoWorker, NoRouter, NotReady), "no worker"),
        (WorkerLost, "lost"),
    )
    return next((word for kind, word in kinds if isinstance(error, kind)), "failed")

"""What became of each request, as its caller saw it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

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
    from pdserve.messages.request import TokenDelta

__all__ = ["OUTCOMES", "Record", "outcome_of"]

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
"""Each request of a trace ends in exactly one. `not asked`: the one that it follows did not end
well, so there is nothing to follow."""


@dataclass(slots=True, kw_only=True)
class Record:
    """One request; moments are seconds since the trace's begin, -1: never."""

    number: int
    arrival: Seconds
    prompt_tokens: int
    wanted_tokens: int
    session: str = ""
    tenant: str = ""
    routed: Seconds = -1.0
    """A worker has taken it."""
    first: Seconds = -1.0
    end: Seconds = -1.0
    worker: str = ""
    router: str = ""
    cached_tokens: int = 0
    output_tokens: int = 0
    queue_seconds: Seconds = 0.0
    """In the engine, before anything was computed for it."""
    prefill_seconds: Seconds = 0.0
    predicted: Seconds = -1.0
    """Time to its first token, as `ttft`; -1: no prediction."""
    held: Seconds = 0.0
    """By the router, before it answered."""
    preemptions: int = 0
    outcome: str = ""
    reason: str = ""

    @property
    def completed(self) -> bool:
        return self.outcome == "completed"

    @property
    def ttft(self) -> Seconds:
        """From arrival to the first token; -1: there was none."""
        return -1.0 if self.first < 0 else self.first - self.arrival

    @property
    def itl(self) -> Seconds:
        """Mean time between its tokens; -1 with fewer than two. A mean, because several tokens may
        come at once."""
        if self.output_tokens < 2 or self.end < 0:
            return -1.0
        return (self.end - self.first) / (self.output_tokens - 1)

    def take(self, delta: TokenDelta, at: Seconds) -> None:
        """Tokens have come."""
        if delta.tokens:
            if self.first < 0:
                self.first = at
            self.output_tokens += len(delta.tokens)
        if delta.finish is not None:
            finish = delta.finish
            self.cached_tokens = finish.cached_tokens
            self.queue_seconds = finish.queue_seconds
            self.prefill_seconds = finish.prefill_seconds
            self.preemptions = finish.preemptions


def outcome_of(error: PdserveError) -> str:
    """How a request ended that ended in `error`."""
    kinds: tuple[tuple[type[PdserveError] | tuple[type[PdserveError], ...], str], ...] = (
        (Overloaded, "rejected"),
        (DeadlineExceeded, "deadline"),
        ((NoWorker, NoRouter, NotReady), "no worker"),
        (WorkerLost, "lost"),
    )
    return next((word for kind, word in kinds if isinstance(error, kind)), "failed")

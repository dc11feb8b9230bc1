"""Decides which traces are kept: by the caller's wish, by lot, or for what happened.

`tail_reasons` is the rule for what happened, a pure function of what is known at a request's end.
Token buckets bound how many traces are kept: one for all, and one for those that only callers ask
for. `tracer.py` joins them.
"""

from __future__ import annotations

from typing import Final

import msgspec

from pdserve.ids import Seconds

__all__ = [
    "FOREIGN_RATE",
    "Allowance",
    "RequestFacts",
    "tail_reasons",
]

FOREIGN_RATE: Final = 20.0
"""Traces per second that are kept for callers' sampled bits with `limit`."""


class RequestFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a request at its end, as far as the rule needs it."""

    failed: bool = False
    """It ended with a 5xx, or with an error in its stream. A client's mistakes, refusals for too
    many requests, and clients that leave do not count."""
    ttft: Seconds | None = None
    itl: Seconds | None = None
    """Mean seconds between two tokens; None: there were fewer than two."""
    slo_ttft: Seconds | None = None
    slo_itl: Seconds | None = None
    moves: int = 0
    preemptions: int = 0
    attempts: int = 0
    """The most attempts of one of its prompts."""
    prefill_failed: bool = False
    """Another worker was to prefill a prompt, and did not."""


def tail_reasons(facts: RequestFacts) -> tuple[str, ...]:
    """Why the trace of a request is worth keeping for what happened; empty: it is not."""
    reasons: tuple[str, ...] = ()
    if facts.failed:
        reasons += ("error",)
    if _over(facts.ttft, facts.slo_ttft):
        reasons += ("slo_ttft",)
    if _over(facts.itl, facts.slo_itl):
        reasons += ("slo_itl",)
    if facts.moves:
        reasons += ("moved",)
    if facts.preemptions:
        reasons += ("preempted",)
    if facts.attempts > 1:
        reasons += ("retried",)
    if facts.prefill_failed:
        reasons += ("prefill_failed",)
    return reasons


def _over(value: Seconds | None, limit: Seconds | None) -> bool:
    return value is not None and limit is not None and value > limit


class Allowance:
    """A token bucket: so many per second, and as many at once as in one second, but at least 1."""

    __slots__ = ("_at", "_left", "_most", "_rate", "refused")

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._most = max(1.0, rate) if rate > 0 else 0.0
        self._left = self._most
        self._at: Seconds | None = None
        self.refused = 0

    def take(self, now: Seconds) -> bool:
        """Takes one; returns False if none is left."""
        if self._at is not None and now > self._at:
            self._left = min(self._most, self._left + (now - self._at) * self._rate)
        self._at = now if self._at is None else max(self._at, now)
        if self._left < 1.0:
            self.refused += 1
            return False
        self._left -= 1.0
        return True

"""Counts outcomes of prompts, attempts and claims for metrics and status."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdserve.ids import Seconds
    from pdserve.observe.metrics import Metrics

__all__ = ["DisaggCounters"]


class DisaggCounters:
    """The counters of one worker's node."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self.remote: Counter[str] = Counter()
        self.local: Counter[str] = Counter()
        self.attempts: Counter[str] = Counter()
        self.claims: Counter[str] = Counter()

    def decided(self, *, remote: bool, reason: str) -> None:
        """Counts one prompt, prefilled remotely or here, and why."""
        (self.remote if remote else self.local)[reason] += 1
        where = "remote" if remote else "local"
        self._metrics.prefill_decisions.labels(where, reason).inc()

    def attempt(self, outcome: str) -> None:
        """Counts one attempt that is over."""
        self.attempts[outcome] += 1
        self._metrics.handoff_attempts.labels(outcome).inc()

    def claim(self, outcome: str) -> None:
        """Counts one claim that is over."""
        self.claims[outcome] += 1
        self._metrics.handoff_claims.labels(outcome).inc()

    def phase(self, name: str, seconds: Seconds) -> None:
        """Records the duration of one phase of a handoff."""
        self._metrics.handoff_seconds.labels(name).observe(seconds)

"""What became of prompts and attempts, counted for metrics and status."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdserve.ids import Seconds
    from pdserve.observe.metrics import Metrics

__all__ = ["DecodeNumbers", "PrefillNumbers", "Tally"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeNumbers:
    """A decode worker's, at one moment; what is counted grows while the process lives."""

    mode: str = ""
    """How it is decided where prompts are prefilled."""
    remote: dict[str, int] = field(default_factory=dict)
    """Prompts that came from a prefill worker, by reason."""
    local: dict[str, int] = field(default_factory=dict)
    """Prompts that were prefilled here, by reason."""
    attempts: dict[str, int] = field(default_factory=dict)
    """Ended attempts by outcome."""
    states: dict[str, int] = field(default_factory=dict)
    """Requests that are under way to their first token, by state."""

    @property
    def lost(self) -> int:
        """Attempts that came to nothing while the request was still wanted."""
        return sum(self.attempts.get(word, 0) for word in LOST)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillNumbers:
    """A prefill worker's, at one moment."""

    claims: dict[str, int] = field(default_factory=dict)
    """Ended claims by outcome."""
    states: dict[str, int] = field(default_factory=dict)
    """Claims in hand, by state."""
    uncomputed_tokens: int = 0
    credits: int = 0


LOST = ("lost", "failed", "lapsed", "died", "superseded")


class Tally:
    """The counters of one worker's node."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self.remote: Counter[str] = Counter()
        self.local: Counter[str] = Counter()
        self.attempts: Counter[str] = Counter()
        self.claims: Counter[str] = Counter()

    def decided(self, *, remote: bool, reason: str) -> None:
        """A prompt has come from elsewhere, or is prefilled here."""
        (self.remote if remote else self.local)[reason] += 1
        where = "remote" if remote else "local"
        self._metrics.prefill_decisions.labels(where, reason).inc()

    def attempt(self, outcome: str) -> None:
        """An attempt is over."""
        self.attempts[outcome] += 1
        self._metrics.handoff_attempts.labels(outcome).inc()

    def claim(self, outcome: str) -> None:
        """A claim is over."""
        self.claims[outcome] += 1
        self._metrics.handoff_claims.labels(outcome).inc()

    def phase(self, name: str, seconds: Seconds) -> None:
        """A handoff has passed a phase."""
        self._metrics.handoff_seconds.labels(name).observe(seconds)

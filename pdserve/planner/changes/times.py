"""How long starts and drains take, and which kinds of workers cannot be started now. Pure.

Times are measured, because they differ a hundredfold between engines and machines. Until one has
been seen, a prior stands for it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, Final, Literal

from pdserve.backoff import backoff_delay

if TYPE_CHECKING:
    from pdserve.ids import Seconds
    from pdserve.planner.config import PlannerConfig

__all__ = ["KindHealth", "Phase", "Spread", "StartTimes"]

Phase = Literal["start", "boot", "drain"]
"""`start`: from the order to a worker that serves; `boot`: the part of it in which the process
runs; `drain`: from the order until the worker is gone."""
_KEPT: Final = 20
"""Times that are kept of a kind: enough for a p90, few enough to forget an old image."""


class Spread:
    """The newest times of one thing."""

    def __init__(self, prior: Seconds) -> None:
        self._prior = prior
        self._times: deque[Seconds] = deque(maxlen=_KEPT)

    def add(self, time: Seconds) -> None:
        """One more time; negative ones count as 0."""
        self._times.append(max(0.0, time))

    def quantile(self, share: float) -> Seconds:
        """The smallest time that at least this share does not exceed; without times the prior."""
        if not self._times:
            return self._prior
        ordered = sorted(self._times)
        return ordered[max(0, ceil(share * len(ordered)) - 1)]

    def __len__(self) -> int:
        return len(self._times)


class StartTimes:
    """The times of all kinds."""

    def __init__(self, config: PlannerConfig) -> None:
        self._config = config
        self._spreads: dict[tuple[Phase, str], Spread] = {}

    def add(self, phase: Phase, kind: str, time: Seconds) -> None:
        """One start or drain of a kind took this long."""
        self._spread(phase, kind).add(time)

    def p50(self, phase: Phase, kind: str) -> Seconds:
        """The median."""
        return self._spread(phase, kind).quantile(0.5)

    def p90(self, phase: Phase, kind: str) -> Seconds:
        """What nine of ten do not exceed."""
        return self._spread(phase, kind).quantile(0.9)

    def _spread(self, phase: Phase, kind: str) -> Spread:
        config = self._config
        prior = config.drain_prior if phase == "drain" else config.start_prior
        return self._spreads.setdefault((phase, kind), Spread(prior))


@dataclass(slots=True)
class _Health:
    failures: int = 0
    until: Seconds = 0.0
    reason: str = ""
    disabled: bool = False


class KindHealth:
    """Which kinds are left alone, and why."""

    def __init__(self, config: PlannerConfig) -> None:
        self._config = config
        self._kinds: dict[str, _Health] = {}

    def ready(self, kind: str) -> None:
        """A worker of the kind serves: its failures are forgotten."""
        self._kinds.pop(kind, None)

    def failed(self, kind: str, now: Seconds, reason: str) -> None:
        """A start of the kind failed."""
        health, config = self._kinds.setdefault(kind, _Health()), self._config
        delay = backoff_delay(config.start_backoff, config.start_backoff_most, health.failures)
        health.failures += 1
        health.until, health.reason = max(health.until, now + delay), reason
        health.disabled = health.disabled or health.failures >= config.start_failures

    def away(self, kind: str, until: Seconds, reason: str) -> None:
        """The kind is not to be had until then; no failure of its own."""
        health = self._kinds.setdefault(kind, _Health())
        health.until, health.reason = max(health.until, until), reason

    def disable(self, kind: str, reason: str) -> None:
        """The kind is not started any more, until `enable`."""
        health = self._kinds.setdefault(kind, _Health())
        health.disabled, health.reason = True, reason

    def enable(self, kind: str) -> None:
        """An operator has mended it."""
        self._kinds.pop(kind, None)

    def blocked(self, kind: str, now: Seconds) -> str:
        """Why the kind is not started now, in words; empty: it may be."""
        health = self._kinds.get(kind)
        if health is None:
            return ""
        if health.disabled:
            return f"kind {kind!r} is disabled: {health.reason}"
        if now < health.until:
            return f"kind {kind!r} waits {health.until - now:.0f} s more: {health.reason}"
        return ""

    def disabled(self) -> dict[str, str]:
        """The disabled kinds, and why."""
        return {name: one.reason for name, one in self._kinds.items() if one.disabled}

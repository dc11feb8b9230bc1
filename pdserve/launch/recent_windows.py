"""Makes the windows of the last seconds that status reports have, from a process's instruments."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from pdserve.messages.status import EngineWindow, LatencyCounts, ModelWindow
from pdserve.observe.recent import WINDOWS, Recent, trimmed

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.ids import Seconds
    from pdserve.observe.instruments import Histogram
    from pdserve.observe.metrics import Metrics
    from pdserve.worker.service import WorkerService

__all__ = ["EngineRecent", "FrontendRecent"]

_OURS: Final = frozenset({"overloaded", "unavailable", "deadline", "error"})
"""Outcomes of requests that failed by the servers' fault."""


@dataclass(slots=True)
class _ModelCounts:
    """What the counters of one model say."""

    requests: int = 0
    errors: int = 0
    prompt_tokens: int = 0
    uncached_tokens: int = 0
    ttft: tuple[int, ...] = ()
    itl: tuple[int, ...] = ()
    slo: dict[str, tuple[int, int]] = field(default_factory=dict)


_NOTHING: Final = _ModelCounts()


class FrontendRecent:
    """The recent requests of a frontend, by model."""

    def __init__(self, metrics: Metrics, now: Callable[[], Seconds]) -> None:
        self._metrics = metrics
        self._now = now
        self._recent = Recent(now(), self._counts())

    def note(self) -> None:
        """Keeps a sample; to be called about once a second, and before counters change that were
        at rest."""
        self._recent.note(self._now(), self._counts())

    def windows(self) -> tuple[tuple[ModelWindow, ...], ...]:
        """One per model for each of `WINDOWS`; models without requests in it are left out."""
        self.note()
        counts, now = self._counts(), self._now()
        return tuple(self._window(counts, now, seconds) for seconds in WINDOWS)

    def _window(
        self, counts: dict[str, _ModelCounts], now: Seconds, seconds: Seconds
    ) -> tuple[ModelWindow, ...]:
        age, then = self._recent.since(now, seconds)
        return tuple(
            self._model(model, age, those, then.get(model, _NOTHING))
            for model, those in counts.items()
            if those != then.get(model)
        )

    def _model(
        self, model: str, seconds: Seconds, now: _ModelCounts, then: _ModelCounts
    ) -> ModelWindow:
        metrics = self._metrics
        first = metrics.time_to_first_token.labels(model).bounds
        between = metrics.inter_token_latency.labels(model).bounds
        return ModelWindow(
            model=model,
            seconds=round(seconds, 3),
            requests=now.requests - then.requests,
            errors=now.errors - then.errors,
            prompt_tokens=now.prompt_tokens - then.prompt_tokens,
            uncached_tokens=now.uncached_tokens - then.uncached_tokens,
            output_tokens=sum(now.ttft) + sum(now.itl) - sum(then.ttft) - sum(then.itl),
            ttft=LatencyCounts(*trimmed(first, now.ttft, then.ttft)),
            itl=LatencyCounts(*trimmed(between, now.itl, then.itl)),
            slo=_grown(now.slo, then.slo),
        )

    def _counts(self) -> dict[str, _ModelCounts]:
        metrics = self._metrics
        found: dict[str, _ModelCounts] = {}

        def of(model: str) -> _ModelCounts:
            return found.setdefault(model, _ModelCounts())

        for (model, outcome), counter in metrics.requests:
            counts = of(model)
            counts.requests += int(counter.value)
            counts.errors += int(counter.value) if outcome in _OURS else 0
        for (model,), histogram in metrics.time_to_first_token:
            of(model).ttft = tuple(histogram.counts)
        for (model,), histogram in metrics.inter_token_latency:
            of(model).itl = tuple(histogram.counts)
        for (model,), histogram in metrics.request_prompt_tokens:
            of(model).prompt_tokens = _sum(histogram)
        for (model,), histogram in metrics.request_uncached_tokens:
            of(model).uncached_tokens = _sum(histogram)
        for (model, objective, result, _), counter in metrics.slo:
            good, bad = of(model).slo.get(objective, (0, 0))
            kept, missed = counter.value * (result == "good"), counter.value * (result == "bad")
            of(model).slo[objective] = (good + int(kept), bad + int(missed))
        return found


def _sum(histogram: Histogram) -> int:
    return int(histogram.sum)


def _grown(
    now: dict[str, tuple[int, int]], then: dict[str, tuple[int, int]]
) -> dict[str, tuple[int, int]]:
    found = {}
    for objective, (good, bad) in now.items():
        before = then.get(objective, (0, 0))
        found[objective] = (good - before[0], bad - before[1])
    return found


class EngineRecent:
    """What a worker's engine did recently."""

    def __init__(self, service: WorkerService, now: Callable[[], Seconds]) -> None:
        self._service = service
        self._now = now
        self._recent = Recent(now(), self._counts())

    def note(self) -> None:
        """Keeps a sample; to be called about once a second, and before counters change that were
        at rest."""
        self._recent.note(self._now(), self._counts())

    def windows(self) -> tuple[EngineWindow, ...]:
        """One for each of `WINDOWS`."""
        self.note()
        counts, now = self._counts(), self._now()
        found = []
        for seconds in WINDOWS:
            age, then = self._recent.since(now, seconds)
            grown = (a - b for a, b in zip(counts, then, strict=True))
            found.append(
                EngineWindow(seconds=round(age, 3), **dict(zip(_ENGINE, grown, strict=True)))
            )
        return tuple(found)

    def _counts(self) -> tuple[int, ...]:
        sample = self._service.sample()
        return tuple(getattr(sample, name) for name in _ENGINE)


_ENGINE: Final = (
    "prompt_tokens",
    "cached_tokens",
    "computed_tokens",
    "output_tokens",
    "preemptions",
)
"""Counters of an engine, by the names of its sample."""

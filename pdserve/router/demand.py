"""Counts the demand for each model as this router sees it, for planners. Pure.

    arrived      a request came for the first time, whatever becomes of it
    refused      it ended here without a worker
    first_token  a booking's first token has come
    kv_held      a booking has ended: the KV of its prompt
    ended        a frontend tells how a client's request ended: verdicts, lengths, KV of the output

Counters only grow. They do not know who reads them: `report` makes the record that travels. Models
are bounded as the predictor's are: beyond `MAX_MODELS` the one without news for longest is
forgotten, and begins a new count when it returns. `RouterCore` owns it.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from msgspec.structs import replace

from pdserve.messages.demand import (
    RECENT_LIMIT,
    Arrival,
    DemandReport,
    FinishedRequest,
    ModelDemand,
    ModelTimes,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pdserve.ids import NodeId, Seconds
    from pdserve.messages.demand import EndedRequest

__all__ = ["MAX_MODELS", "DemandCounters", "HeldDemand", "LearntTimes"]

MAX_MODELS: Final = 64
"""Models that are counted at once, as `PredictorConfig.max_models`."""
_MAX_WORDS: Final = 16
"""Objectives, and causes of one objective, that are counted apart. They are words of frontends,
perhaps of a later release; beyond, they count as `other`."""
_OTHER: Final = "other"
_MOST: Final = 1e9
"""Tokens, and seconds, beyond which what is told of one request makes no sense. A sum of them would
never be a number again, and no planner would know the demand."""


class HeldDemand(NamedTuple):
    """The requests of one model that wait in the router."""

    requests: int = 0
    work: Seconds = 0.0
    oldest: Seconds = 0.0
    """Seconds that the oldest of them has waited."""


class LearntTimes(NamedTuple):
    """What the predictor has learnt of one model."""

    times: ModelTimes = ModelTimes()
    speeds: Mapping[NodeId, float] = {}
    poor: bool = False


@dataclass(slots=True)
class _Count:
    """The counters of one model; `messages.demand.ModelDemand` explains them."""

    number: int
    began: Seconds
    touched: Seconds
    arrivals: int = 0
    refused: int = 0
    work: float = 0.0
    work_squared: float = 0.0
    kv_token_seconds: float = 0.0
    finished: int = 0
    output_tokens: int = 0
    first_tokens: int = 0
    kept: Counter[str] = field(default_factory=Counter)
    missed: dict[str, Counter[str]] = field(default_factory=dict)
    recent: deque[tuple[Seconds, int, int, int, float]] = field(
        default_factory=lambda: deque(maxlen=RECENT_LIMIT)
    )
    """The fields of `Arrival`; the records are made for a report."""
    ended: deque[FinishedRequest] = field(default_factory=lambda: deque(maxlen=RECENT_LIMIT))


class DemandCounters:
    """The demand at one router. Times are the router's."""

    def __init__(self) -> None:
        self._counts: dict[str, _Count] = {}
        self._begun = 0
        """Counts that were ever begun."""
        self._reports = 0
        self._since: Seconds | None = None
        """When the first thing happened that no report contains; None: nothing has."""

    @property
    def changed(self) -> bool:
        """True if something has happened since the last report."""
        return self._since is not None

    def arrived(
        self, now: Seconds, model: str, prompt: int, cached: int, choices: int, work: Seconds
    ) -> None:
        """A request came for the first time. `cached`: of its `prompt` tokens those that the worker
        with the most has; `work`: predicted prefill seconds of the others at speed 1."""
        count = self._touch(now, model)
        work = work if work < _MOST else 0.0
        count.arrivals += 1
        count.work += work
        count.work_squared += work * work
        count.recent.append((now, prompt, cached, choices, work))

    def refused(self, now: Seconds, model: str) -> None:
        """One of the requests that arrived has ended without a worker."""
        self._touch(now, model).refused += 1

    def first_token(self, now: Seconds, model: str) -> None:
        """The first token of a booking has come."""
        self._touch(now, model).first_tokens += 1

    def kv_held(self, now: Seconds, model: str, tokens: int, seconds: Seconds) -> None:
        """A booking has ended that held a prompt's KV for so long."""
        self._touch(now, model).kv_token_seconds += tokens * max(0.0, seconds)

    def ended(self, now: Seconds, told: EndedRequest) -> None:
        """A client's request has ended, as its frontend tells."""
        if not (told.output_tokens < _MOST and told.decode < _MOST):
            return
        count = self._touch(now, told.model)
        count.output_tokens += told.output_tokens
        count.kv_token_seconds += told.output_tokens * told.decode / 2
        if told.complete:
            count.finished += 1
            count.ended.append(
                FinishedRequest(told.prompt_tokens, told.cached_tokens, told.output_tokens)
            )
        for objective, cause in told.verdicts:
            if cause:
                name = _bounded(count.missed, objective)
                causes = count.missed.setdefault(name, Counter())
                causes[_bounded(causes, cause)] += 1
            else:
                count.kept[_bounded(count.kept, objective)] += 1

    def report(
        self,
        now: Seconds,
        process: int,
        held: Callable[[str], HeldDemand],
        learnt: Callable[[str], LearntTimes],
        *,
        resting: bool = False,
    ) -> DemandReport:
        """The report of everything so far. `held` and `learnt` are asked for each model; `resting`:
        the next report may be long in coming."""
        self._reports += 1
        since = now if self._since is None else self._since
        self._since = None
        return DemandReport(
            now=now,
            process=process,
            number=self._reports,
            since=since,
            resting=resting,
            models=tuple(
                _record(name, count, held(name), learnt(name))
                for name, count in sorted(self._counts.items())
            ),
        )

    def totals(self) -> dict[str, ModelDemand]:
        """The counters by model, for metrics; without times and single requests."""
        return {name: _counted(name, count) for name, count in self._counts.items()}

    def _touch(self, now: Seconds, model: str) -> _Count:
        if self._since is None:
            self._since = now
        count = self._counts.get(model)
        if count is None:
            count = self._begin(now, model)
        count.touched = now
        return count

    def _begin(self, now: Seconds, model: str) -> _Count:
        if len(self._counts) >= MAX_MODELS:
            del self._counts[min(self._counts, key=lambda name: self._counts[name].touched)]
        self._begun += 1
        count = self._counts[model] = _Count(self._begun, now, now)
        return count


def _bounded(known: Mapping[str, object], word: str) -> str:
    return word if word in known or len(known) < _MAX_WORDS else _OTHER


def _counted(name: str, count: _Count) -> ModelDemand:
    return ModelDemand(
        model=name,
        count=count.number,
        began=count.began,
        arrivals=count.arrivals,
        refused=count.refused,
        work=count.work,
        work_squared=count.work_squared,
        kv_token_seconds=count.kv_token_seconds,
        finished=count.finished,
        output_tokens=count.output_tokens,
        first_tokens=count.first_tokens,
        kept=dict(count.kept),
        missed={objective: dict(causes) for objective, causes in count.missed.items()},
    )


def _record(name: str, count: _Count, held: HeldDemand, learnt: LearntTimes) -> ModelDemand:
    return replace(
        _counted(name, count),
        held=held.requests,
        held_work=held.work,
        held_oldest=held.oldest,
        times=learnt.times,
        speeds=dict(learnt.speeds),
        prediction_poor=learnt.poor,
        recent=tuple(Arrival(*fields) for fields in count.recent),
        ended=tuple(count.ended),
    )

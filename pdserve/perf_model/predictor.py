"""Learns a latency model per served model and a speed factor per worker, for a router.

    predicted work = speed(worker) * model(name).prefill(length, cached)

It learns from first tokens (`observe`) and from workers' load reports (`report`), and refits after
every so many of them; in between, models stay the same objects. A worker's first observations do
not count, since it warms up. `worker_gone` drops a worker; beyond `max_models`, the model without
news for longest is dropped.

Decode workers often compute short prompts only, and what a long one takes cannot be told from
these. So prompts that prefill workers computed count, too, where own ones of that kind are few.

Pure: times are arguments. The router's core owns it, feeds it and shows its verdicts (`poor`,
`calibration`); policies see models and speeds only in their snapshot.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import inf, log
from typing import TYPE_CHECKING

from msgspec import Struct

from pdserve.perf_model.latency_model import LatencyModel
from pdserve.perf_model.prediction_error import ErrorSummary, ErrorTracker, RatioWindow, bucket_of
from pdserve.perf_model.regression import (
    Coefficients,
    RegressionRow,
    StratifiedWindow,
    fit_nonnegative,
    scale_of,
)
from pdserve.perf_model.remote_prefill import RemotePrefillModel

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdserve.ids import NodeId, NodeLife, Seconds
    from pdserve.messages.handoff import QueueState
    from pdserve.messages.routing import WorkerLoad
    from pdserve.perf_model.remote_prefill import RemotePrefillEstimate

__all__ = ["Calibration", "Observation", "Predictor", "PredictorConfig"]


@dataclass(frozen=True, slots=True)
class PredictorConfig:
    """How fast the predictor learns, and when a model counts as poor."""

    skip: int = 3
    """Number of a worker's first observations that do not count: it compiles kernels then."""
    refit_every: int = 50
    """Observations between two fits of the prefill time; the first comes after `first_fit`."""
    settled_error: float = 0.05
    """Relative error below which fits are four times as rare: they would change nothing."""
    first_fit: int = 20
    refit_steps: int = 200
    """Load reports between two fits of the decode step time; the first comes after `first_fit`, if
    that is less."""
    poor_error: float = 0.4
    """Relative error above which a model is poor (`prediction_error.ErrorTracker`)."""
    poor_after: Seconds = 60.0
    """Seconds of poor error after which the model is no longer used."""
    bias_strength: float = 10.0
    """Pull of a worker's factor towards 1, as a number of observations of exactly 1."""
    bias_memory: float = 100.0
    """Number of newer observations after which one counts for a third."""
    max_models: int = 64
    """Most served models that are remembered."""


class Observation(Struct, frozen=True):
    """What a router observed of one request up to its first token."""

    model: str
    worker: NodeLife
    prompt_tokens: int
    cached_tokens: int
    """Cached prompt tokens as the worker reports them, not as the router predicted."""
    work_seconds: Seconds
    """The request's share of the compute time of its steps, in seconds."""
    queue_seconds: Seconds
    prefill_seconds: Seconds
    predicted_ttft: Seconds | None = None
    """Time to first token predicted at dispatch (wait and work); None: no prediction."""
    predicted_work: Seconds | None = None
    sequences: int = 0
    """Sequences at the worker before this request."""
    kv_tokens: int = 0
    load_age: Seconds = 0.0
    """Age of the load report that the decision was based on."""
    received_tokens: int = 0
    """Number of tokens whose KV came from another worker; 0: this one computed the prompt."""
    prefill_cached: int | None = None
    """With `received_tokens`: cached prompt tokens of the prefill worker that computed the rest in
    `work_seconds`; None: it computed none of them, but moved what it had."""
    elsewhere_wait: Seconds | None = None
    """Predicted wait in the prefill queue, if a remote prefill was predicted; else None."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """Recent ratios of observed over predicted times, for status and metrics."""

    model: str
    time: LatencyModel
    error: float
    """Relative error of the predicted work, on which `poor` is based."""
    all: ErrorSummary
    """Time to first token of all requests."""
    ttft: dict[tuple[int, int], ErrorSummary]
    """Time to first token by bucket: (least uncached tokens, least sequences)."""
    workers: dict[NodeLife, ErrorSummary]
    """Prefill work by worker."""
    speeds: dict[NodeLife, float]


@dataclass(slots=True)
class _Worker:
    """One worker epoch: how its times compare with its model. The sums decay."""

    model: str
    seen: int = 0
    speed: float = 1.0
    count: float = 0.0
    columns: tuple[float, float, float] = (0.0, 0.0, 0.0)
    observed: float = 0.0
    """Sum of observed seconds over predicted seconds at speed 1. The sums above are those of the
    model's columns: predictions are linear in them, so a new model can be compared with old
    observations without keeping those."""
    ratios: RatioWindow = field(default_factory=lambda: RatioWindow(50))
    prefilled: Seconds = -inf
    """When it was last seen to compute a prompt."""

    def add(self, row: RegressionRow, predicted: Seconds, memory: float) -> None:
        keep, weight = 1.0 - 1.0 / memory, 1.0 / predicted
        c0, c1, c2 = self.columns
        self.columns = (
            c0 * keep + weight,
            c1 * keep + weight * row.x1,
            c2 * keep + weight * row.x2,
        )
        self.count = self.count * keep + 1.0
        self.observed = self.observed * keep + weight * row.y

    def compare(self, learnt: Coefficients, strength: float) -> None:
        """Set the speed: the mean ratio, pulled towards 1 by `strength` observations of 1."""
        expected = sum(a * b for a, b in zip(learnt, self.columns, strict=True))
        if expected > 0.0:
            ratio = self.observed / expected
            self.speed = (self.count * ratio + strength) / (self.count + strength)


class _Model:
    """One served model."""

    def __init__(self, config: PredictorConfig) -> None:
        self.time = LatencyModel()
        """The latency model as policies see it."""
        self.prompts = StratifiedWindow()
        self.prompts_elsewhere = StratifiedWindow()
        """Those that prefill workers computed for others."""
        self.steps = StratifiedWindow()
        self.fits = 0
        self.new_prompts = 0
        self.new_steps = 0
        """Since the last fit of each."""
        self.step_fits = 0
        self.ratios = RatioWindow(200)
        self.buckets: dict[tuple[int, int], RatioWindow] = {}
        self.error = ErrorTracker(config.poor_error, config.poor_after)
        self.token_error = ErrorTracker(config.poor_error, config.poor_after)
        self.handoffs = RemotePrefillModel()
        self.common = 1.0
        """The worker's speed that is nearest to 1. Speeds are means over what comes, fits are means
        over kinds of prompts: where a fit is 5 % too high for the usual ones, all speeds are 0.95.
        If such speeds scaled the rows, the next fit would be higher still, and so on."""
        self.per_token: tuple[float, float] = (0.0, 0.0)
        """Decaying sums of seconds and of uncached tokens, for a model that only counts tokens."""

    @property
    def coefficients(self) -> Coefficients:
        return self.time.base, self.time.per_token, self.time.per_pair

    def set_prompts(self, rows: Sequence[RegressionRow]) -> None:
        """Fit the prefill time. Until workers have reported step times, the defaults for steps are
        scaled by the same factor as those for prompts: on most GPUs, reading the weights once takes
        as long as computing some 200 prompt tokens. A worker reports no step time while it computes
        prompts."""
        base, per_token, per_pair = fit_nonnegative(rows, _PRIOR_PREFILL)
        self.time = replace(self.time, base=base, per_token=per_token, per_pair=per_pair)
        if not self.step_fits and rows:
            faster = scale_of(_PRIOR_PREFILL, rows)
            base, sequence, token = _PRIOR_STEP
            self.set_steps((base * faster, sequence * faster, token * faster))

    def set_steps(self, steps: Coefficients) -> None:
        """Take these for the time of a decode step."""
        base, sequence, token = steps
        self.time = replace(self.time, step_base=base, step_sequence=sequence, step_token=token)

    def judge(self) -> None:
        """Update whether the learnt coefficients may be used."""
        fitted = self.fits > 0 and not self.error.poor
        blind = self.error.poor and self.token_error.poor
        if (fitted, blind) != (self.time.fitted, self.time.blind):
            self.time = replace(self.time, fitted=fitted, blind=blind)


class Predictor:
    """The predictor of one router."""

    def __init__(self, config: PredictorConfig | None = None) -> None:
        self._config = config or PredictorConfig()
        self._models: dict[str, _Model] = {}
        """Models by name; the one without news for longest comes first."""
        self._workers: dict[NodeLife, _Worker] = {}

    # ------------------------------------------------------------------ predictions

    def model(self, name: str) -> LatencyModel:
        """The learnt latency model; the default before enough observations. If it is not `fitted`,
        its predictions should not be relied on."""
        found = self._models.get(name)
        return found.time if found else _PRIOR

    def speed(self, worker: NodeLife) -> float:
        """Factor by which the worker is slower than the common model; 1 if nothing is known."""
        found = self._workers.get(worker)
        return found.speed if found else 1.0

    def speeds(self, model: str) -> dict[NodeId, float]:
        """The factors of all workers of a model that are known."""
        return {
            life.node: worker.speed
            for life, worker in self._workers.items()
            if worker.model == model
        }

    def elsewhere(
        self, model: str, queue_of: Callable[[str], QueueState | None]
    ) -> RemotePrefillEstimate | None:
        """Estimate of a remote prefill now; None if there is no prefill worker or too little is
        known. `queue_of` returns the state of a model's prefill queue."""
        found = self._models.get(model)
        if found is None or not found.handoffs.known:
            return None
        return found.handoffs.now(queue_of(model))

    def in_time(
        self,
        model: str,
        predicted: Seconds,
        limit: Seconds,
        *,
        uncached: int = 0,
        sequences: int = 0,
        age: Seconds = 0.0,
    ) -> float:
        """Probability that a first token, predicted after `predicted` seconds, comes within `limit`
        seconds; 1 while too little is known. The load report is `age` seconds old, and the
        prediction may be off by as much."""
        found = self._models.get(model)
        if found is None or predicted <= 0.0:
            return 1.0
        ratios = found.buckets.get(bucket_of(uncached, sequences))
        if ratios is None or len(ratios) < _ENOUGH:
            ratios = found.ratios
        return ratios.within((limit + age) / predicted) if len(ratios) >= _ENOUGH else 1.0

    def poor(self, model: str) -> str | None:
        """Why the latency model is not used now, in words; None if it is, or if nothing is learnt.
        The text stays the same while the state lasts, so that a caller can log its changes."""
        found = self._models.get(model)
        if found is None or not found.error.poor:
            return None
        instead = "requests" if found.time.blind else "uncached tokens"
        return (
            f"predicted prefill times of {model} were off by more than "
            f"{self._config.poor_error:.0%} on average; {instead} are counted instead"
        )

    def calibration(self) -> list[Calibration]:
        """The calibration of every model, by name."""
        return [self._calibration(name, self._models[name]) for name in sorted(self._models)]

    def _calibration(self, name: str, model: _Model) -> Calibration:
        workers = {life: worker for life, worker in self._workers.items() if worker.model == name}
        return Calibration(
            name,
            model.time,
            model.error.value,
            model.ratios.summary(),
            {bucket: model.buckets[bucket].summary() for bucket in sorted(model.buckets)},
            {life: worker.ratios.summary() for life, worker in workers.items()},
            {life: worker.speed for life, worker in workers.items()},
        )

    # ------------------------------------------------------------------ observations

    def observe(self, now: Seconds, seen: Observation) -> None:
        """Learn from a first token. Ignores impossible values (no time, no prompt)."""
        uncached = seen.prompt_tokens - seen.cached_tokens
        took = seen.queue_seconds + seen.prefill_seconds
        if not (0.0 < seen.work_seconds < _FOREVER and 0 < uncached <= seen.prompt_tokens):
            return
        if not 0.0 <= took < _FOREVER:
            return
        if seen.received_tokens:
            self._observe_remote(seen)
            return
        model = self._model(seen.model)
        if seen.elsewhere_wait is not None:
            model.handoffs.stayed()
        worker = self._worker(seen.worker, seen.model)
        if worker.seen <= self._config.skip:
            return
        expected = model.time.prefill(seen.prompt_tokens, seen.cached_tokens)
        self._compare(now, model, worker, seen, expected)
        self._learn(model, worker, seen, expected)
        if worker.model == seen.model and model.fits:
            worker.compare(model.coefficients, self._config.bias_strength)
        model.judge()

    def _observe_remote(self, seen: Observation) -> None:
        """Learn from a remote prefill. It tells nothing about the decode worker's speed."""
        model = self._model(seen.model)
        model.handoffs.observe(
            seen.prompt_tokens,
            seen.received_tokens,
            seen.prefill_seconds,
            seen.queue_seconds,
            seen.elsewhere_wait or 0.0,
        )
        if seen.prefill_cached is None or not 0 <= seen.prefill_cached < seen.prompt_tokens:
            return
        length, cached = seen.prompt_tokens, seen.prefill_cached
        work = _believable(model, seen.work_seconds, model.time.prefill(length, cached))
        stratum, row = _prompt(length, cached, work)
        fresh = model.prompts_elsewhere.add(stratum, row)
        self._count(seen.model, model, fresh=fresh and not model.prompts.has(stratum))
        model.judge()

    def report(self, now: Seconds, model: str, worker: NodeLife, load: WorkerLoad) -> None:
        """Learn the decode step time from a worker's load report. Reports made during a prefill, or
        soon after it, are ignored: its steps are longer, and the worker tells a mean of many."""
        known = self._workers.get(worker)
        if load.uncomputed_tokens and known is not None:
            known.prefilled = now
        if not (0.0 < load.itl < _FOREVER and load.running) or load.uncomputed_tokens:
            return
        if known is not None and now - known.prefilled < _MIXED * load.itl:
            return
        found = self._model(model)
        row = RegressionRow(load.running, load.kv_tokens, load.itl / self.speed(worker))
        depth = load.kv_tokens // load.running
        found.steps.add((load.running.bit_length(), depth.bit_length() // 2), row)
        found.new_steps += 1
        config = self._config
        first = min(config.first_fit, config.refit_steps)
        if found.new_steps >= (config.refit_steps if found.step_fits else first):
            found.new_steps = 0
            found.step_fits += 1
            found.set_steps(fit_nonnegative(found.steps.rows(), _PRIOR_STEP))

    def worker_gone(self, worker: NodeLife) -> None:
        """Drop a worker that is gone. What its model has learnt from it stays."""
        self._workers.pop(worker, None)

    # ------------------------------------------------------------------ inside

    def _compare(
        self, now: Seconds, model: _Model, worker: _Worker, seen: Observation, expected: Seconds
    ) -> None:
        """Compare an observation with its prediction, before learning from it."""
        if not model.fits:
            return
        predicted = expected * worker.speed
        model.error.add(now, predicted, seen.work_seconds)
        worker.ratios.add(seen.work_seconds / predicted)
        uncached = seen.prompt_tokens - seen.cached_tokens
        seconds, tokens = model.per_token
        if tokens:  # not before its first own prompt
            model.token_error.add(now, seconds / tokens * uncached, seen.work_seconds)
        if seen.predicted_ttft:
            ratio = (seen.queue_seconds + seen.prefill_seconds) / seen.predicted_ttft
            model.ratios.add(ratio)
            bucket = bucket_of(uncached, seen.sequences)
            model.buckets.setdefault(bucket, RatioWindow()).add(ratio)

    def _learn(self, model: _Model, worker: _Worker, seen: Observation, expected: Seconds) -> None:
        length, cached = seen.prompt_tokens, seen.cached_tokens
        uncached = length - cached
        work = _believable(model, seen.work_seconds, expected * worker.speed)
        stratum, row = _prompt(length, cached, work)
        worker.add(row, expected, self._config.bias_memory)
        fresh = model.prompts.add(stratum, row._replace(y=work * model.common / worker.speed))
        seconds, tokens = model.per_token
        model.per_token = (seconds * _FADE + work, tokens * _FADE + uncached)
        self._count(seen.model, model, fresh=fresh)

    def _count(self, name: str, model: _Model, *, fresh: bool) -> None:
        """One more prompt was learnt from; it is time for a fit after so many of them."""
        model.new_prompts += 1
        enough = self._fit_after(model)
        # After prompts of a new kind, the model is fitted again soon.
        if fresh:
            model.new_prompts = max(model.new_prompts, enough - _SOON)
        if model.new_prompts >= enough:
            self._refit(name, model)

    def _fit_after(self, model: _Model) -> int:
        """Observations from one fit to the next."""
        config = self._config
        if not model.fits:
            return config.first_fit
        settled = model.error.value < config.settled_error
        return config.refit_every * (_RARER if settled else 1)

    def _refit(self, name: str, model: _Model) -> None:
        model.new_prompts = 0
        model.fits += 1
        model.set_prompts(model.prompts.rows_with(model.prompts_elsewhere, _FEW))
        speeds = []
        for worker in self._workers.values():
            if worker.model == name:
                worker.compare(model.coefficients, self._config.bias_strength)
                if worker.count >= self._config.bias_strength:
                    speeds.append(worker.speed)
        model.common = min(speeds, key=lambda speed: abs(log(speed)), default=1.0)

    def _model(self, name: str) -> _Model:
        found = self._models.pop(name, None) or _Model(self._config)
        if len(self._models) >= self._config.max_models:
            del self._models[next(iter(self._models))]
        self._models[name] = found
        return found

    def _worker(self, life: NodeLife, model: str) -> _Worker:
        found = self._workers.get(life)
        if found is None or found.model != model:
            found = self._workers[life] = _Worker(model, found.seen if found else 0)
        found.seen += 1
        return found


def _believable(model: _Model, work: Seconds, predicted: Seconds) -> Seconds:
    """Limits outliers, such as a pause of the machine."""
    if not model.fits:
        return work
    return min(max(work, predicted / _OUTLIER), predicted * _OUTLIER)


def _prompt(length: int, cached: int, work: Seconds) -> tuple[tuple[int, int], RegressionRow]:
    """A prompt of `length` tokens, `cached` of them not computed, as a row, and its stratum."""
    uncached = length - cached
    row = RegressionRow(uncached, length * length - cached * cached, work)
    return (uncached.bit_length() // 2, cached.bit_length() // 2), row


_PRIOR = LatencyModel()
_PRIOR_PREFILL = (_PRIOR.base, _PRIOR.per_token, _PRIOR.per_pair)
_PRIOR_STEP = (_PRIOR.step_base, _PRIOR.step_sequence, _PRIOR.step_token)
_ENOUGH = 20
"""Least number of ratios for a probability."""
_FOREVER = 3600.0
_OUTLIER = 8.0
"""Largest ratio to the prediction, either way; a larger one is cut to it."""
_FEW = 4
"""Number of a worker's own prompts of one kind from which those computed elsewhere do not count."""
_SOON = 5
"""Number of observations from the first of a new kind of prompts to the next fit."""
_FADE = 0.995
_MIXED = 40
"""Steps after a prefill in which it still shows in a worker's mean time between tokens."""
_RARER = 4

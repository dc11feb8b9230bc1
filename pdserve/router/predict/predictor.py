"""What a router has learnt of time: a model per served model, a factor per worker, and how good
both are.

    predicted work = speed(worker) * model(name).prefill(length, cached)

Observations come as first tokens do (`observe`) and as workers report (`report`). A refit happens
every so many of them; in between, models stay the same objects. The first observations of a worker
do not count: it warms up. `worker_gone` ends what is remembered of a worker; models beyond
the bound go, the one that was quiet for longest first.

Pure: time comes in. The router's desk owns it, feeds it, and shows its verdicts (`poor`,
`calibration`); policies see models and speeds only through their snapshot.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from pdserve.router.predict.calibrate import Error, Ratios, Summary, bucket_of
from pdserve.router.predict.learn import Coefficients, Row, Window, fit
from pdserve.router.predict.model import TimeModel
from pdserve.router.predict.moves import Handoffs

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.ids import Seconds
    from pdserve.messages.handoff import QueueState
    from pdserve.messages.routing import WorkerLoad
    from pdserve.router.bookings import Life
    from pdserve.router.predict.moves import Elsewhere

__all__ = ["Calibration", "Observation", "Predictor", "PredictorConfig"]


@dataclass(frozen=True, slots=True)
class PredictorConfig:
    """How fast it learns, and how long it doubts."""

    skip: int = 3
    """A worker's first observations, which do not count: kernels are compiled, graphs captured."""
    refit_every: int = 50
    """Observations between two fits; the first comes after `first_fit`."""
    first_fit: int = 20
    refit_steps: int = 200
    """Reports between two fits of the steps."""
    poor_error: float = 0.4
    """A relative error above this is poor; see `calibrate.Error`."""
    poor_after: Seconds = 60.0
    """For so long, before the model is no longer used."""
    bias_strength: float = 10.0
    """A worker's factor is pulled towards 1 as if by so many observations of exactly 1."""
    bias_memory: float = 100.0
    """Observations after which an older one counts for a third."""
    max_models: int = 64
    """Served models remembered."""


@dataclass(frozen=True, slots=True)
class Observation:
    """How one request of this router came to its first token."""

    model: str
    worker: Life
    prompt_tokens: int
    cached_tokens: int
    """By the worker's word, not by what was believed."""
    work_seconds: Seconds
    """Its share of the steps; see `messages.request.Started`."""
    queue_seconds: Seconds
    prefill_seconds: Seconds
    predicted_ttft: Seconds | None = None
    """At dispatch: wait and work; None: there was no prediction."""
    predicted_work: Seconds | None = None
    sequences: int = 0
    """At the worker, before it."""
    kv_tokens: int = 0
    load_age: Seconds = 0.0
    """Of the report that the decision rested on."""
    received_tokens: int = 0
    """A prefill worker has computed these."""
    elsewhere_wait: Seconds | None = None
    """It was predicted to be computed elsewhere, after so long in the queue."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """Observed over predicted, lately: for status and metrics."""

    model: str
    time: TimeModel
    error: float
    """Of predicted work; what `poor` goes by."""
    all: Summary
    """Time to first token."""
    ttft: dict[tuple[int, int], Summary]
    """The same by bucket: at least so many uncached tokens, at least so many sequences."""
    workers: dict[Life, Summary]
    """Work, by worker."""
    speeds: dict[Life, float]


@dataclass(slots=True)
class _Worker:
    """One life of a worker: how it compares with its model. The sums fade."""

    model: str
    seen: int = 0
    speed: float = 1.0
    count: float = 0.0
    columns: tuple[float, float, float] = (0.0, 0.0, 0.0)
    observed: float = 0.0
    """Sums over its observations, each divided by what was predicted at speed 1: of the model's
    columns, and of the seconds. Predictions are linear in the columns, so a new model can be
    compared with old observations without keeping them."""
    ratios: Ratios = field(default_factory=lambda: Ratios(50))

    def add(self, row: Row, predicted: Seconds, memory: float) -> None:
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
        """Its mean ratio, pulled towards 1 as if it had been seen `strength` times more."""
        expected = sum(a * b for a, b in zip(learnt, self.columns, strict=True))
        if expected > 0.0:
            ratio = self.observed / expected
            self.speed = (self.count * ratio + strength) / (self.count + strength)


class _Model:
    """One served model."""

    def __init__(self, config: PredictorConfig) -> None:
        self.time = TimeModel()
        """As policies see it."""
        self.prompts = Window()
        self.steps = Window()
        self.fits = 0
        self.new_prompts = 0
        self.new_steps = 0
        """Since the last fit of each."""
        self.ratios = Ratios(200)
        self.buckets: dict[tuple[int, int], Ratios] = {}
        self.error = Error(config.poor_error, config.poor_after)
        self.token_error = Error(config.poor_error, config.poor_after)
        self.handoffs = Handoffs()
        self.per_token: tuple[float, float] = (0.0, 0.0)
        """Seconds and uncached tokens, fading: what a model that only counts tokens would say."""

    @property
    def coefficients(self) -> Coefficients:
        return self.time.base, self.time.per_token, self.time.per_pair

    def judge(self) -> None:
        """Whether what was learnt may be used."""
        fitted = self.fits > 0 and not self.error.poor
        blind = self.error.poor and self.token_error.poor
        if (fitted, blind) != (self.time.fitted, self.time.blind):
            self.time = replace(self.time, fitted=fitted, blind=blind)


class Predictor:
    """One router's."""

    def __init__(self, config: PredictorConfig | None = None) -> None:
        self._config = config or PredictorConfig()
        self._models: dict[str, _Model] = {}
        """The one that was quiet for longest first."""
        self._workers: dict[Life, _Worker] = {}

    # ------------------------------------------------------------------ predictions

    def model(self, name: str) -> TimeModel:
        """As learnt; the prior before enough was seen. Not `fitted`: it should not be relied on."""
        found = self._models.get(name)
        return found.time if found else _PRIOR

    def speed(self, worker: Life) -> float:
        """Times that the worker takes longer than the model of all says; 1 if nothing is known."""
        found = self._workers.get(worker)
        return found.speed if found else 1.0

    def elsewhere(
        self, model: str, queue_of: Callable[[str], QueueState | None]
    ) -> Elsewhere | None:
        """What prompts take now that prefill workers compute; None: none does, or it is unknown.
        `queue_of` says how a model's queue is."""
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
        """Probability that a first token predicted after `predicted` comes within `limit`; 1 while
        too little is known to say so. What is known is `age` old, and may be off by as much."""
        found = self._models.get(model)
        if found is None or predicted <= 0.0:
            return 1.0
        ratios = found.buckets.get(bucket_of(uncached, sequences))
        if ratios is None or len(ratios) < _ENOUGH:
            ratios = found.ratios
        return ratios.within((limit + age) / predicted) if len(ratios) >= _ENOUGH else 1.0

    def poor(self, model: str) -> str | None:
        """Why the model of time is not used now, in words; None: it is, or nothing is learnt. The
        words stay the same as long as it lasts: whoever logs changes of them is not to log each
        observation."""
        found = self._models.get(model)
        if found is None or not found.error.poor:
            return None
        instead = "requests" if found.time.blind else "uncached tokens"
        return (
            f"predicted prefill times of {model} were off by more than "
            f"{self._config.poor_error:.0%} on average; {instead} are counted instead"
        )

    def calibration(self) -> list[Calibration]:
        """One per model, by name."""
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
        """A first token came. What cannot be is ignored: no time, no prompt."""
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
        """It says nothing of prompts that are computed where they are decoded, and the worker's
        speed had no part in it."""
        self._model(seen.model).handoffs.observe(
            seen.prompt_tokens,
            seen.received_tokens,
            seen.prefill_seconds,
            seen.queue_seconds,
            seen.elsewhere_wait or 0.0,
        )

    def report(self, now: Seconds, model: str, worker: Life, load: WorkerLoad) -> None:
        """A worker's load: how long its steps take for so many sequences and tokens. Not while it
        computes prompts: its steps are longer then for another reason."""
        if not (0.0 < load.itl < _FOREVER and load.running) or load.uncomputed_tokens:
            return
        found = self._model(model)
        row = Row(load.running, load.kv_tokens, load.itl / self.speed(worker))
        depth = load.kv_tokens // load.running
        found.steps.add((load.running.bit_length(), depth.bit_length() // 2), row)
        found.new_steps += 1
        if found.new_steps >= self._config.refit_steps:
            found.new_steps = 0
            base, sequence, token = fit(found.steps.rows(), _PRIOR_STEP)
            found.time = replace(
                found.time, step_base=base, step_sequence=sequence, step_token=token
            )

    def worker_gone(self, worker: Life) -> None:
        """Its life is over. What it taught of its model stays."""
        self._workers.pop(worker, None)

    # ------------------------------------------------------------------ inside

    def _compare(
        self, now: Seconds, model: _Model, worker: _Worker, seen: Observation, expected: Seconds
    ) -> None:
        """What was predicted with what came, before anything is learnt from it."""
        if not model.fits:
            return
        predicted = expected * worker.speed
        model.error.add(now, predicted, seen.work_seconds)
        worker.ratios.add(seen.work_seconds / predicted)
        uncached = seen.prompt_tokens - seen.cached_tokens
        seconds, tokens = model.per_token
        model.token_error.add(now, seconds / tokens * uncached, seen.work_seconds)
        if seen.predicted_ttft:
            ratio = (seen.queue_seconds + seen.prefill_seconds) / seen.predicted_ttft
            model.ratios.add(ratio)
            bucket = bucket_of(uncached, seen.sequences)
            model.buckets.setdefault(bucket, Ratios()).add(ratio)

    def _learn(self, model: _Model, worker: _Worker, seen: Observation, expected: Seconds) -> None:
        length, cached = seen.prompt_tokens, seen.cached_tokens
        uncached = length - cached
        work = seen.work_seconds
        if model.fits:  # a pause of the machine is not the prompt's fault
            predicted = expected * worker.speed
            work = min(max(work, predicted / _OUTLIER), predicted * _OUTLIER)
        row = Row(uncached, length * length - cached * cached, work)
        worker.add(row, expected, self._config.bias_memory)
        fresh = model.prompts.add(
            (uncached.bit_length() // 2, cached.bit_length() // 2),
            row._replace(y=work / worker.speed),
        )
        seconds, tokens = model.per_token
        model.per_token = (seconds * _FADE + work, tokens * _FADE + uncached)
        model.new_prompts += 1
        enough = self._config.refit_every if model.fits else self._config.first_fit
        if fresh:  # what is known of the others says little of these
            model.new_prompts = max(model.new_prompts, enough - _SOON)
        if model.new_prompts >= enough:
            self._refit(seen.model, model)

    def _refit(self, name: str, model: _Model) -> None:
        model.new_prompts = 0
        model.fits += 1
        base, per_token, per_pair = fit(model.prompts.rows(), _PRIOR_PREFILL)
        model.time = replace(model.time, base=base, per_token=per_token, per_pair=per_pair)
        for worker in self._workers.values():
            if worker.model == name:
                worker.compare(model.coefficients, self._config.bias_strength)

    def _model(self, name: str) -> _Model:
        found = self._models.pop(name, None) or _Model(self._config)
        if len(self._models) >= self._config.max_models:
            del self._models[next(iter(self._models))]
        self._models[name] = found
        return found

    def _worker(self, life: Life, model: str) -> _Worker:
        found = self._workers.get(life)
        if found is None or found.model != model:
            found = self._workers[life] = _Worker(model, found.seen if found else 0)
        found.seen += 1
        return found


_PRIOR = TimeModel()
_PRIOR_PREFILL = (_PRIOR.base, _PRIOR.per_token, _PRIOR.per_pair)
_PRIOR_STEP = (_PRIOR.step_base, _PRIOR.step_sequence, _PRIOR.step_token)
_ENOUGH = 20
"""Ratios without which nothing is said about probabilities."""
_FOREVER = 3600.0
_OUTLIER = 8.0
"""Further than so many times from the prediction, an observation counts as if it were this far."""
_SOON = 5
"""Observations after one of a new kind of prompts until all is fitted anew."""
_FADE = 0.995

"""Counts a request that has ended: its outcome, times, tokens, finish reasons and objectives.

`count_ended` is called once per request, after its end. Times of single tokens are counted where
the tokens pass. `EndReport` and `ended_request` make what a router is told of the same request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.errors import Cancelled, DeadlineExceeded, EngineError, Overloaded, PdserveError
from pdserve.frontend.placement import cached_by_source, cached_tokens
from pdserve.messages.demand import EndedRequest
from pdserve.observe.metrics import outcome_of
from pdserve.observe.slo import Observed, fault_of, judge, mean_itl

if TYPE_CHECKING:
    from pdserve.frontend.output.response_builder import ResponseBuilder
    from pdserve.ids import Seconds
    from pdserve.observe.metrics import ModelMetrics
    from pdserve.observe.slo import Objectives, SloCause, SloVerdict

__all__ = ["EndReport", "count_ended", "ended_request", "request_itl"]


def count_ended(
    metrics: ModelMetrics,
    answer: ResponseBuilder | None,
    error: PdserveError | None,
    arrival: Seconds,
    now: Seconds,
) -> None:
    """Counts the request. `answer`: None if no worker took it; `error`: what ended it early."""
    metrics.ended(outcome_of(error))
    if metrics.objectives:
        metrics.judged(_judge(metrics.objectives, answer, error, arrival))
    if answer is None:
        return
    for choice in answer.choices:
        metrics.finished((choice.finish_reason or "stop") if choice.done else _unfinished(error))
    if error is None:
        metrics.e2e_request_latency.observe(now - arrival)
        _count_tokens(metrics, answer)


class EndReport:
    """Says how one request ended, for the router of its last worker. What workers have of the
    request refers to it; it lets the answer go when it has spoken, so that no cycle of references
    keeps the request in memory."""

    __slots__ = ("_answer", "_arrival", "_model", "_objectives", "told")

    def __init__(
        self, objectives: Objectives, model: str, answer: ResponseBuilder, arrival: Seconds
    ) -> None:
        self._objectives = objectives
        self._model = model
        self._answer: ResponseBuilder | None = answer
        self._arrival = arrival
        self.told = False
        """True once it has said how the request ended."""

    def __call__(self) -> EndedRequest | None:
        """How the request ended, once; None: it goes on, or it was said."""
        answer = self._answer
        if answer is None or not (answer.finished.done() or all(c.done for c in answer.choices)):
            return None
        self.close()
        self.told = True
        error = _end_of(answer)
        return ended_request(self._objectives, self._model, answer, error, self._arrival)

    def close(self) -> None:
        """Says nothing from now on. Idempotent."""
        self._answer = None


def _end_of(answer: ResponseBuilder) -> PdserveError | None:
    """What ended an answer early; None: it is complete."""
    if answer.finished.cancelled():
        return Cancelled("the client went away")
    error = answer.finished.exception() if answer.finished.done() else None
    return error if error is None or isinstance(error, PdserveError) else EngineError(str(error))


def ended_request(
    objectives: Objectives,
    model: str,
    answer: ResponseBuilder | None,
    error: PdserveError | None,
    arrival: Seconds,
) -> EndedRequest:
    """What a router is told of a request. `answer`: None if no worker took it; such a request
    missed its objectives since it was held or refused, if that is why it ended."""
    verdicts = _judge(objectives, answer, error, arrival) if objectives else []
    told = tuple((each.objective, each.cause) for each in verdicts if each.result != "none")
    if answer is None:
        full = isinstance(error, Overloaded | DeadlineExceeded)
        return EndedRequest(model, verdicts=_all_held(told) if full else told)
    cached = cached_tokens([sink.course for sink in answer.sinks])
    return EndedRequest(
        model,
        answer.prompt_tokens,
        cached or 0,
        answer.completion_tokens,
        max(0.0, _decode(answer)),
        complete=error is None,
        verdicts=told,
    )


def _all_held(told: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
    return tuple((objective, "held") for objective, _ in told)


def _judge(
    objectives: Objectives,
    answer: ResponseBuilder | None,
    error: PdserveError | None,
    arrival: Seconds,
) -> list[SloVerdict]:
    fault = fault_of(error)
    if answer is None or fault:
        return judge(objectives, Observed(fault=fault))
    ttft = None if answer.first_token is None else answer.first_token - arrival
    seen = Observed(ttft=ttft, itl=request_itl(answer))
    verdicts = judge(objectives, seen)
    if verdicts[-1].result != "bad":
        return verdicts
    # Where the time went is only worth its cost if there was too much of it.
    before = {} if ttft is None else _before(answer, ttft)
    return judge(objectives, seen._replace(before=before, after=_after(answer)))


def request_itl(answer: ResponseBuilder) -> Seconds | None:
    """The inter-token latency of the request, see `observe.slo`."""
    return mean_itl(
        (choice.first, choice.last, choice.completion_tokens)
        for choice in answer.choices
        if choice.first is not None and choice.last is not None
    )


def _before(answer: ResponseBuilder, ttft: Seconds) -> dict[SloCause, Seconds]:
    """The parts of the time to the first token; of several prompts the longest of each."""
    courses = [sink.course for sink in answer.sinks]
    placements = [course.placement for course in courses if course.placement is not None]
    remote = any(course.where.startswith("remote") for course in courses)
    parts: dict[SloCause, Seconds] = {
        "held": max((placement.held for placement in placements), default=0.0),
        "queue": max(course.queue or 0.0 for course in courses),
        "handoff" if remote else "prefill": max(course.prefill or 0.0 for course in courses),
    }
    # What is left went by in this process and on the way, or at a worker that did not answer.
    retried = any(placement.attempts > 1 for placement in placements)
    parts["moved" if retried else "frontend"] = max(0.0, ttft - sum(parts.values()))
    return parts


def _after(answer: ResponseBuilder) -> dict[SloCause, Seconds]:
    """The parts of the time from the first token to the last one."""
    moved = max(sink.moved for sink in answer.sinks)
    return {"decode": max(0.0, _decode(answer) - moved), "moved": moved}


def _decode(answer: ResponseBuilder) -> Seconds:
    ends = [choice.last for choice in answer.choices if choice.last is not None]
    first = answer.first_token
    return max(ends) - first if ends and first is not None else 0.0


def _unfinished(error: PdserveError | None) -> str:
    """Why an output ended that no worker finished."""
    return "abort" if isinstance(error, Cancelled) else "error"


def _count_tokens(metrics: ModelMetrics, answer: ResponseBuilder) -> None:
    prompt = answer.prompt_tokens
    metrics.request_prompt_tokens.observe(prompt)
    metrics.request_generation_tokens.observe(answer.completion_tokens)
    courses = [sink.course for sink in answer.sinks]
    cached = cached_tokens(courses)
    if cached is not None:
        metrics.request_uncached_tokens.observe(max(0, prompt - cached))
        for source, tokens in cached_by_source(courses).items():
            metrics.cached(source, tokens)
    if answer.plan.vectors is not None:
        return
    longest = max(choice.completion_tokens for choice in answer.choices)
    metrics.request_max_generation_tokens.observe(longest)
    metrics.request_decode.observe(_decode(answer))
    itl = request_itl(answer)
    if itl is not None:
        metrics.request_time_per_output_token.observe(itl)

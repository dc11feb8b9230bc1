"""Whether a question may wait at all, or be begun after it has, and what it is told if not.

Two refusals, both with the time after which asking again makes sense: a bound of the hold queue is
reached; or the client has said by when it needs its first token, and nobody can have it ready by
then. Clients that say nothing are never refused for the second reason.

A question that waits too long is refused as soon as that shows, not when it is too late: work for
an answer that comes too late is taken from those that could still come in time, and under overload
everything would be late.

Pure functions; the core acts on what they say.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pdserve.errors import Overloaded

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.ids import Bytes, Seconds
    from pdserve.messages.routing import RouteRequest
    from pdserve.perf_model.predictor import Predictor
    from pdserve.router.config import RouterConfig
    from pdserve.router.policies.base import RoutingState, WorkerView

__all__ = [
    *("LONGEST_WAIT", "best_chance", "drain_time", "over_bound", "too_late", "waits_too_long"),
    "worth_waiting",
]

_LONGEST: Final[Seconds] = 60.0
"""Nobody is sent away for longer: predictions do not reach far."""
HOPELESS: Final = 0.05
"""Less likely than this is as good as impossible."""
WORTH: Final = 0.85
"""Waiting may take so much of the chance that a question would have if nobody were before it. Many
wait under overload: with a small share most of them would be late."""


MAX_WAIT_SHARE: Final = 0.5
"""Share of the time left to a request that it may be expected to wait here. The rest is for its
answer: one that is begun when its time is nearly over is work for nothing."""


def drain_time(
    now: Seconds, workers: Sequence[WorkerView], held: Seconds, least: Seconds
) -> Seconds:
    """Predicted time until what waits here, for `held` at most, and at the workers is done, within
    reason."""
    if not workers:
        return least
    there = sum(worker.wait(now) for worker in workers)
    return min(max(there / len(workers) + held, least), _LONGEST)


def over_bound(config: RouterConfig, held: int, size: Bytes, drain: Seconds) -> Overloaded | None:
    """The refusal, if one more question is too many for `held` that occupy `size`."""
    if held < config.hold_limit and size < config.hold_bytes:
        return None
    return Overloaded(
        f"{held} requests wait for a worker in this router, as many as may", retry_after=drain
    )


def best_chance(
    predictor: Predictor,
    model: str,
    question: RouteRequest,
    state: RoutingState,
    ahead: Seconds,
    age: Seconds,
) -> float:
    """Probability that the first token comes in time where that is likeliest. `ahead`: what it
    waits in this router."""
    assert question.slo_ttft is not None
    limit = question.slo_ttft - question.waited - ahead
    if limit <= 0.0:
        return 0.0
    best = 0.0
    for worker in state.workers:
        chance = predictor.in_time(
            model,
            state.ttft(question, worker),
            limit,
            uncached=question.prompt_tokens - state.cached_tokens(question, worker),
            sequences=worker.sequences,
            age=age,
        )
        best = max(best, chance)
    return best


def worth_waiting(chance: float, alone: float) -> bool:
    """Whether work should be spent on it. `alone`: its chance if it had not to wait here. What is
    too long for its limit, but not hopeless, is not refused for that."""
    return chance >= HOPELESS and chance >= WORTH * alone


def too_late(question: RouteRequest, drain: Seconds) -> Overloaded:
    """The refusal."""
    return Overloaded(
        f"a first token within {question.slo_ttft:g} s cannot be had now", retry_after=drain
    )


def waits_too_long(wait: Seconds, deadline: Seconds, drain: Seconds) -> Overloaded:
    """The refusal of one that would be begun when its time is nearly over."""
    return Overloaded(
        f"it would wait about {wait:.0f} s for a worker, of the {deadline:.0f} s that it has",
        retry_after=drain,
    )

"""Decides whether a request may wait in the router, or be placed after it has waited.

There are two refusals, both with the time after which a retry makes sense: the hold queue has
reached a bound; or the client has said by when it needs its first token, and no worker can produce
it by then. Requests without such a limit are never refused for the second reason.

A request that would wait too long is refused as soon as that is known: an answer that comes too
late takes time from answers that could still be in time, and under overload all would be late.

Pure functions; `RouterCore` acts on the results.
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
"""Longest Retry-After: predictions do not reach further."""
HOPELESS: Final = 0.05
"""A first token that is less likely than this to be in time counts as impossible."""
WORTH: Final = 0.85
"""Waiting may take this share of the chance that a request would have with an empty queue. Many
requests wait under overload: with a small share most of them would be late."""


MAX_WAIT_SHARE: Final = 0.5
"""A request may be expected to wait here for this share of the time until its deadline. The rest is
for its answer."""


def drain_time(
    now: Seconds, workers: Sequence[WorkerView], held: Seconds, least: Seconds
) -> Seconds:
    """Predicted time until the work that waits here for at most `held`, and at the workers, is
    done; bounded."""
    if not workers:
        return least
    there = sum(worker.wait(now) for worker in workers)
    return min(max(there / len(workers) + held, least), _LONGEST)


def over_bound(config: RouterConfig, held: int, size: Bytes, drain: Seconds) -> Overloaded | None:
    """The refusal if one more request is too many for `held` requests of `size` bytes; else
    None."""
    if held < config.hold_limit and size < config.hold_bytes:
        return None
    return Overloaded(
        f"{held} requests wait for a worker in this router, which is its limit", retry_after=drain
    )


def best_chance(
    predictor: Predictor,
    model: str,
    request: RouteRequest,
    state: RoutingState,
    ahead: Seconds,
    age: Seconds,
) -> float:
    """Probability that the first token is in time at the worker where that is likeliest. `ahead`:
    seconds that the request waits in this router first."""
    assert request.slo_ttft is not None
    limit = request.slo_ttft - request.waited - ahead
    if limit <= 0.0:
        return 0.0
    best = 0.0
    for worker in state.workers:
        chance = predictor.in_time(
            model,
            state.ttft(request, worker),
            limit,
            uncached=request.prompt_tokens - state.cached_tokens(request, worker),
            sequences=worker.sequences,
            age=age,
        )
        best = max(best, chance)
    return best


def worth_waiting(chance: float, alone: float) -> bool:
    """True if the router should spend work on the request. `alone`: its chance if the hold queue
    were empty. A request whose prompt is long for its limit, but not hopeless, is not refused for
    that."""
    return chance >= HOPELESS and chance >= WORTH * alone


def too_late(request: RouteRequest, drain: Seconds) -> Overloaded:
    """The refusal of a request whose first token would come too late."""
    return Overloaded(
        f"no worker can produce a first token within {request.slo_ttft:g} s now", retry_after=drain
    )


def waits_too_long(wait: Seconds, deadline: Seconds, drain: Seconds) -> Overloaded:
    """The refusal of a request that would be placed when most of its time has passed."""
    return Overloaded(
        f"it would wait about {wait:.0f} s for a worker, of the {deadline:.0f} s that it has",
        retry_after=drain,
    )

"""Mooncake's choice: least predicted time to first token, counting a fetch of the best prefix.

    best     the longest prefix that any worker has
    near     best / own < balancing_threshold, or fetching is off
             -> TTFT = queue + prefill(length, own)
    far      -> TTFT = queue + transfer(best - own) + prefill(length, best)
    choose the least TTFT, one of those at random

Algorithm 1 of "Mooncake: Trading More Storage for Less Computation" (FAST'25), which also chooses a
decode instance and refuses what breaks its SLO; here admission does that, for every policy alike.
`fetch_seconds_per_token` 0 means that blocks cannot be fetched from other workers: the first case
always. Queue and prefill are those of the learnt model, so that the comparison is of the choice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from random import Random

    from pdserve.ids import NodeId, Seconds
    from pdserve.messages.routing import RouteRequest
    from pdserve.router.policies.base import RoutingState, Terms, WorkerView

__all__ = ["Mooncake"]


@dataclass(frozen=True, slots=True)
class Mooncake:
    """Mooncake's cache-aware choice; the module docstring has the formula."""

    balancing_threshold: float = 1.5
    """Ratio of the best prefix to the own one from which a fetch is considered; at least 1. The
    paper leaves the number open.
    """
    fetch_seconds_per_token: Seconds = 0.0
    """Time to move one token's KV between workers; 0: KV cannot be moved."""

    def __post_init__(self) -> None:
        if self.balancing_threshold < 1 or self.fetch_seconds_per_token < 0:
            raise ValueError("balancing-threshold must be at least 1, fetch time at least 0")

    def __call__(self, request: RouteRequest, state: RoutingState, random: Random) -> WorkerView:
        """Chooses a worker. O(workers)."""
        terms = self._terms(request, state)
        costs = [queue + fetch + prefill for queue, fetch, prefill in terms]
        least = min(costs)
        tied = [w for w, cost in zip(state.workers, costs, strict=True) if cost == least]
        return random.choice(tied)

    def terms(self, request: RouteRequest, state: RoutingState) -> Mapping[NodeId, Terms]:
        """The terms of the cost, in seconds."""
        return {
            worker.node: {"wait": q, "fetch": f, "prefill": p, "cost": q + f + p}
            for worker, (q, f, p) in zip(state.workers, self._terms(request, state), strict=True)
        }

    def _terms(
        self, request: RouteRequest, state: RoutingState
    ) -> list[tuple[Seconds, Seconds, Seconds]]:
        """The (queue, transfer, prefill) times of each worker."""
        best = max(state.cached_tokens(request, worker) for worker in state.workers)
        return [self._of(worker, request, state, best) for worker in state.workers]

    def _of(
        self, worker: WorkerView, request: RouteRequest, state: RoutingState, best: int
    ) -> tuple[Seconds, Seconds, Seconds]:
        own = state.cached_tokens(request, worker)
        queue, length = worker.wait(state.now), request.prompt_tokens
        if not self.fetch_seconds_per_token or best < self.balancing_threshold * max(own, 1):
            return queue, 0.0, worker.speed * state.model.prefill(length, own)
        fetch = (best - own) * self.fetch_seconds_per_token
        return queue, fetch, worker.speed * state.model.prefill(length, best)

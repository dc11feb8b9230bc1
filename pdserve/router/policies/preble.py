"""Preble's choice: exploits a long prefix match, explores otherwise.

    exploit   more of the prompt matches than does not
              -> of the workers that match as far, the least load; but if that one carries more than
                 `imbalance` (1.5) times the lightest's load, the lightest
    explore   -> the least  load + eviction + prefill
    load      prefill and decode time placed there in the last three minutes
    eviction  time to compute again what must go to make room: blocks lacking * time per token
              * `reuse`, the chance that it is asked for again
    prefill   time for what does not match

E2 ("exploitation and exploration") of "Preble: Efficient Distributed Prompt Scheduling for LLM
Serving" (ICLR'25). There the chance of reuse is counted per tree node over the same window; a
router that knows only names takes one number for all.
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

__all__ = ["Preble"]


@dataclass(frozen=True, slots=True)
class Preble:
    """Preble's E2 policy; the module docstring has the rule."""

    imbalance: float = 1.5
    reuse: float = 0.3

    def __post_init__(self) -> None:
        if self.imbalance < 1 or not 0 <= self.reuse <= 1:
            raise ValueError("imbalance must be at least 1, reuse between 0 and 1")

    def __call__(self, request: RouteRequest, state: RoutingState, random: Random) -> WorkerView:
        """Chooses a worker. O(workers)."""
        workers = state.workers
        cached = [state.cached_tokens(request, worker) for worker in workers]
        best = max(cached)
        if 2 * best > request.prompt_tokens:
            holders = [w for w, tokens in zip(workers, cached, strict=True) if tokens == best]
            chosen = min(holders, key=_load)
            lightest = min(workers, key=_load)
            if _load(chosen) > self.imbalance * _load(lightest) + state.model.base:
                return lightest
            return chosen
        costs = [self._cost(worker, request, state) for worker in workers]
        least = min(costs)
        return random.choice([w for w, cost in zip(workers, costs, strict=True) if cost == least])

    def terms(self, request: RouteRequest, state: RoutingState) -> Mapping[NodeId, Terms]:
        """The terms of the cost, in seconds."""
        return {
            worker.node: {
                "load": _load(worker),
                "eviction": self._eviction(worker, request, state),
                "prefill": self._prefill(worker, request, state),
                "cost": self._cost(worker, request, state),
            }
            for worker in state.workers
        }

    def _cost(self, worker: WorkerView, request: RouteRequest, state: RoutingState) -> Seconds:
        return (
            _load(worker)
            + self._eviction(worker, request, state)
            + self._prefill(worker, request, state)
        )

    def _eviction(self, worker: WorkerView, request: RouteRequest, state: RoutingState) -> Seconds:
        if not worker.blocks_total or not request.block_size:
            return 0.0
        uncached = request.prompt_tokens - state.cached_tokens(request, worker)
        free = worker.blocks_total - worker.blocks_used - worker.blocks_cached
        lacking = max(0, uncached - free * request.block_size)
        return self.reuse * lacking * state.model.per_token * worker.speed

    @staticmethod
    def _prefill(worker: WorkerView, request: RouteRequest, state: RoutingState) -> Seconds:
        cached = state.cached_tokens(request, worker)
        return worker.speed * state.model.prefill(request.prompt_tokens, cached)


def _load(worker: WorkerView) -> Seconds:
    return worker.window_work

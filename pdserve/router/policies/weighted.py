"""Chooses by a weighted sum of four scores, each between 0 and 1.

    score   = cache_weight * cache + load_weight * load + latency_weight * latency
              + memory_weight * memory                                       (0.4, 0.3, 0.2, 0.1)
    cache   = leading blocks there / blocks of the prompt
    load    = 1 / (1 + occupancy)
    latency = 1 - (its mean TTFT) / (the largest of them); 1 while unknown
    memory  = share of its blocks that no sequence holds; 1 while unknown

    select = highest          the highest score, one of those at random
             weighted_random  drawn with chances in proportion to the scores
             load_balanced    the least occupancy among scores within a tenth of the highest

The additive scoring of gateways with weighted scorers (llm-d, AIBrix); the marks have no common
unit, so the weights want tuning to the model and the machine. `ttft` is the answer to that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pdserve.blocks.hashing import SHORT_HASH_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping
    from random import Random

    from pdserve.ids import NodeId
    from pdserve.messages.routing import RouteRequest
    from pdserve.router.policies.base import RoutingState, Terms, WorkerView

__all__ = ["Weighted"]

_SELECTIONS: Final = ("highest", "weighted_random", "load_balanced")
_NEAR: Final = 0.9


@dataclass(frozen=True, slots=True)
class Weighted:
    """The weighted-score policy; the module docstring has the formula."""

    cache_weight: float = 0.4
    load_weight: float = 0.3
    latency_weight: float = 0.2
    memory_weight: float = 0.1
    select: str = "highest"

    def __post_init__(self) -> None:
        weights = (self.cache_weight, self.load_weight, self.latency_weight, self.memory_weight)
        if min(weights) < 0 or not sum(weights) > 0:
            raise ValueError("weights must not be negative, and one must be more than 0")
        if self.select not in _SELECTIONS:
            raise ValueError(f"select must be one of {', '.join(_SELECTIONS)}")

    def __call__(self, request: RouteRequest, state: RoutingState, random: Random) -> WorkerView:
        """Chooses a worker. O(workers)."""
        workers = state.workers
        scores = [mark["score"] for mark in self._marks(request, state)]
        if self.select == "weighted_random" and sum(scores) > 0:
            return random.choices(workers, scores)[0]
        highest = max(scores)
        if self.select == "load_balanced":
            near = [w for w, s in zip(workers, scores, strict=True) if s >= _NEAR * highest]
            return min(near, key=lambda worker: worker.occupancy)
        return random.choice([w for w, s in zip(workers, scores, strict=True) if s == highest])

    def terms(self, request: RouteRequest, state: RoutingState) -> Mapping[NodeId, Terms]:
        """The four scores and their sum; the highest wins."""
        marks = self._marks(request, state)
        return {worker.node: mark for worker, mark in zip(state.workers, marks, strict=True)}

    def _marks(self, request: RouteRequest, state: RoutingState) -> list[dict[str, float]]:
        blocks = max(1, len(request.names) // SHORT_HASH_BYTES)
        slowest = max(worker.ttft for worker in state.workers)
        return [self._mark(worker, state, blocks, slowest) for worker in state.workers]

    def _mark(
        self, worker: WorkerView, state: RoutingState, blocks: int, slowest: float
    ) -> dict[str, float]:
        cache = min(1.0, state.overlaps.get(worker.node, 0) / blocks)
        load = 1.0 / (1.0 + worker.occupancy)
        latency = 1.0 - worker.ttft / slowest if slowest > 0 else 1.0
        memory = 1.0 - worker.blocks_used / worker.blocks_total if worker.blocks_total else 1.0
        score = (
            self.cache_weight * cache
            + self.load_weight * load
            + self.latency_weight * latency
            + self.memory_weight * memory
        )
        marks = {"cache": cache, "load": load, "latency": latency, "memory": memory}
        return {**marks, "score": score}

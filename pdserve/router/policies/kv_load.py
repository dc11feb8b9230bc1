"""NVIDIA Dynamo's cost: prefill backlog less what is cached, plus decode load, in blocks.

    decay  = 1 / (1 + credit_decay * (backlog - least backlog) / request)
    credit = overlap_credit * decay * device + host_weight * host + disk_weight * disk
    cost   = prefill_scale * max(0, backlog + request - credit)
             + decode + request + request_weight * sequences

    backlog  uncached prompt tokens placed there whose first token has not come, in blocks
    request  the prompt, in blocks          device, host, disk  its leading blocks on each tier
    decode   KV of the running sequences, in blocks

    temperature 0: the least cost, one of those at random;
    above: drawn by softmax(-cost / temperature), costs scaled to 0..1 between least and most

After ai-dynamo 1.6, `router-design` and its default selector: names and defaults as there. What it
counts as decode blocks are different blocks; here each sequence's count for itself. `request` in
the decode term is the same for all and stands for completeness. Tokens are its unit, so that it
sees neither slower workers nor the square in long prompts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from random import Random

    from pdserve.ids import NodeId
    from pdserve.messages.routing import RouteRequest
    from pdserve.router.policies.base import RoutingState, Terms, WorkerView

__all__ = ["KvLoad"]


@dataclass(frozen=True, slots=True)
class KvLoad:
    """Dynamo's KV routing cost; the module docstring has the formula."""

    overlap_credit: float = 1.0
    credit_decay: float = 0.0
    host_weight: float = 0.75
    disk_weight: float = 0.25
    prefill_scale: float = 1.0
    request_weight: float = 0.0
    """Cost of each running or waiting sequence, in blocks."""
    temperature: float = 0.0

    def __post_init__(self) -> None:
        values = (
            self.overlap_credit,
            self.credit_decay,
            self.host_weight,
            self.disk_weight,
            self.prefill_scale,
            self.request_weight,
            self.temperature,
        )
        if not all(math.isfinite(value) and value >= 0 for value in values):
            raise ValueError("options must be numbers of at least 0")

    def __call__(self, request: RouteRequest, state: RoutingState, random: Random) -> WorkerView:
        """Chooses a worker. O(workers)."""
        workers = state.workers
        costs = self._costs(request, state)
        least = min(costs)
        if self.temperature == 0:
            return random.choice([w for w, c in zip(workers, costs, strict=True) if c == least])
        span = (max(costs) - least) or 1.0
        chances = [math.exp((least - cost) / span / self.temperature) for cost in costs]
        return random.choices(workers, chances)[0]

    def terms(self, request: RouteRequest, state: RoutingState) -> Mapping[NodeId, Terms]:
        """The terms of the cost, in blocks."""
        size = request.block_size or 1
        costs = self._costs(request, state)
        return {
            worker.node: {
                "backlog": worker.prefill_tokens / size,
                "request": request.prompt_tokens / size,
                "overlap": float(state.overlaps.get(worker.node, 0)),
                "decode": worker.kv_tokens / size,
                "cost": cost,
            }
            for worker, cost in zip(state.workers, costs, strict=True)
        }

    def _costs(self, request: RouteRequest, state: RoutingState) -> list[float]:
        size = request.block_size or 1
        prompt = request.prompt_tokens / size
        least = min(worker.prefill_tokens for worker in state.workers) / size
        return [self._cost(worker, state, size, prompt, least) for worker in state.workers]

    def _cost(
        self, worker: WorkerView, state: RoutingState, size: int, prompt: float, least: float
    ) -> float:
        backlog = worker.prefill_tokens / size
        device = state.overlaps.get(worker.node, 0)
        decay = 1.0
        if self.credit_decay and prompt:
            decay = 1.0 / (1.0 + self.credit_decay * (backlog - least) / prompt)
        credit = self.overlap_credit * decay * device
        lower = state.lower.get(worker.node)
        if lower is not None:
            with_host, with_disk = lower
            credit += self.host_weight * (with_host - device)
            credit += self.disk_weight * (with_disk - with_host)
        prefill = self.prefill_scale * max(0.0, backlog + prompt - credit)
        decode = worker.kv_tokens / size + prompt
        return prefill + decode + self.request_weight * worker.sequences

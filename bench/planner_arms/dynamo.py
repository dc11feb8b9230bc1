"""Dynamo's load-based rule, written anew from notes about it; its own code did not run.

Every 5 s, and not while a worker starts: one more if any worker is over; one less if every worker
is below even when the load of one is shared by the rest (its target `sla`: of the first token's
time only what the queue adds may be compared, with 0.8 of the objective less the prompt's own time;
of the inter-token latency 0.8 of the objective). Its target `sla` adds a worker only if all are
over; *any* is the rule of its other targets and adds sooner.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from bench.planner_arms.base import PoolView, WorkerView
    from pdserve.ids import Seconds

__all__ = ["DynamoLoad"]

_BELOW: Final = 0.8
_KV: Final = 1.0


@dataclass(slots=True)
class DynamoLoad:
    """One worker up or down."""

    queue_limit: Seconds
    """Objective of the first token, less what the prompt itself takes."""
    itl: Seconds
    """Objective of the inter-token latency."""
    idle_itl: Seconds
    """Inter-token latency of an idle worker: the part that does not follow the load."""
    token: Seconds
    """Seconds per queued prompt token."""
    interval: Seconds = 5.0

    def _queue(self, worker: WorkerView) -> Seconds:
        return worker.backlog * self.token

    def _is_over(self, worker: WorkerView) -> bool:
        late = self._queue(worker) > self.queue_limit
        return late or worker.itl > self.itl or worker.kv >= _KV

    def _is_below(self, worker: WorkerView, factor: float) -> bool:
        itl = self.idle_itl + max(0.0, worker.itl - self.idle_itl) * factor
        if worker.running == 0:
            itl = self.idle_itl
        soon = self._queue(worker) * factor < self.queue_limit * _BELOW
        return soon and itl < self.itl * _BELOW and worker.kv * factor < _KV

    def wanted(self, view: PoolView) -> int:
        n = len(view.workers)
        if view.starting:
            return view.size
        if any(map(self._is_over, view.workers)):
            return view.size + 1
        if n > 1 and all(self._is_below(one, n / (n - 1)) for one in view.workers):
            return view.size - 1
        return view.size

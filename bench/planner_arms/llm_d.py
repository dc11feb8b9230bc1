"""llm-d's saturation rule (workload variant autoscaler, version 1), from its documentation.

A worker is saturated at 80% of its KV or 5 waiting requests. One more, if the others have on
average less than 0.1 of KV or 3 places in the queue to spare; one less, if they still have as much
once the load of one is shared by the rest. Nothing while a worker starts.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.planner_arms.base import PoolView, WorkerView
    from pdserve.ids import Seconds

__all__ = ["Saturation"]

_KV: Final = 0.8
_QUEUE: Final = 5
_SPARE_KV: Final = 0.1
_SPARE_QUEUE: Final = 3


def _spare(open_: Sequence[WorkerView], factor: float) -> bool:
    """True if these workers have enough to spare under `factor` times their load."""
    kv = _KV - fmean(one.kv for one in open_) * factor
    queue = _QUEUE - fmean(one.waiting for one in open_) * factor
    return kv >= _SPARE_KV and queue >= _SPARE_QUEUE


@dataclass(slots=True)
class Saturation:
    """One worker up or down."""

    interval: Seconds = 30.0

    def wanted(self, view: PoolView) -> int:
        if view.starting:
            return view.size
        open_ = [one for one in view.workers if one.kv < _KV and one.waiting < _QUEUE]
        if not open_ or not _spare(open_, 1.0):
            return view.size + 1
        n = len(open_)
        if n > 1 and n == len(view.workers) and _spare(open_, n / (n - 1)):
            return view.size - 1
        return view.size

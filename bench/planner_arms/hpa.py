"""The rules of Kubernetes' horizontal pod autoscaler, and of KEDA, which feeds one.

Desired size: the current one times metric over target, rounded up; no change within a tolerance of
0.1. Pods that are not ready count as 0 when it would grow. It at most doubles, or adds four, in one
step; it shrinks to the highest recommendation of the last 300 s.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil
from statistics import fmean
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from bench.planner_arms.base import PoolView
    from pdserve.ids import Seconds

__all__ = ["Hpa", "Keda"]

_TOLERANCE: Final = 0.1
_WINDOW: Final[Seconds] = 300.0
_MOST_ADDED: Final = 4


def desired(view: PoolView, ratio: float) -> int:
    """Size for a metric that is `ratio` times its target on the ready workers."""
    ready, size = len(view.workers), view.size
    if abs(ratio - 1) <= _TOLERANCE:
        return size
    if ratio < 1:
        return ceil(ready * ratio)
    over_all = ratio * ready / size
    return ceil(size * over_all) if over_all > 1 + _TOLERANCE else size


@dataclass(slots=True)
class _Stabilised:
    """Limits of one step, up and down."""

    seen: list[tuple[Seconds, int]] = field(default_factory=list)

    def limited(self, view: PoolView, want: int) -> int:
        self.seen = [(at, n) for at, n in self.seen if at > view.now - _WINDOW]
        self.seen.append((view.now, want))
        if want >= view.size:
            return min(want, max(2 * view.size, view.size + _MOST_ADDED))
        return min(view.size, max(n for _, n in self.seen))


@dataclass(slots=True)
class Hpa:
    """Target: a mean utilisation of 70%, of KV or of places for requests, whichever is higher."""

    slots: int
    """Requests that one worker carries within the objective."""
    target: float = 0.7
    interval: Seconds = 15.0
    _steps: _Stabilised = field(default_factory=_Stabilised)

    def wanted(self, view: PoolView) -> int:
        used = fmean(max(one.kv, one.requests / self.slots) for one in view.workers)
        return self._steps.limited(view, desired(view, used / self.target))


@dataclass(slots=True)
class Keda:
    """Targets: a mean of 60% of KV in use, and 30 waiting requests a worker. The higher size
    counts."""

    kv: float = 0.6
    waiting: int = 30
    interval: Seconds = 30.0
    _steps: _Stabilised = field(default_factory=_Stabilised)

    def wanted(self, view: PoolView) -> int:
        by_kv = desired(view, fmean(one.kv for one in view.workers) / self.kv)
        waiting = fmean(one.waiting for one in view.workers)
        by_queue = desired(view, waiting / self.waiting)
        return self._steps.limited(view, max(by_kv, by_queue))

"""Knows the trace: has, in each window, what a what-if of that window's requests asks for.

No rule can know as much. It is not the optimum: the what-if is a model, and misses by a few points.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pdserve.planner.recent_arrivals import RecentArrival
from pdserve.planner.what_if.evaluate import WhatIf
from pdserve.planner.what_if.records import CandidatePool, CandidateWorker
from pdserve.sim.workloads.trace_request import length_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.planner_arms.base import PoolView
    from pdserve.ids import Seconds
    from pdserve.perf_model.latency_model import LatencyModel
    from pdserve.planner.what_if.records import LatencyObjective
    from pdserve.sim.workloads.trace_request import TraceRequest

__all__ = ["Clairvoyant", "sizes"]

WINDOW: Final[Seconds] = 30.0
_WARM: Final[Seconds] = 30.0
"""Requests of so long before a window are replayed too: it does not begin idle."""


def sizes(
    trace: Sequence[TraceRequest],
    model: LatencyModel,
    objective: LatencyObjective,
    kv_tokens: int,
    most: int,
    allowed: float,
) -> list[int]:
    """The smallest pool for each window of whose requests at most `allowed` miss the objective."""
    finished = [(length_of(one.pieces), one.output_tokens) for one in trace]
    arrivals = [RecentArrival(one.at, length_of(one.pieces)) for one in trace]
    found: list[int] = []
    for index in range(int(trace[-1].at // WINDOW) + 1):
        begin = index * WINDOW
        near = [one for one in arrivals if begin - _WARM <= one.at < begin + WINDOW]
        what_if = WhatIf(model, objective, near, finished, seeds=1)
        found.append(_smallest(what_if, kv_tokens, most, allowed, found[-1] if found else 1))
    return found


def _smallest(what_if: WhatIf, kv_tokens: int, most: int, allowed: float, guess: int) -> int:
    def keeps(n: int) -> bool:
        pool = CandidatePool(f"{n}", (CandidateWorker(kv_tokens=kv_tokens),) * n)
        return what_if.evaluate(pool).miss <= allowed

    if not what_if.requests:
        return 1
    while guess < most and not keeps(guess):
        guess += 1
    while guess > 1 and keeps(guess - 1):
        guess -= 1
    return guess


@dataclass(slots=True)
class Clairvoyant:
    """Has what the windows within a start-up need, the largest of them."""

    by_window: Sequence[int]
    start_up: Seconds
    interval: Seconds = 5.0

    def wanted(self, view: PoolView) -> int:
        first = int(view.now // WINDOW)
        last = int((view.now + self.start_up + self.interval) // WINDOW)
        return max(self.by_window[first : last + 1], default=1)

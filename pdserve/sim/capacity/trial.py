"""Replays one cluster with one seed, and says whether it keeps the objective."""

from __future__ import annotations

import contextlib
import dataclasses
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from pdserve.sim.capacity.objective import SloTally
from pdserve.sim.replay.metrics import quantile
from pdserve.sim.replay.run import ReplayStopped, replay
from pdserve.sim.workloads.generate import Generator
from pdserve.sim.workloads.transform import transform_trace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from pdserve.ids import Seconds
    from pdserve.sim.capacity.objective import Objective
    from pdserve.sim.capacity.search import PlanCell
    from pdserve.sim.replay.cold_ttft import LengthTimes
    from pdserve.sim.replay.config import ReplayConfig
    from pdserve.sim.replay.record import ReplayRecord
    from pdserve.sim.workloads.trace_request import TraceRequest
    from pdserve.sim.workloads.transform import TraceTransform

__all__ = ["TrialPlan", "TrialResult", "run_trial", "seeded_trace"]

_MOST_IDLE: Final[Seconds] = 60.0
"""Of a longer time without requests this much is replayed. The workers stay, and what routers and
workers report of an idle cluster is the same after seconds."""


@dataclass(frozen=True, slots=True)
class TrialPlan:
    """What all trials of a plan have in common. It can be sent to another process."""

    config: ReplayConfig
    trace: Iterable[TraceRequest]
    transform: TraceTransform
    objective: Objective
    idle: LengthTimes
    """Seconds to the first token on an idle worker, by prompt length."""


@dataclass(frozen=True, slots=True)
class TrialResult:
    """The result of one replay."""

    met: bool
    total: int
    ended: int
    """Requests that had ended when it was certain that the objective is missed, or all."""
    missed: dict[str, int]
    """Requests that missed each limit."""
    worst_share: float
    """The largest share of requests that missed a part of the objective."""
    ttft_p50: Seconds
    ttft_p99: Seconds
    itl_p99: Seconds
    """Of the requests that had ended."""

    def kept(self, name: str) -> float:
        """Share of the requests that kept a limit; of a replay that was ended, at most this."""
        return 1 - self.missed[name] / max(1, self.total)


def seeded_trace(plan: TrialPlan, seed: int) -> Iterator[TraceRequest]:
    """The trace with the plan's seed plus `seed`."""
    trace = plan.trace
    if isinstance(trace, Generator):
        trace = dataclasses.replace(trace, seed=trace.seed + seed)
    transform = replace(plan.transform, seed=plan.transform.seed + seed)
    return transform_trace(trace, transform)


def run_trial(
    plan: TrialPlan, cell: PlanCell, on_end: Callable[[], None] = lambda: None
) -> TrialResult:
    """Replays the trace until all requests have ended or the objective is certainly missed."""
    total = sum(1 for _ in seeded_trace(plan, cell.seed))
    tally = SloTally(plan.objective, total)
    ended: list[ReplayRecord] = []

    def take(record: ReplayRecord, now: Seconds) -> None:
        tally.count(plan.objective.misses(record, plan.idle))
        ended.append(record)
        on_end()

    config = replace(cell.shape.applied(plan.config), seed=plan.config.seed + cell.seed)
    with contextlib.suppress(ReplayStopped):
        trace = seeded_trace(plan, cell.seed)
        replay(config, trace, take, enough=lambda: tally.lost, most_idle=_MOST_IDLE)
    return _result(tally, [record for record in ended if record.completed])


def _result(tally: SloTally, done: list[ReplayRecord]) -> TrialResult:
    ttft = sorted(record.ttft for record in done)
    itl = sorted(record.itl for record in done if record.itl >= 0)
    return TrialResult(
        met=not tally.lost and tally.ended == tally.total,
        total=tally.total,
        ended=tally.ended,
        missed=dict(tally.missed),
        worst_share=max(tally.part_missed, default=0) / max(1, tally.total),
        ttft_p50=quantile(ttft, 0.5),
        ttft_p99=quantile(ttft, 0.99),
        itl_p99=quantile(itl, 0.99),
    )

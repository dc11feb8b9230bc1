"""Judges the candidates of the planner's core by what-if; implements `outlook.Judge`.

It translates: the demand series becomes recent requests and a latency model, the forecast work a
factor on the rate of those that came since lengths last shifted, and slots become workers. It
decides nothing.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import ceil
from statistics import median
from typing import TYPE_CHECKING, Final, cast, get_args

from pdserve.messages.handoff import Disagg
from pdserve.planner.demand_series import DemandSeries
from pdserve.planner.outlook import PoolOutcome
from pdserve.planner.what_if.evaluate import WhatIf
from pdserve.planner.what_if.even_load import even_load
from pdserve.planner.what_if.load import MOST_REQUESTS
from pdserve.planner.what_if.newest_mix import newest_arrivals
from pdserve.planner.what_if.records import (
    MODES,
    CandidatePool,
    CandidateWorker,
    Handoffs,
    LatencyObjective,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.ids import Seconds
    from pdserve.planner.outlook import Load, PoolCandidate, Slot
    from pdserve.planner.recent_arrivals import RecentArrival
    from pdserve.planner.what_if.records import Outcome, PoolMode

__all__ = ["WhatIfJudge"]

_REPLAYED: Final[Seconds] = 60.0
"""Time of arrivals that is replayed at least after lengths have shifted: longer than most answers
take."""
_REPEATED: Final = 3
"""How often they are replayed at most: what is new may be a burst of one client."""
_LEAST_SPAN: Final[Seconds] = 5.0
"""Arrivals of a shorter time than this do not tell a rate."""
_SEQUENCES: Final = 256
"""Sequences of a worker that has not said how many: the default of `--max-sequences`."""
_MOST_SEQUENCES: Final = 4096
"""Sequences of one worker that are modelled; more is no engine's, and a replay holds each."""


class WhatIfJudge:
    """Replays a demand series for each question. Keeps nothing between questions."""

    def __init__(
        self,
        handoffs: Handoffs | None = None,
        *,
        idle_factor: float = 0.0,
        max_batch_tokens: int = 2048,
        seeds: int = 3,
    ) -> None:
        """`handoffs`: how decode workers decide, and how fast KV moves; None: as workers say, and
        have measured. `idle_factor`: see `LatencyObjective`. `max_batch_tokens`: tokens of a
        step of every worker."""
        self._handoffs = handoffs
        self._idle_factor = idle_factor
        self._max_batch_tokens = max_batch_tokens
        self._seeds = seeds

    def judge(
        self,
        traffic: object,
        objectives: tuple[Seconds | None, Seconds | None],
        load: Load,
        candidates: Sequence[PoolCandidate],
    ) -> list[PoolOutcome]:
        """The outcome of each candidate. Takes some 50 ms for 2,000 arrivals, seed and candidate,
        so a caller with a loop runs it beside the loop.

        Errors: `TypeError` if `traffic` is no `DemandSeries`, `ConfigError` for objectives that
        cannot be.
        """
        if not isinstance(traffic, DemandSeries):
            raise TypeError(f"a what-if replays a DemandSeries, not a {type(traffic).__name__}")
        arrivals = _newest(traffic)
        factor, mean = _scaled(arrivals, load)
        if factor <= 0:
            return [PoolOutcome(miss=0.0) for _ in candidates]
        ttft, itl = objectives
        objective = LatencyObjective(ttft or 0.0, itl or 0.0, self._idle_factor if ttft else 0.0)
        question = WhatIf(
            traffic.times,
            objective,
            arrivals,
            [(one.prompt_tokens, one.output_tokens) for one in traffic.lengths],
            older=[(one.prompt_tokens, one.output_tokens) for one in traffic.older_lengths],
            factor=factor,
            handoffs=self._handoffs or _handoffs(candidates),
            seeds=self._seeds,
        )
        found = []
        for number, candidate in enumerate(candidates):
            workers = tuple(self._worker(slot) for slot in candidate.slots)
            pool = CandidatePool(
                f"candidate {number}", workers, load.cached, _held(traffic, load, workers, mean)
            )
            found.append(_answer(question.evaluate(pool)))
        return found

    def _worker(self, slot: Slot) -> CandidateWorker:
        mode: PoolMode = next((one for one in MODES if one == slot.mode), "aggregated")
        sequences = min(slot.max_sequences or _SEQUENCES, _MOST_SEQUENCES)
        return CandidateWorker(
            mode=mode,
            speed=slot.speed or 1.0,
            share=slot.share,
            kv_tokens=slot.kv_tokens,
            max_sequences=sequences,
            max_batch_tokens=self._max_batch_tokens,
            ready=slot.ready_in,
            streams=min(slot.streams, sequences),
            stream_tokens=slot.stream_tokens,
            backlog=slot.waiting_tokens,
        )


def _handoffs(candidates: Sequence[PoolCandidate]) -> Handoffs:
    """How decode workers decide, and how fast KV moves. Most workers' word counts."""
    slots = [slot for one in candidates for slot in one.slots]
    said = Counter(slot.disagg for slot in slots if slot.disagg in get_args(Disagg))
    known = Handoffs()
    disagg = cast("Disagg", said.most_common(1)[0][0]) if said else known.disagg
    measured = [slot.measured_token for slot in slots if slot.measured_token > 0]
    tokens = measured or [slot.transfer_token for slot in slots if slot.transfer_token > 0]
    return replace(known, disagg=disagg, token=median(tokens) if tokens else known.token)


def _newest(series: DemandSeries) -> list[RecentArrival]:
    """The arrivals since lengths last shifted, at the newest ones' rate. Where that was a short
    time ago they are repeated: queues and streams grow for longer than some seconds."""
    newest = newest_arrivals(series)
    even = even_load(newest)
    if len(newest) == len(series.arrivals) or len(even) <= 1:
        return even
    span = even[-1].at - even[0].at
    period = span * len(even) / (len(even) - 1)
    times = min(ceil((_REPLAYED - span) / period), _REPEATED - 1) if span > 0 else 0
    return [
        one._replace(at=one.at - back * period)
        for back in range(max(0, times), -1, -1)
        for one in even
    ]


def _scaled(arrivals: Sequence[RecentArrival], load: Load) -> tuple[float, Seconds]:
    """The factor on the rate of the arrivals, and the mean work of one; 0 if there are none."""
    work = sum(one.weight * one.work for one in arrivals)
    if work <= 0:
        return 0.0, 0.0
    span = max(_LEAST_SPAN, arrivals[-1].at - arrivals[0].at)
    return load.work * span / work, work / sum(one.weight for one in arrivals)


def _held(
    series: DemandSeries, load: Load, workers: Sequence[CandidateWorker], mean: Seconds
) -> int:
    """Requests that wait at the beginning, besides those that workers have already; at most as many
    as come, because each costs as much of the replay."""
    there = series.times.per_token * sum(worker.backlog for worker in workers)
    return round(min(MOST_REQUESTS, max(0.0, (load.backlog - there) / mean)))


def _answer(outcome: Outcome) -> PoolOutcome:
    return PoolOutcome(
        miss=outcome.miss,
        causes={str(cause): share for cause, share in outcome.causes.items()},
        wait_p95=outcome.wait_p95,
        itl_p95=outcome.itl_p95,
        utilisation={str(mode): share for mode, share in outcome.busy.items()},
        unreachable=outcome.unreachable,
    )

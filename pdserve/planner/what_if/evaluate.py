"""Answers what-ifs: one load, several candidate pools.

Each pool is replayed once per seed, always with the same requests. Means over seeds are the answer;
where the first replay is long and its answer is clear, the other seeds are left out. A pool that
was asked for before is not replayed again. Pure; the planner's core makes one object for each
question.
"""

from __future__ import annotations

from collections import Counter
from math import inf
from random import Random
from typing import TYPE_CHECKING, Final

from pdserve.planner.what_if.engine_model import ModelledRequest
from pdserve.planner.what_if.load import MOST_REQUESTS, OutputLengths, make_load
from pdserve.planner.what_if.pool_replay import PoolReplay
from pdserve.planner.what_if.records import Handoffs, MissCause, Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from pdserve.ids import Seconds
    from pdserve.perf_model.latency_model import LatencyModel
    from pdserve.planner.what_if.load import RecentRequest
    from pdserve.planner.what_if.records import (
        CandidatePool,
        CandidateWorker,
        LatencyObjective,
        PoolMode,
        ReplayedRequest,
    )

__all__ = ["ReplayTally", "WhatIf"]

_SEEDS: Final = 3
_MANY: Final = 500
"""Requests of a replay whose answer may do alone: shorter ones cost little."""
_CLEAR: Final = 0.2
"""Missed requests, as a share, from which a pool is too small whatever other seeds draw."""
_FULL: Final = 1.0
"""Work beyond the pool's capacity by which it is hopeless: it is late even in a long queue."""


class WhatIf:
    """One load and one objective, for any number of candidate pools."""

    def __init__(
        self,
        model: LatencyModel,
        objective: LatencyObjective,
        recent: Sequence[RecentRequest],
        finished: Iterable[tuple[int, int]],
        *,
        older: Iterable[tuple[int, int]] = (),
        factor: float = 1.0,
        handoffs: Handoffs | None = None,
        seeds: int = _SEEDS,
        most: int = MOST_REQUESTS,
    ) -> None:
        """`recent`: arrivals in order of time. `finished`, `older`: see `OutputLengths`.
        `factor`: forecast load over that of `recent`. `most`: requests of a replay.

        Errors: `ConfigError` for an objective that cannot be, `ValueError` for such a factor.
        """
        objective.validate()
        self._model = model
        self._objective = objective
        self._handoffs = handoffs or Handoffs()
        self._lengths = OutputLengths(finished, older)
        self._loads = [
            make_load(recent, self._lengths, factor, seed, most) for seed in range(seeds)
        ]
        self._answers: dict[CandidatePool, Outcome] = {}

    @property
    def requests(self) -> int:
        """Number of requests of one replay."""
        return len(self._loads[0]) if self._loads else 0

    def evaluate(self, pool: CandidatePool) -> Outcome:
        """What the pool would do to the load. No requests: nothing is missed."""
        found = self._answers.get(pool)
        if found is None:
            tallies: list[ReplayTally] = []
            for seed in range(len(self._loads)):
                tallies.append(self.replay(pool, seed))
                if tallies[0].clear:
                    break
            found = self._answers[pool] = _merged(pool, tallies)
        return found

    def hopeless(self, pool: CandidatePool) -> bool:
        """True if the pool lacks the seconds to compute the prompts, by a sum that takes no time:
        what a search need not replay."""
        load = self._loads[0] if self._loads else ()
        if not load:
            return False
        work = sum(self._model.prefill(one.prompt_tokens, one.cached_tokens) for one in load)
        limit = self._objective.ttft or inf
        span = load[-1].at + limit
        seconds = sum(
            max(0.0, min(worker.leaves, span) - worker.ready) / worker.speed
            for worker in pool.workers
        )
        return work > _FULL * seconds

    # ------------------------------------------------------------------ one replay

    def replay(self, pool: CandidatePool, seed: int) -> ReplayTally:
        """Replay the load of one seed, and judge it."""
        requests = self._requests(pool, self._loads[seed])
        random = Random(f"what-if streams {seed}")

        def outputs(streams: int) -> list[int]:
            return [self._lengths.rest(random) for _ in range(streams)]

        replay = PoolReplay(pool, self._model, self._handoffs, requests, outputs)
        replay.run()
        tally = ReplayTally(self._model, self._objective, pool, self._handoffs)
        for request in requests:
            if request.counts:
                tally.add(request)
        tally.pool(replay)
        return tally

    def _requests(
        self, pool: CandidatePool, load: Sequence[ReplayedRequest]
    ) -> list[ModelledRequest]:
        """The load's requests with the pool's cache, and before them those that are held now."""
        kept = pool.cache_kept
        held = [
            ModelledRequest(
                0.0,
                one.prompt_tokens,
                int(kept * one.cached_tokens),
                one.output_tokens,
                counts=False,
            )
            for one in (load[index % len(load)] for index in range(pool.held if load else 0))
        ]
        return held + [
            ModelledRequest(
                one.at, one.prompt_tokens, int(kept * one.cached_tokens), one.output_tokens
            )
            for one in load
        ]


class ReplayTally:
    """The requests of one replay, judged."""

    def __init__(
        self,
        model: LatencyModel,
        objective: LatencyObjective,
        pool: CandidatePool,
        handoffs: Handoffs,
    ) -> None:
        self._model = model
        self._objective = objective
        serving = [worker for worker in pool.workers if worker.mode != "prefill"]
        self._idle = _idle_ttft(model, handoffs, pool.workers)
        self._speed = min((worker.speed for worker in serving), default=1.0)
        self.requests = self.unreachable = 0
        self.missed_ttft = self.missed_itl = self.missed = 0
        self.causes: Counter[MissCause] = Counter()
        self.ttfts: list[Seconds] = []
        self.waits: list[float] = []
        """Of each request, the part of the time that it may wait for its first token."""
        self.itls: list[Seconds] = []
        self.busy: dict[PoolMode, float] = {}
        self.kv_used: dict[PoolMode, float] = {}

    @property
    def clear(self) -> bool:
        """True if other seeds cannot change the verdict: many requests, of which none or a large
        part are missed. Seeds differ in output lengths only."""
        return self.requests >= _MANY and not 0 < self.missed < _CLEAR * self.requests

    def add(self, request: ModelledRequest) -> None:
        """Judge one request."""
        self.requests += 1
        objective, model = self._objective, self._model
        limit = inf
        if objective.ttft or objective.idle_factor:
            limit = objective.ttft + objective.idle_factor * model.prefill(request.prompt)
        late = objective.itl or inf
        step = self._speed * model.step(1, request.prompt)
        idle = self._idle(request)
        if idle > limit or (step > late and request.output > 1):
            self.unreachable += 1
            return
        ttft = request.first - request.arrived if request.first >= 0 else inf
        itl = _itl(request)
        self.ttfts.append(ttft)
        self.waits.append(max(0.0, ttft - idle) / max(limit - idle, 1e-9) if limit < inf else 0.0)
        if request.output > 1:
            self.itls.append(itl)
        missed_ttft, missed_itl = ttft > limit, itl > late
        self.missed_ttft += missed_ttft
        self.missed_itl += missed_itl
        if missed_ttft or missed_itl:
            self.missed += 1
            self.causes[_cause(request) if missed_ttft else "decode"] += 1

    def pool(self, replay: PoolReplay) -> None:
        """Take the workers' figures in."""
        until = max(replay.now, 1e-9)
        for mode in {engine.worker.mode for engine in replay.engines}:
            own = [engine for engine in replay.engines if engine.worker.mode == mode]
            there = sum(
                max(0.0, min(until, engine.worker.leaves) - engine.worker.ready) for engine in own
            )
            computing = sum(engine.computing for engine in own)
            self.busy[mode] = max(computing, sum(e.filled for e in own)) / max(there, 1e-9)
            self.kv_used[mode] = max(
                engine.peak / engine.capacity if engine.capacity < inf else 0.0 for engine in own
            )


def _idle_ttft(
    model: LatencyModel, handoffs: Handoffs, workers: Sequence[CandidateWorker]
) -> Callable[[ModelledRequest], Seconds]:
    """The least time to the first token that the pool can give to a request."""
    here = min((w.speed for w in workers if w.mode != "prefill"), default=inf)
    away = min((w.speed for w in workers if w.mode in ("prefill", "both")), default=inf)

    def idle(request: ModelledRequest) -> Seconds:
        own = model.prefill(request.prompt, request.cached)
        last = handoffs.token * min(request.left, 2048)
        return min(here * own, away * own + handoffs.latency + last)

    return idle


def _itl(request: ModelledRequest) -> Seconds:
    if request.output < 2:
        return 0.0
    if request.end < 0 or request.first < 0:
        return inf
    return (request.end - request.first) / (request.output - 1)


def _cause(request: ModelledRequest) -> MissCause:
    """What took the most of the time to the first token."""
    parts = _parts(request)
    return max(parts, key=parts.__getitem__)


def _parts(request: ModelledRequest) -> dict[MissCause, Seconds]:
    arrived, placed, asked = request.arrived, request.placed, request.asked
    if placed < 0:
        return {"queue": 1.0}
    if asked < 0:
        return {"queue": placed - arrived, "decode_admission": inf}
    admission = asked - placed
    if request.begun < 0:
        return {"queue": inf, "decode_admission": admission}
    parts: dict[MissCause, Seconds] = {
        "queue": (placed - arrived) + max(0.0, request.begun - asked),
        "decode_admission": admission,
    }
    if request.computed >= 0:
        parts["prefill"] = request.computed - request.begun
        parts["handoff"] = request.first - request.computed if request.first >= 0 else inf
    return parts


def _merged(pool: CandidatePool, tallies: Sequence[ReplayTally]) -> Outcome:
    requests = sum(tally.requests for tally in tallies)
    unreachable = sum(tally.unreachable for tally in tallies)
    judged = max(1, requests - unreachable)
    causes: Counter[MissCause] = sum((tally.causes for tally in tallies), Counter())
    misses = [tally.missed / max(1, tally.requests - tally.unreachable) for tally in tallies] or [
        0.0
    ]
    count = max(1, len(tallies))
    modes = sorted({mode for tally in tallies for mode in tally.busy})
    return Outcome(
        pool=pool,
        requests=requests // count,
        unreachable=unreachable / max(1, requests),
        miss=sum(tally.missed for tally in tallies) / judged,
        miss_ttft=sum(tally.missed_ttft for tally in tallies) / judged,
        miss_itl=sum(tally.missed_itl for tally in tallies) / judged,
        spread=max(misses) - min(misses),
        causes={cause: number / judged for cause, number in causes.most_common()},
        busy={mode: sum(tally.busy[mode] for tally in tallies) / count for mode in modes},
        kv_used={mode: max(tally.kv_used[mode] for tally in tallies) for mode in modes},
        ttft_p95=_p95([ttft for tally in tallies for ttft in tally.ttfts]),
        wait_p95=_p95([wait for tally in tallies for wait in tally.waits]),
        itl_p95=_p95([itl for tally in tallies for itl in tally.itls]),
    )


def _p95(values: list[float]) -> float:
    if not values:
        return 0.0
    values.sort()
    return values[min(len(values) - 1, int(0.95 * len(values)))]

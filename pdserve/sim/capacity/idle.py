"""Measures what one idle worker needs, and bounds from it what any cluster can reach.

No number of workers makes a request faster than it is alone on a worker whose cache has all that
earlier prompts shared with it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from pdserve.sim.capacity.objective import SloTally
from pdserve.sim.capacity.shapes import aggregated
from pdserve.sim.replay.cold_ttft import LengthTimes, measured_lengths
from pdserve.sim.replay.run import replay
from pdserve.sim.workloads.trace_request import TraceRequest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pdserve.ids import Seconds
    from pdserve.sim.capacity.objective import Objective
    from pdserve.sim.replay.config import ReplayConfig
    from pdserve.sim.replay.record import ReplayRecord
    from pdserve.sim.workloads.trace_request import PromptPiece

__all__ = ["IdleWorker", "RequestFloor", "TraceFloor", "measure_idle", "request_floors"]

_APART: Final[Seconds] = 2.0
_PER_TOKEN: Final[Seconds] = 0.002
"""A request that is measured has ended long before the next one: its time is far below these."""
_PER_OCTAVE: Final = 2
_OUTPUT: Final = 9
_MOST_PREFIXES: Final = 4_000_000
"""Prefixes that are remembered; what comes later counts as cached."""


@dataclass(frozen=True, slots=True)
class IdleWorker:
    """Times of single requests on an idle worker with an empty cache."""

    ttft: LengthTimes
    itl: Seconds
    """Mean inter-token latency of the shortest prompt."""
    longest: int
    """The longest prompt that the worker answers, if the trace has a longer one."""


@dataclass(frozen=True, slots=True)
class RequestFloor:
    """The least work of one request, wherever it is placed."""

    prompt_tokens: int
    uncached_tokens: int
    output_tokens: int
    at: Seconds


def measure_idle(config: ReplayConfig, longest: int) -> IdleWorker:
    """Measures one worker of `config`, without noise, up to prompts of `longest` tokens, or up to
    the longest one that it answers."""
    quiet = replace(aggregated(1).applied(config), noise=0.0, slow_share=0.0, patience=0.0)
    lengths = measured_lengths(min(longest, quiet.kv_tokens, quiet.max_model_len), _PER_OCTAVE)
    records = _answered(quiet, lengths)
    fits = max((one.prompt_tokens for one in records), default=0)
    refused = next((length for length in lengths if length > fits), fits)
    while refused - fits > 1:
        middle = (fits + refused) // 2
        answered = _answered(quiet, [middle])
        records += answered
        fits, refused = (middle, refused) if answered else (fits, middle)
    records.sort(key=lambda one: one.prompt_tokens)
    measured = [record.prompt_tokens for record in records]
    times = LengthTimes(measured or [1], [one.ttft for one in records] or [math.inf])
    itl = min((record.itl for record in records), default=math.inf)
    return IdleWorker(times, itl, fits)


def _answered(config: ReplayConfig, lengths: Iterable[int]) -> list[ReplayRecord]:
    """Prompts of these lengths, one after the other; without those that are refused."""
    return [one for one in replay(config, _alone(lengths)).records if one.completed]


def _alone(lengths: Iterable[int]) -> Iterator[TraceRequest]:
    at = 0.0
    for number, length in enumerate(lengths):
        yield TraceRequest(number, at, ((number, length),), _OUTPUT)
        at += _APART + length * _PER_TOKEN


def request_floors(trace: Iterable[TraceRequest]) -> Iterator[RequestFloor]:
    """The least work of each request, in the order of the trace."""
    seen: set[int] = set()
    whole: dict[int, int] = {}
    for request in trace:
        own, cached = _cached(request.pieces, seen)
        before = 0 if request.after is None else whole.get(request.after, 0)
        if request.session:
            whole[request.number] = before + own + request.output_tokens
        # A prompt's last token is always computed.
        uncached = own if before else max(1, own - cached)
        yield RequestFloor(before + own, uncached, request.output_tokens, request.at)


def _cached(pieces: Iterable[PromptPiece], seen: set[int]) -> tuple[int, int]:
    """Tokens of the pieces, and of those that an earlier prompt began with."""
    tokens = cached = name = 0
    for piece in pieces:
        name = hash((name, piece))
        known = name in seen or len(seen) >= _MOST_PREFIXES
        if known and cached == tokens:
            cached += piece[1]
        seen.add(name)
        tokens += piece[1]
    return tokens, cached


class TraceFloor:
    """What no cluster can do better with a trace."""

    def __init__(
        self, floors: Iterable[RequestFloor], objective: Objective, idle: IdleWorker
    ) -> None:
        self._objective = objective
        self._idle = idle
        self._works: list[Seconds] = []
        self._last: Seconds = 0.0
        self.slowest: RequestFloor | None = None
        """The request whose first token takes longest on an idle worker."""
        self.longest: RequestFloor | None = None
        floors = list(floors)
        self.tally = SloTally(objective, len(floors))
        """The requests that miss the objective on an idle worker."""
        for floor in floors:
            self._take(floor)

    def first_token(self, floor: RequestFloor) -> Seconds:
        """The least time to the request's first token; infinite for a prompt too long to serve."""
        if floor.prompt_tokens > self._idle.longest:
            return math.inf
        return self._idle.ttft(floor.uncached_tokens)

    def least_workers(self) -> int:
        """The number of workers below which prompts are computed too late, even if each batch is
        perfect."""
        limit, share = self._objective.ttft, self._objective.good
        if limit is None or not self._works:
            return 1
        count = math.ceil((limit.share or share) * len(self._works))
        work = sum(sorted(self._works)[:count])
        slack = limit.time + self._objective.cold * max(self._idle.ttft.times)
        return max(1, math.ceil(work / (self._last + slack)))

    def _take(self, floor: RequestFloor) -> None:
        objective, first = self._objective, self.first_token(floor)
        if self.slowest is None or first > self.first_token(self.slowest):
            self.slowest = floor
        if self.longest is None or floor.prompt_tokens > self.longest.prompt_tokens:
            self.longest = floor
        self._last = max(self._last, floor.at)
        self._works.append(0.0 if math.isinf(first) else max(0.0, first - self._idle.ttft.times[0]))
        misses = set(objective.limits) if math.isinf(first) else set()
        if objective.ttft is not None:
            cold = objective.cold * self._idle.ttft(floor.prompt_tokens)
            if first > objective.ttft.time + cold:
                misses.add("ttft")
        slow = objective.itl is not None and self._idle.itl > objective.itl.time
        if slow and floor.output_tokens > 1:
            misses.add("itl")
        self.tally.count(frozenset(misses))

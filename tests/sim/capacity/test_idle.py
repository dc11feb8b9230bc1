"""What no number of workers can do better."""

from __future__ import annotations

import math

import pytest

from pdserve.sim.capacity.idle import (
    IdleWorker,
    RequestFloor,
    TraceFloor,
    measure_idle,
    request_floors,
)
from pdserve.sim.capacity.objective import Objective, SloLimit
from pdserve.sim.replay.cold_ttft import LengthTimes
from pdserve.sim.replay.config import ReplayConfig
from pdserve.sim.workloads.trace_request import TraceRequest

IDLE = IdleWorker(LengthTimes((0, 10_000), (0.0, 10.0)), itl=0.006, longest=10_000)
"""A millisecond a token."""


def floors(*uncached: int, every: float = 1.0) -> list[RequestFloor]:
    return [RequestFloor(tokens, tokens, 10, n * every) for n, tokens in enumerate(uncached)]


def test_only_what_no_earlier_prompt_began_with_is_computed() -> None:
    trace = [
        TraceRequest(0, 0.0, ((1, 100), (2, 50)), 10),
        TraceRequest(1, 1.0, ((1, 100), (3, 50)), 10),
        TraceRequest(2, 2.0, ((3, 50),), 10),
        TraceRequest(3, 3.0, ((1, 100), (2, 50)), 10),
    ]
    assert [one.uncached_tokens for one in request_floors(trace)] == [150, 50, 50, 1]


def test_a_following_turn_begins_with_prompt_and_answer() -> None:
    trace = [
        TraceRequest(0, 0.0, ((1, 100),), 10, "s"),
        TraceRequest(1, 0.0, ((2, 30),), 10, "s", after=0),
        TraceRequest(2, 0.0, ((3, 5),), 10, "s", after=1),
    ]
    made = list(request_floors(trace))
    assert [one.prompt_tokens for one in made] == [100, 140, 155]
    assert [one.uncached_tokens for one in made] == [100, 30, 5]


def test_an_objective_that_an_idle_worker_misses_is_unreachable() -> None:
    objective = Objective(ttft=SloLimit(0.5), good=0.5)
    assert not TraceFloor(floors(400, 600), objective, IDLE).tally.lost
    lost = TraceFloor(floors(400, 600, 700), objective, IDLE)
    assert lost.tally.lost
    assert lost.tally.missed == {"ttft": 2}
    assert lost.slowest is not None
    assert lost.slowest.prompt_tokens == 700


def test_a_gap_that_one_request_misses_is_unreachable() -> None:
    assert TraceFloor(floors(10), Objective(itl=SloLimit(0.005)), IDLE).tally.lost
    assert not TraceFloor(floors(10), Objective(itl=SloLimit(0.007)), IDLE).tally.lost


def test_a_prompt_that_no_worker_takes_is_missed() -> None:
    made = TraceFloor(floors(10_001), Objective(itl=SloLimit(1.0)), IDLE)
    assert made.tally.lost
    assert math.isinf(made.first_token(floors(10_001)[0]))


@pytest.mark.parametrize(("count", "workers"), [(1, 1), (10, 2), (100, 7), (1000, 10)])
def test_prompts_need_a_number_of_workers(count: int, workers: int) -> None:
    """Each takes a second, ten a second come, and the last must have begun within five."""
    objective = Objective(ttft=SloLimit(5.0), good=1.0)
    made = TraceFloor(floors(*[1000] * count, every=0.1), objective, IDLE)
    assert made.least_workers() == workers


def test_an_idle_worker_is_measured() -> None:
    config = ReplayConfig(prefill=2, decode=2, workers=0, block_size=64, kv_tokens=4096, noise=0.3)
    idle = measure_idle(config, 6000)
    assert 4000 < idle.longest <= 4096, "longer prompts do not fit into the pool"
    assert idle.ttft(64) < idle.ttft(1000) < idle.ttft(idle.longest) < 1.0
    assert 0.001 < idle.itl < 0.02
    assert measure_idle(config, 100).longest == 100


def test_a_prompt_that_a_worker_just_takes_is_not_unreachable() -> None:
    """Between two lengths that are measured, of which the worker takes only the first."""
    config = ReplayConfig(block_size=64, kv_tokens=4096)
    longest = measure_idle(config, 10**9).longest
    idle = measure_idle(config, 6000)
    made = TraceFloor(floors(longest - 500, longest), Objective(ttft=SloLimit(9.0)), idle)
    assert not made.tally.lost

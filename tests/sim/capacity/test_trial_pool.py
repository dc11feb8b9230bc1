"""Trials here and in other processes."""

from __future__ import annotations

import multiprocessing
from multiprocessing import resource_tracker
from typing import TYPE_CHECKING

import pytest

from pdserve.sim.capacity.objective import Objective, SloLimit
from pdserve.sim.capacity.search import PlanCell
from pdserve.sim.capacity.shapes import split
from pdserve.sim.capacity.trial import TrialPlan
from pdserve.sim.capacity.trial_pool import TrialPool
from pdserve.sim.replay.cold_ttft import LengthTimes
from pdserve.sim.replay.config import ReplayConfig
from pdserve.sim.workloads.generate import Unique
from pdserve.sim.workloads.transform import TraceTransform

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

CELL = PlanCell(split(1, 2), 1)


def plan(requests: int) -> TrialPlan:
    return TrialPlan(
        ReplayConfig(block_size=64, kv_tokens=64_000),
        Unique(requests=requests, rate=20, input=500, output=10),
        TraceTransform(),
        Objective(ttft=SloLimit(10.0)),
        LengthTimes((1,), (0.0,)),
    )


@pytest.fixture
def tracker() -> Iterator[None]:
    """Ends the process that `multiprocessing` starts beside its own."""
    yield
    resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]


@pytest.mark.usefixtures("tracker")
def test_a_process_finds_the_same_result() -> None:
    seen: list[int] = []
    results = []
    for processes in (1, 2):
        seen.append(0)
        with TrialPool(plan(25), processes, lambda cells, ended: seen.append(ended)) as pool:
            results.append(pool.run([CELL]))
    assert results[0] == results[1]
    assert results[0][CELL].met
    assert seen.count(25) == 2, "both pools count every request"


@pytest.mark.usefixtures("tracker")
def test_an_error_ends_the_processes() -> None:
    def watch(running: Sequence[PlanCell], ended: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), TrialPool(plan(10**6), 2, watch) as pool:
        pool.run([CELL])
    assert not multiprocessing.active_children()

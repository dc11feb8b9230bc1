"""Worlds with planners: a slice of seeds, and what is brought about on purpose."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest

from tests.worlds.faults import PLANNER_KINDS, Fault
from tests.worlds.oracle.coverage import count_visits
from tests.worlds.planner.plans import planned
from tests.worlds.planner.scenarios import PLANNER_TROUBLES, draw_planners
from tests.worlds.run import run_plan

if TYPE_CHECKING:
    from pdserve.messages.handoff import WorkerMode
    from tests.worlds.oracle.coverage import Cells

SEEDS = 3
"""Worlds of the short slice; each takes some seconds."""


@pytest.mark.timeout(240)
def test_a_slice_of_worlds_with_planners(seed: int, long: bool) -> None:
    for number in range(40 if long else SEEDS):
        run_plan(draw_planners(seed % 10**9 + number))


@pytest.mark.timeout(120)
def test_a_drain_is_undone_when_the_load_returns(seed: int) -> None:
    """Three workers have little to do, one is drained, and then many ask."""
    cells: Cells = Counter()
    faults = [
        Fault("load", 1.0, 12.0, "f0", "", 4.0),  # so that routers learn soon
        Fault("crowd-at-drain", 5.0, 60.0, "f0", "", 50.0),
    ]
    three: tuple[WorkerMode, ...] = ("aggregated",) * 3
    with count_visits(cells):
        report = run_plan(planned(seed % 10**9, faults, until=70.0, workers=three))
    assert report.effects["crowd-at-drain"]
    assert cells["change undo_drain ordered", "seen ready"]
    assert cells["change stop draining", "seen back"]
    failed = {words for words in report.outcomes if words.startswith("failed")}
    assert failed <= {"failed DeadlineExceeded"}


def test_a_plan_is_its_seeds(seed: int) -> None:
    assert draw_planners(seed) == draw_planners(seed)
    assert draw_planners(seed) != draw_planners(seed + 1)


def test_every_fault_is_drawn() -> None:
    drawn = {fault.kind for seed in range(60) for fault in draw_planners(seed).faults}
    assert PLANNER_KINDS.keys() <= drawn
    assert len(PLANNER_TROUBLES) >= 30

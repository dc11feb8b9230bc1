"""Worlds with planners: a slice of seeds, and what is brought about on purpose."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from pdserve.planner import explain
from tests.worlds.faults import PLANNER_KINDS, Fault
from tests.worlds.oracle.coverage import count_visits
from tests.worlds.planner.bindings import RULES
from tests.worlds.planner.coverage import (
    ALL_CHANGE_CELLS,
    CHANGE_CELLS,
    MODE_CELLS,
    NEVER_CELLS,
    RARE_CELLS,
    UNBOUND,
)
from tests.worlds.planner.plans import planned
from tests.worlds.planner.planted_bugs import LEARN, PLANNER_BUGS, THREE, UNSEEN, load
from tests.worlds.planner.scenarios import PLANNER_TROUBLES, draw_planners
from tests.worlds.run import WorldFailure, run_plan

if TYPE_CHECKING:
    from pdserve.messages.handoff import WorkerMode
    from tests.worlds.oracle.coverage import Cells

SLICE = 1
"""Worlds of the short slice; each takes some seconds."""


@pytest.mark.timeout(240)
def test_a_slice_of_worlds_with_planners(seed: int, long: bool) -> None:
    for number in range(20 if long else SLICE):
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


# ---------------------------------------------------------------------- planted bugs


def some_bugs(seed: int, *, long: bool) -> list[str]:
    """One, another with every commit; all in long mode."""
    names = list(PLANNER_BUGS)
    return names if long else [names[seed % len(names)]]


def run_worlds(name: str, count: int) -> None:
    """The first worlds that were made for a bug."""
    for number in range(count):
        run_plan(PLANNER_BUGS[name].world(number))


@pytest.mark.timeout(900)
def test_planted_bugs_of_planners_are_caught(seed: int, long: bool) -> None:
    for name in some_bugs(seed, long=long):
        with pytest.MonkeyPatch.context() as patch:
            PLANNER_BUGS[name].plant(patch)
            # Not every drawn load gives the bug an occasion: one of three worlds has to show it.
            with pytest.raises(WorldFailure):
                run_worlds(name, 3)


@pytest.mark.long(one_in=2)
@pytest.mark.timeout(900)
def test_their_worlds_pass_without_them(seed: int, long: bool) -> None:
    for name in some_bugs(seed, long=long):
        run_plan(PLANNER_BUGS[name].world(0))


@pytest.mark.parametrize("name", UNSEEN)
def test_what_no_world_shows_is_shown_elsewhere(name: str) -> None:
    file, test, why = UNSEEN[name]
    assert test in (Path(__file__).parents[2] / file).read_text(encoding="utf-8")
    assert why


def test_every_limit_has_a_rule() -> None:
    assert RULES.keys() == explain._WORDS.keys()
    assert all(UNBOUND.values())


_HEAVY: Final = [LEARN, load(15.0, 15.0, 8.0)]


@pytest.mark.long(one_in=3)
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("limit", "settings"),
    [
        ("actuator", {"machines": 0, "max": 4}),
        ("objective", {"ttft": None}),
        ("itl", {"ttft": None, "itl": 0.4, "workers": THREE}),
        ("unreachable", {"out_of_reach": True, "workers": THREE}),
    ],
)
def test_limits_that_need_a_setting_of_their_own_bind(limit: str, settings: dict[str, Any]) -> None:
    cells: Cells = Counter()
    with count_visits(cells):
        run_plan(planned(0, _HEAVY, until=35.0, **settings))
    assert cells["limit", limit]


@pytest.mark.timeout(240)
def test_a_prefill_and_a_decode_worker_are_left_where_no_other_mode_is_wanted() -> None:
    """Three have next to nothing to do for a minute, and one of them goes."""
    cells: Cells = Counter()
    modes: tuple[WorkerMode, ...] = ("prefill", "decode", "decode")
    with count_visits(cells):
        run_plan(planned(0, [], until=60.0, rate=0.01, workers=modes, max=4))
    assert cells["limit", "paired"]


def test_a_plan_is_its_seeds(seed: int) -> None:
    assert draw_planners(seed) == draw_planners(seed)
    assert draw_planners(seed) != draw_planners(seed + 1)


def test_every_fault_is_drawn() -> None:
    drawn = {fault.kind for seed in range(400) for fault in draw_planners(seed).faults}
    assert PLANNER_KINDS.keys() <= drawn
    assert len(PLANNER_TROUBLES) >= 30


# ---------------------------------------------------------------------- coverage


def test_every_cell_of_changes_is_accounted_for() -> None:
    assert CHANGE_CELLS | RARE_CELLS | NEVER_CELLS == ALL_CHANGE_CELLS
    total = len(CHANGE_CELLS) + len(RARE_CELLS) + len(NEVER_CELLS)
    assert total == len(ALL_CHANGE_CELLS), "each once"


@pytest.mark.timeout(3600)
def test_many_worlds_visit_the_cells_of_changes(seed: int, long: bool) -> None:
    if not long:
        pytest.skip("minutes: PDSERVE_TEST_LONG=1")
    cells: Cells = Counter()
    with count_visits(cells):
        for number in range(60):
            run_plan(draw_planners(seed % 10**9 + number))
    assert sorted((CHANGE_CELLS | MODE_CELLS) - cells.keys()) == []
    assert sorted(NEVER_CELLS & cells.keys()) == []

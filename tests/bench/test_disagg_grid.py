"""The comparison of aggregated and disaggregated workers: its plan and its page."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Any

import pytest

from bench.disagg_grid.cells import (
    ABLATIONS,
    KINDS,
    Arm,
    Scale,
    World,
    ablations,
    arms,
    grid,
    mix,
)
from bench.disagg_grid.planned import LONG, CellResults, cells, planned_page, results_of
from bench.disagg_grid.report import Findings, page
from bench.disagg_grid.runner import run_one
from bench.planner_what_if import KNEES
from pdserve.router.policies.ttft import Ttft
from pdserve.sim.workloads.trace_request import length_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.disagg_grid.planned import Ask
    from bench.disagg_grid.runner import Job, Result

SMALL = Scale(requests=40, seeds=2, loads=(0.5, 1.0), prefills=(2, 4))


def test_the_mix_is_a_function_of_its_seed_and_has_both_kinds() -> None:
    one, same, other = (list(mix(Scale(), 20.0, seed)) for seed in (1, 1, 2))
    assert one == same != other
    long = [request for request in one if length_of(request.pieces) > 2000]
    assert 0.12 < len(long) / len(one) < 0.28
    assert [request.at for request in one] == sorted(request.at for request in one)


def test_every_cell_has_both_sides() -> None:
    plan = {(world, arm.name, seed) for world, arm, seed in grid(Scale())}
    assert len(plan) == len(list(grid(Scale())))
    for world, arm, seed in grid(Scale()):
        if arm.disagg == "predict":
            assert (world, f"{arm.name.split()[0]} always", seed) in plan
            assert arm.prefill + arm.decode == Scale().workers


def test_what_is_ablated_are_options_of_the_policy() -> None:
    names = set(Ttft.__slots__)
    assert all(set(options) <= names for options in ABLATIONS.values())


def made(good: float) -> Result:
    times = {"mean": 0.2, "p50": 0.1, "p90": 0.3, "p99": 0.4}
    result: dict[str, Any] = {
        "good": good,
        "ttft": times,
        "itl": times,
        "token_gap": times,
        "prefills": {"remote_share": 0.5},
        "transfers": {"seconds": 1.0},
        "prediction": {"to 512": {"ratio_p50": 1.0}},
    }
    return result


def findings(predict: float, always: float, aggregated: float) -> Findings:
    shares = {"predict": predict, "always": always, "rule": always, "never": aggregated}
    results: dict[tuple[World, str], list[Result]] = {}
    for world, arm, _ in grid(SMALL):
        results.setdefault((world, arm.name), []).append(made(shares[arm.disagg]))
    ablated: dict[tuple[World, str, str], list[Result]] = {}
    for world, name, arm, _ in ablations(SMALL):
        ablated.setdefault((world, arm.name, name), []).append(made(predict))
    return Findings(
        scale=SMALL,
        knees={kind.preset: 10.0 for kind in KINDS},
        results=results,
        ablated=ablated,
        reasons={"Those:": "because of this."},
        cpu_seconds=60.0,
    )


@pytest.mark.parametrize(
    ("shares", "held", "words"),
    [
        ((0.9, 0.9, 0.8), 16, "disaggregation pays"),
        ((0.9, 0.5, 0.9), 16, "equal"),
        ((0.8, 0.5, 0.9), 0, "does not pay"),
        ((0.86, 0.5, 0.9), 16, "does not pay"),
    ],
)
def test_the_page_says_who_wins(shares: tuple[float, float, float], held: int, words: str) -> None:
    text = page(findings(*shares), ["a fact"], ["how"])
    assert f" {held} of 16 cells." in text
    assert len(re.findall(rf"\| {words} \|", text)) == 16
    assert ("because of this" in text) == (held < 16)
    for name in ABLATIONS:
        assert f"| {name} |" in text


def test_one_replay_of_each_side() -> None:
    world = World(KINDS[0], 0.5)
    for arm in (Arm(workers=4), Arm(0, 2, 2, "predict", {"most_itl": "0.015"})):
        result = run_one(SMALL, (world, arm, 1, 20.0))
        assert result["outcomes"]["completed"] == SMALL.requests
        assert 0 <= result["good"] <= 1
    assert [arm.name for arm in arms(SMALL)][-1] == "4:4 rule"


def planned(good: float, ratios: list[tuple[float, str]] | None = None) -> Result:
    scaling = {"ratios": ratios or [], "switches": [1.0, 2.0]}
    return {"good": good, "scaling": scaling}


def test_the_first_cells_of_the_planner_are_spread() -> None:
    every = cells(LONG)
    assert len(every) == len(set(every)) == 48
    assert len({cell.prefill for cell in every[:3]}) == 3
    quarter = every[:12]
    assert len({(cell.world.load, cell.prefill) for cell in quarter}) == 12
    assert len({(cell.world.load, cell.world.bandwidth) for cell in quarter}) == 8
    assert len({(cell.prefill, cell.world.bandwidth) for cell in quarter}) == 6


def replays(good: float) -> tuple[list[tuple[Scale, Job]], Ask]:
    """A log of what is asked, and an `ask` that finds `always` so good, and others 0.9."""
    asked: list[tuple[Scale, Job]] = []

    def ask(scale: Scale, jobs: Sequence[Job]) -> list[Result]:
        asked.extend((scale, job) for job in jobs)
        return [planned(good if arm.disagg == "always" else 0.9) for _, arm, _, _ in jobs]

    return asked, ask


def test_aggregated_workers_serve_once_for_all_networks_and_ratios() -> None:
    asked, ask = replays(0.9)
    for cell in cells(LONG):
        assert results_of(cell, KNEES, ask) is not None
    jobs = [job for _, job in asked if job[1].name == "aggregated"]
    assert len({world for world, _, _, _ in jobs}) == 8


@pytest.mark.parametrize(("good", "whole"), [(0.44, False), (0.46, True)])
def test_a_side_that_drowns_is_not_replayed_in_full(good: float, whole: bool) -> None:
    asked, ask = replays(good)
    found = results_of(cells(LONG)[0], KNEES, ask)
    assert found is not None
    assert found.drowned is not whole
    long = [job[1].name for scale, job in asked if scale == LONG]
    assert long == ["aggregated", "2:6 predict planned", *(["2:6 always"] if whole else [])]


def test_a_cell_that_is_not_whole_has_no_results() -> None:
    _, ask = replays(0.9)
    for may in range(4):
        calls = count()
        found = results_of(
            cells(LONG)[0],
            KNEES,
            lambda *a, calls=calls, may=may: ask(*a) if next(calls) < may else None,
        )
        assert (found is not None) == (may == 3)


def test_the_page_of_the_planner_has_both_sides_and_when_it_settled() -> None:
    every = cells(LONG)
    first, second = [(0.0, "2:6"), (90.0, "8+0:0")], [(0.0, "4:4"), (30.0, "5:3")]
    found = {
        every[0]: CellResults(
            planned(0.9), planned(0.4), planned(0.6), planned(0.89, first), drowned=True
        ),
        every[1]: CellResults(planned(0.4), planned(0.8), planned(0.78), planned(0.7, second)),
    }
    text = planned_page(found, every, ["a fact"])
    assert "- 2 of 48 cells ran." in text
    assert "planner 1 of 2 cells are within 5% of the better side (aim 95%; not reached)" in text
    assert "at the fixed ratio 1 are" in text
    assert "came after 60 s (p50), at most 90 s" in text
    assert "- Lost: h100-70b-tp4, 1.25 GB/s, load 0.6, 4:4: 87% of the better side." in text
    assert "| 90.0% | (40.0%) | 60.0% | 67% | 89.0% | 99% | 8+0:0 | 90 | 2 |" in text
    assert "| 40.0% | 80.0% |" in text


def test_a_sliver_of_a_cell_with_a_planner() -> None:
    asked, ask = replays(0.9)
    results_of(cells(LONG)[0], KNEES, ask)
    (job,) = [job for _, job in asked if job[1].planned]
    assert job[1].name == "2:6 predict planned"
    result = run_one(replace(LONG, seconds=8.0, warm_up=4.0), job)
    assert 5 < result["requests"] < 35
    assert result["scaling"]["ratios"][0] == [0.0, "2:6"]
    assert result["scaling"]["mean_workers"] == pytest.approx(8)

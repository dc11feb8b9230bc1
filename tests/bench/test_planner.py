"""The comparison of the planner with other rules: its loads, its page, and a sliver of it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from bench.planner import planned
from bench.planner_arms.cells import ARMS, Cell, run_one
from bench.planner_arms.loads import KNEE, LOADS, made
from bench.planner_arms.report import page, static_best, static_mean
from bench.planner_arms.runner import Results
from pdserve.sim.workloads.trace_request import length_of

if TYPE_CHECKING:
    from pathlib import Path

SLIVER = Cell(load="step", arm="Dynamo (rewritten)", start_up=5.0, limit=40.0)


def numbers(good: float, hours: float, first: float | None = 8.0) -> dict[str, Any]:
    spread = {"p50": 0.1, "p90": 0.2, "p99": 0.3}
    found: dict[str, Any] = {"good": good, "worker_seconds": hours * 3600, "failed": 0}
    return found | {
        "first": first,
        "starts": 3,
        "removed": 2,
        "ttft": spread,
        "itl": spread,
        "log": ["129 s: sim #1: 4 aggregated (was 1 aggregated); start"],
    }


@pytest.mark.parametrize("name", LOADS)
def test_a_load_has_the_rate_that_it_names(name: str) -> None:
    load = LOADS[name]
    trace = list(made(load, 1))
    mean = sum(load.at(float(at)).rate for at in range(int(load.seconds))) / load.seconds
    assert len(trace) == pytest.approx(mean * KNEE * load.seconds, rel=0.1)
    assert trace == list(made(load, 1)) != list(made(load, 2))
    assert [one.number for one in trace] == list(range(len(trace)))


def test_a_shift_changes_the_lengths_and_a_collapse_what_is_shared() -> None:
    trace = list(made(LOADS["length shift"], 1))
    share = [
        sum(length_of(one.pieces) > 2500 for one in part) / len(part)
        for part in (
            [one for one in trace if one.at < 240],
            [one for one in trace if one.at >= 240],
        )
    ]
    assert share[0] < 0.15 < 0.3 < share[1]
    shared = [one.at for one in made(LOADS["hit-rate collapse"], 1) if len(one.pieces) > 1]
    assert shared
    assert max(shared) < 300


def test_the_best_fixed_size_is_the_smallest_within_half_a_point() -> None:
    assert static_best({2: 0.90, 3: 0.984, 4: 0.987, 5: 0.985}) == 3
    assert static_best({2: 0.90, 3: 0.980, 4: 0.987, 5: 0.985}) == 4
    assert static_mean("step") == 2


def test_the_page_says_who_loses_and_what_did_not_run() -> None:
    cell = Cell(load="step", arm="pdserve")
    found = {
        cell: numbers(0.96, 1.0),
        replace(cell, arm="static 3"): numbers(0.97, 0.8),
        replace(cell, arm="static 2"): numbers(0.90, 0.5),
        replace(cell, arm="HPA 70%"): numbers(0.95, 0.9),
        replace(cell, arm="Dynamo (rewritten)"): numbers(0.95, 1.1),
    }
    text = page(found, planned(), ["a fact"], ["how"])
    assert "no more worker-hours: 1 of 1 cells" in text
    assert "99.0% of the attainment of static 3" in text
    assert "125% of its worker-hours" in text
    assert "first start 8 s after the step" in text
    assert "- step, start-up 60 s: static 3 97.0% at 0.80 h, pdserve 96.0% at 1.00 h" in text
    assert "HPA 70% 95.0%" not in text
    assert "- day, start-up 60 s: HPA 70%, KEDA" in text
    assert "- step, start-up 60 s: KEDA, AIBrix KPA" in text


def test_every_arm_is_planned_at_one_start_up_and_seed() -> None:
    cells = planned()
    assert len(set(cells)) == len(cells)
    for name in LOADS:
        arms = {c.arm for c in cells if c.load == name and c.start_up == 60 and c.seed == 1}
        assert set(ARMS) < arms


@pytest.mark.parametrize("arm", ["pdserve", "clairvoyant", "HPA 70%", "static 2"])
def test_a_sliver_of_each_way_to_decide(arm: str) -> None:
    result = run_one(replace(SLIVER, arm=arm))
    assert result["failed"] == 0
    assert result["requests"] > 40
    assert result["worker_seconds"] >= result["seconds"] * (2 if arm == "static 2" else 1)


def test_a_rule_starts_and_drains_and_no_request_fails() -> None:
    result = run_one(replace(SLIVER, limit=80.0))
    assert result["failed"] == 0
    assert result["starts"] >= 1
    assert result["removed"] >= 1


def test_results_are_kept_and_found_again(tmp_path: Path) -> None:
    data, cell = tmp_path / "data.jsonl", replace(SLIVER, arm="static 1", limit=10.0)
    first = Results(data)
    first.run([cell], 0)
    data.write_text(data.read_text() + '{"key": "half', encoding="utf-8")
    again = Results(data)
    assert again.known([cell, SLIVER]) == first.known([cell])
    assert again.cpu([cell]) > 0

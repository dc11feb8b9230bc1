"""The comparison of policies: its statistics, its plan and its page, without a replay."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from bench.policy_grid.cells import ABLATIONS, KV_LOAD, RIVALS, TTFT, Arm, Scale, World, grid
from bench.policy_grid.compare import difference, interval, kendall
from bench.policy_grid.report import Findings, page
from pdserve.sim.replay.config import ReplaySlo
from pdserve.sim.replay.metrics import summary
from pdserve.sim.replay.record import ReplayRecord

if TYPE_CHECKING:
    from bench.policy_grid.runner import Result

TUNED = Arm("kv_load, tuned", "kv_load", {"overlap_credit": "2"})


def test_a_difference_is_relative_and_paired() -> None:
    one = difference([11.0, 22.0, 33.0], [10.0, 20.0, 30.0])
    assert one.mean == pytest.approx(0.1)
    assert 0 < one.low <= one.mean <= one.high
    assert one.word == "better"
    assert difference([1.0, 2.0], [2.0, 3.0]).word == "worse"
    assert difference([1.0, 3.0], [2.0, 2.0]).word == "equal"


def test_an_interval_repeats_and_holds_the_mean() -> None:
    source = random.Random(1)
    values = [source.gauss(5, 1) for _ in range(10)]
    low, high = interval(values)
    assert (low, high) == interval(values)
    assert low < sum(values) / 10 < high


def test_kendall_counts_pairs_in_the_same_order() -> None:
    assert kendall([1, 2, 3, 4], [10, 20, 30, 40]) == 1.0
    assert kendall([1, 2, 3, 4], [4, 3, 2, 1]) == -1.0
    assert kendall([1, 2, 3], [1, 3, 2]) == pytest.approx(1 / 3)


def test_every_arm_is_in_the_grid_and_every_world_has_both() -> None:
    scale = Scale()
    plan = list(grid(scale, TUNED))
    assert len(plan) == len({(world, arm.name, seed) for world, arm, seed in plan})
    names = {arm.name for _, arm, _ in plan}
    assert names == {arm.name for arm in (TTFT, TUNED, KV_LOAD, *RIVALS, *ABLATIONS)}
    for load in scale.loads:
        for routers in (1, 2, 4):
            for slow in (False, True):
                for jitter in (0.0, 3.0):
                    world = World(load=load, routers=routers, slow=slow, jitter=jitter)
                    arms = [arm.name for w, arm, _ in plan if w == world]
                    assert arms.count("ttft") == arms.count("kv_load, tuned") == scale.seeds
    assert not any(world.tuning for world, _, _ in plan)


def result(ttft: float):
    records = [
        ReplayRecord(
            number=number,
            arrival=float(number),
            prompt_tokens=100,
            wanted_tokens=2,
            output_tokens=2,
            first=number + ttft * (1 + number % 3),
            end=number + 9.0,
            worker="a",
            predicted=ttft,
            outcome="completed",
        )
        for number in range(10)
    ]
    return summary(records, ReplaySlo(), lambda length: 0.0, {"a": "aggregated"})


@pytest.mark.parametrize(("theirs", "words"), [(0.8, "It loses no cell."), (0.1, "loses:")])
def test_the_page_says_who_wins(theirs: float, words: str) -> None:
    scale = Scale(seeds=2)
    found: dict[tuple[World, str], list[Result]] = {}
    for world, arm, _ in grid(scale, TUNED):
        mine = arm.policy == "ttft"
        found.setdefault((world, arm.name), []).append(result(0.4 if mine else theirs))
    findings = Findings(
        scale=scale,
        knees={"h100-8b": 3.0},
        tuned=TUNED,
        tuning=[(TUNED, 0.9, 1.0)],
        results=found,
        cpu_seconds=60.0,
    )
    text = page(findings, ["a fact"], ["how"])
    assert words in text
    for arm in (TTFT, TUNED, *RIVALS, *ABLATIONS):
        assert arm.name in text
    assert "to 512 tokens" in text

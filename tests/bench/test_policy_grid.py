"""The comparison of policies: its statistics, its plan and its page, without a replay."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING

import pytest

from bench.policy_grid.cells import (
    ABLATIONS,
    KV_LOAD,
    RIVALS,
    TTFT,
    WORKLOADS,
    Arm,
    Scale,
    World,
    grid,
)
from bench.policy_grid.compare import difference, interval, kendall
from bench.policy_grid.report import Findings, page
from bench.policy_grid.runner import Traces, requests_of
from bench.policy_grid.workloads import LOADS, WorkloadFindings, arms_of, workload_jobs
from bench.policy_grid.workloads_page import HEADING, section
from pdserve.sim.replay.config import ReplaySlo
from pdserve.sim.replay.metrics import summary
from pdserve.sim.replay.record import ReplayRecord

if TYPE_CHECKING:
    from pathlib import Path

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


def traces(folder: Path) -> Traces:
    """Two short traces in the forms of the public ones."""
    conversation, code = folder / "conversation.jsonl", folder / "code.csv"
    lines = (
        {"timestamp": 3000 * n, "input_length": 600, "output_length": 9, "hash_ids": [0, n]}
        for n in range(1, 101)
    )
    conversation.write_text("\n".join(map(json.dumps, lines)))
    rows = (f"2023-11-16 18:17:{n % 60:02}.0,{100 + n},{n}" for n in range(60))
    code.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    return Traces(conversation, code)


@pytest.mark.parametrize("workload", WORKLOADS)
def test_arms_get_the_same_requests_and_a_higher_load_sends_them_faster(
    workload: str, tmp_path: Path
) -> None:
    made, scale = traces(tmp_path), Scale(requests=10)

    def sent(arm: Arm, load: float):
        return list(requests_of(made, scale, (World(load=load, workload=workload), arm, 7, 2.0)))

    once, again, faster = sent(TTFT, 1.0), sent(TUNED, 1.0), sent(TTFT, 2.0)
    assert once == again
    assert [request.pieces for request in once] == [request.pieces for request in faster]
    assert len(once) == (10 if workload in ("conversation", "agentic") else 25)
    last = len(once) - 1
    assert faster[last].at == pytest.approx(once[last].at / 2)


def test_the_middle_of_a_trace_is_neither_its_beginning_nor_its_end(tmp_path: Path) -> None:
    job = (World(workload="middle", jitter=0.0), TTFT, 1, 1.0)
    numbers = [request.number for request in requests_of(traces(tmp_path), Scale(requests=4), job)]
    assert numbers == list(range(44, 54))


def test_the_section_has_the_cells_that_ran_and_names_the_lost_and_the_missing() -> None:
    scale = Scale(seeds=2)
    found: dict[tuple[World, str], list[Result]] = {}
    for load, ours in ((1.0, 0.1), (2.0, 0.8)):
        for world, arm, _, _ in workload_jobs("agentic", load, scale, 3.0):
            mine = arm.policy == "ttft"
            found.setdefault((world, arm.name), []).append(result(ours if mine else 0.4))
    text = section(WorkloadFindings(scale, {"agentic": 3.0}, found, 60.0))
    assert text.startswith(f"{HEADING}\n")
    assert "in 1 of 2 cells" in text
    assert "agentic at load 2: mooncake has" in text
    assert "agentic at load 1:" not in text
    assert "agentic at 1.5" in text
    assert "unique at 2" in text
    assert text.count("| agentic | 2 |") == len(arms_of("agentic"))
    assert max(LOADS) == 2.0

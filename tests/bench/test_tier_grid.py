"""The comparison of tiers: its oracle and its page, without a replay."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from bench.policy_grid.cells import Scale, World
from bench.policy_grid.losses import Change, Look, losses
from bench.policy_grid.runner import Traces, run_one
from bench.policy_grid.tiers import (
    ARMS,
    NO_TIERS,
    TierFindings,
    atomic_hit_rate,
    idle_prefills,
)
from bench.policy_grid.tiers_page import tiers_page
from pdserve.messages.kv_events import BlockRemoved, BlockStored
from pdserve.sim.workloads.mooncake import BLOCK
from pdserve.sim.workloads.trace_request import TraceRequest

if TYPE_CHECKING:
    from pathlib import Path


def request(number: int, *contents: int, rest: int = 10) -> TraceRequest:
    pieces = (*((content, BLOCK) for content in contents), (900 + number, rest))
    return TraceRequest(number, 0.0, pieces, 1)


def test_one_pool_finds_leading_blocks_that_were_not_evicted():
    trace = [request(0, 1, 2, 3), request(1, 1, 2, 4), request(2, 5, 2, 3)]
    length = 3 * BLOCK + 10
    assert atomic_hit_rate(trace, 100) == pytest.approx(2 * BLOCK / (3 * length))
    assert atomic_hit_rate(trace, 1) == pytest.approx(BLOCK / (3 * length)), "roots stay longest"
    assert atomic_hit_rate([], 5) == 0.0


def result(mean: float, host: int) -> dict[str, Any]:
    tokens = {"computed": 800 - host, "device": 200, "host": host, "disk": 0, "peer": 0}
    spread = {"mean": mean, "p50": mean / 2, "p99": 4 * mean}
    real = {"seen": 2, "found": 1, "unstored": 1}
    atomic = {"seen": 2, "found": 2, "elsewhere": 0, "evicted": 0}
    return {
        "good": 0.95,
        "ttft": spread,
        "prompt_tokens": tokens,
        "losses": real,
        "atomic": atomic,
        "fetches": {"came": 1},
    }


def test_the_page_compares_each_row_with_no_tiers():
    results = {
        (load, arm.name): [result(1.0 if arm is NO_TIERS else 0.6, 0 if arm is NO_TIERS else 150)]
        for load in (0.5, 0.8, 0.95)
        for arm in ARMS
    }
    findings = TierFindings(Scale(requests=7, seeds=1), 3.25, results, 0.35, (0.4, 0.3))
    text = tiers_page(findings, ["a machine"])
    assert "the first 7 requests" in text
    assert "load 1 is the trace at 3.25x" in text
    assert text.count("| no tiers | 95.0% | 20.0% | 20.0% | 0.0% | 0.0% |") == 3
    assert text.count("| host tiers | 95.0% | 35.0% | 20.0% | 15.0% | 0.0% |") == 3
    assert text.count("| -40.0% |") == 3 * (len(ARMS) - 1)
    assert (
        text.count("| no tiers | 51.2 | 102.4 | 51.2 | 0.0 | 0.0 | 0.0 | 0.0 | 0.0 | 51.2 |") == 3
    )
    assert text.count("not run: ") == 1
    assert "all that earlier prompts had were cached and came at once: -25.0%" in text


def test_mirroring_leaves_as_much_room_as_is_claimed():
    sizes = {arm.name: arm.host_tokens for arm in ARMS}
    assert 8 * sizes["host tiers"] == 20_000_000
    assert sizes["host tiers"] - sizes["host tiers, mirrored"] == Scale().kv_tokens


A, B, C, D = (bytes([letter]) * 16 for letter in b"abcd")


def stored(at: float, worker: int, *names: bytes, tier: Any = "device") -> Change:
    return Change(at, worker, BlockStored(list(names), b"", tier))


def removed(at: float, worker: int, *names: bytes, tier: Any = "device") -> Change:
    return Change(at, worker, BlockRemoved(list(names), tier))


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ([stored(1, 0, A, B)], {"here": 1}),
        ([stored(1, 0, A), stored(1, 1, A, B, tier="host")], {"elsewhere": 1}),
        ([stored(1, 0, A), stored(1, 1, B)], {"split": 1}),
        ([stored(1, 0, A, B), removed(2, 0, B)], {"dropped": 1}),
        (
            [stored(1, 0, A, B, tier="host"), removed(2, 0, B, tier="host")],
            {"evicted": 1},
        ),
        ([stored(1, 0, A), stored(9, 0, B)], {"unstored": 1}),
    ],
)
def test_each_lost_block_has_one_cause(changes: list[Change], cause: dict[str, int]) -> None:
    look = Look(5.0, 0, (A, B, C), seen=2, found=1)
    total = losses(changes, [look])
    assert {name: count for name, count in total.items() if count} == {
        "seen": 2,
        "found": 1,
        **cause,
    }


def test_what_was_served_out_of_order_is_no_loss() -> None:
    total = losses([stored(1, 0, A, B)], [Look(5.0, 0, (A, B), seen=1, found=2)])
    assert total["unstored"] == -1


def test_a_replay_tells_where_each_token_was_lost(tmp_path: Path) -> None:
    """In real events of a small cluster: the causes add up to all that earlier prompts had."""
    trace = tmp_path / "trace.jsonl"
    rows = [
        {
            "timestamp": 400 * number,
            "input_length": 4 * BLOCK + 10,
            "output_length": 3,
            "hash_ids": [*(10 * (number % 9) + part for part in range(4)), 1000 + number],
        }
        for number in range(60)
    ]
    trace.write_text("\n".join(json.dumps(row) for row in rows))
    scale = Scale(requests=0, workers=2, seeds=1, noise=0.0, kv_tokens=12 * BLOCK)
    arm = replace(ARMS[1], host_tokens=4 * BLOCK)
    result = run_one(Traces(trace), scale, (World(whole=True), arm, 1, 1.0))
    found = result["losses"]
    assert found["seen"] == (60 - 9) * 4 == result["atomic"]["seen"]
    assert sum(found.values()) == 2 * found["seen"]
    tokens = result["prompt_tokens"]
    assert found["found"] * BLOCK == tokens["device"] + tokens["host"]
    assert found["evicted"] + found["dropped"] > 0
    assert 0 < result["atomic"]["found"] < found["seen"]


def test_the_shortest_prefill_has_all_that_earlier_prompts_had() -> None:
    cold, warm = idle_prefills([request(0, *range(20)), request(1, *range(20))])
    assert 0.5 * cold < warm < 0.7 * cold

"""The comparison of tiers: its oracle and its page, without a replay."""

from __future__ import annotations

from typing import Any

import pytest

from bench.policy_grid.cells import Scale
from bench.policy_grid.tiers import ARMS, NO_TIERS, TierFindings, atomic_hit_rate, tiers_page
from pdserve.sim.workloads.mooncake import BLOCK
from pdserve.sim.workloads.trace_request import TraceRequest


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
    return {"good": 0.95, "ttft": spread, "prompt_tokens": tokens}


def test_the_page_compares_each_row_with_no_tiers():
    results = {
        (load, arm.name): [result(1.0 if arm is NO_TIERS else 0.6, 0 if arm is NO_TIERS else 150)]
        for load in (0.5, 0.8, 0.95)
        for arm in ARMS
    }
    text = tiers_page(TierFindings(Scale(requests=7, seeds=1), 3.25, results, 0.35), ["a machine"])
    assert "the first 7 requests" in text
    assert "load 1 is the trace at 3.25x" in text
    assert text.count("| no tiers | 95.0% | 20.0% | 20.0% | 0.0% | 0.0% |") == 3
    assert text.count("| host tiers | 95.0% | 35.0% | 20.0% | 15.0% | 0.0% |") == 3
    assert text.count("| -40.0% |") == 3 * (len(ARMS) - 1)


def test_mirroring_leaves_as_much_room_as_is_claimed():
    sizes = {arm.name: arm.host_tokens for arm in ARMS}
    assert 8 * sizes["host tiers"] == 20_000_000
    assert sizes["host tiers"] - sizes["host tiers, mirrored"] == Scale().kv_tokens

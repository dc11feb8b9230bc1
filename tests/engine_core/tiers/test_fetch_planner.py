"""Which blocks a core fetches: what it knows, put to the planner."""

from __future__ import annotations

import pytest

from pdserve.engine_core.tiers.fetch_planner import FetchPlanner
from pdserve.kv.tiers.lanes import LaneEstimate
from pdserve.messages.tiers import KvFetchMode, KvSource, LaneName, SourceName
from pdserve.perf_model.latency_model import LatencyModel

BLOCK = 32
FAST = LaneEstimate(50e9, 1e-5)
SLOW = LaneEstimate(1e6, 0.5)
HOST: list[SourceName] = ["host"] * 40
DISK: list[SourceName] = ["disk"] * 40
SLOW_PREFILL = LatencyModel(base=0.0, per_token=1e-3, per_pair=0.0)


def planner(mode: KvFetchMode = "auto", **lanes: LaneEstimate) -> FetchPlanner:
    known: dict[LaneName, LaneEstimate] = {"h2d": FAST, "disk_read": FAST, "fetch": FAST}
    known |= lanes  # type: ignore[arg-type]
    return FetchPlanner(
        SLOW_PREFILL, lambda: known, block_tokens=BLOCK, block_bytes=1 << 20, mode=mode, layers=32
    )


def test_local_blocks_come_first_and_a_peers_behind_them() -> None:
    source = KvSource("w2", 5, 20)
    plan = planner(fetch=LaneEstimate(1e8)).choose(2, HOST[:3] + DISK[:4], [source], 30, 0.0)
    assert plan is not None
    assert (plan.local, plan.peer, plan.source) == (7, 20 - 2 - 7, source)
    assert 0.0 < plan.seconds < plan.deadline
    assert plan.last == "peer"
    assert plan.saves == pytest.approx(18 * BLOCK * 1e-3)


def test_a_slow_lane_ends_the_plan_before_it() -> None:
    plan = planner(disk_read=SLOW).choose(0, HOST[:3] + DISK, [], 60, 0.0)
    assert plan is not None
    assert (plan.local, plan.peer, plan.source, plan.last) == (3, 0, None, "host")
    assert plan.saves == pytest.approx(3 * BLOCK * 1e-3)


def test_nothing_is_fetched_that_is_computed_sooner() -> None:
    assert planner(h2d=SLOW).choose(0, HOST[:3], [], 60, 0.0) is None
    assert planner(fetch=SLOW).choose(0, [], [KvSource("w2", 1, 3)], 60, 0.0) is None


def test_only_a_prompt_that_may_begin_early_gains_by_it() -> None:
    slow = planner(h2d=LaneEstimate(30e6))
    assert slow.choose(0, HOST, [], 60, 0.0) is None
    early = slow.choose(0, HOST, [], 60, 0.0, early=True)
    assert early is not None
    assert early.local == 40
    assert early.seconds == pytest.approx((40 << 20) / 30e6)
    assert early.saves == pytest.approx((60 * BLOCK + 1) * 1e-3 - (20 * BLOCK + 1) * 1e-3 / 4)


@pytest.mark.parametrize(("mode", "peer"), [("never", 0), ("always", 3)])
def test_an_operator_decides_about_peers(mode: KvFetchMode, peer: int) -> None:
    lane = SLOW if mode == "always" else FAST
    plan = planner(mode, fetch=lane).choose(0, HOST[:4], [KvSource("w2", 1, 7)], 9, 0.0)
    assert plan is not None
    assert (plan.local, plan.peer) == (4, peer)


def test_of_several_peers_the_one_that_is_chosen_is_named() -> None:
    peers = [KvSource("w2", 1, 3), KvSource("w3", 2, 50)]
    plan = planner().choose(0, [], peers, 60, 0.0)
    assert plan is not None
    assert plan.source == peers[1]
    assert plan.peer == 50

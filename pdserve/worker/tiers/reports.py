"""Translates an engine's statistics of its tiers for status and metrics. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.messages.kv_events import TIERS
from pdserve.messages.status import TierReport
from pdserve.observe.tier_metrics import LaneSample, PlanSample, TierSample

if TYPE_CHECKING:
    from pdserve.ids import Bytes
    from pdserve.messages.tiers import LaneLoad, PlanStats, TierStats

__all__ = ["lane_sample", "plan_sample", "tier_report", "tier_sample"]


def tier_report(tier: TierStats, block_bytes: Bytes) -> TierReport:
    """One tier for status; sizes are in bytes."""
    return TierReport(
        name=TIERS[tier.tier],
        capacity=tier.blocks_total * block_bytes,
        valid=tier.blocks_valid * block_bytes,
        retention=tier.retention,
        hit_tokens=tier.hit_tokens,
        stored=tier.blocks_stored,
        evicted=tier.blocks_evicted,
        unsaved=tier.blocks_unsaved,
        failed=tier.failed,
        trouble=tier.trouble,
    )


def tier_sample(tier: TierStats, block_bytes: Bytes) -> TierSample:
    """One tier for a scrape."""
    return TierSample(
        capacity=tier.blocks_total * block_bytes,
        valid=tier.blocks_valid * block_bytes,
        filling=tier.blocks_filling * block_bytes,
        claimed=tier.blocks_claimed * block_bytes,
        retention=tier.retention,
        trouble=int(bool(tier.trouble)),
        hit_tokens=tier.hit_tokens,
        stored=tier.blocks_stored,
        evicted=tier.blocks_evicted,
        refused=tier.blocks_refused,
        unsaved=tier.blocks_unsaved,
        failed=tier.failed,
        read=tier.read_bytes,
        written=tier.written_bytes,
        shared=tier.shared_blocks,
        shared_read=tier.shared_read,
        shared_failed=tier.shared_failed,
        early_starts=tier.early_starts,
        early_failed=tier.early_failed,
    )


def lane_sample(lane: LaneLoad) -> LaneSample:
    """One lane for a scrape."""
    return LaneSample(backlog=lane.backlog, bandwidth=lane.bandwidth, latency=lane.latency)


def plan_sample(plans: PlanStats) -> PlanSample:
    """The plans of one source for a scrape."""
    return PlanSample(
        plans=plans.plans,
        predicted=plans.predicted,
        actual=plans.actual,
        gained=plans.gained,
        lost=plans.lost,
    )

"""Defines the metrics of KV tiers below the device, and of the lanes that move KV between them.

Each has the labels of engine metrics, and the tier's or the lane's name. A worker without tiers has
none of them. `EngineSample` carries the samples.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Final, Generic, Literal, TypeVar

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "LANE_METRICS",
    "MISS_METRICS",
    "PLAN_METRICS",
    "TIER_METRICS",
    "LaneSample",
    "MissSample",
    "NamedMetric",
    "PlanSample",
    "TierSample",
    "merge_named",
]

S = TypeVar("S", "TierSample", "LaneSample", "PlanSample", "MissSample")


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSample:
    """One tier of a worker at a scrape; sizes are in bytes."""

    capacity: int = 0
    valid: int = 0
    filling: int = 0
    claimed: int = 0
    retention: float = 0.0
    trouble: int = 0
    hit_tokens: int = 0
    stored: int = 0
    evicted: int = 0
    refused: int = 0
    unsaved: int = 0
    failed: int = 0
    read: int = 0
    written: int = 0
    shared: int = 0
    shared_read: int = 0
    shared_failed: int = 0
    early_starts: int = 0
    early_failed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneSample:
    """One lane of a worker at a scrape."""

    backlog: int = 0
    bandwidth: float = 0.0
    latency: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSample:
    """What a worker's plans to fetch prefixes came to, for one source."""

    plans: int = 0
    predicted: float = 0.0
    actual: float = 0.0
    gained: float = 0.0
    lost: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MissSample:
    """Blocks that a worker knew of and did not fetch, for one reason."""

    blocks: int = 0


@dataclass(frozen=True, slots=True)
class NamedMetric(Generic[S]):
    """Definition of one metric of a tier or a lane: `field` is the sample's field, `combine` says
    how processes that share a port are merged."""

    name: str
    kind: Literal["counter", "gauge"]
    field: str
    help: str
    combine: Literal["sum", "max"] = "sum"

    def read(self, sample: S) -> float:
        return float(getattr(sample, self.field))


TIER_METRICS: Final[tuple[NamedMetric[TierSample], ...]] = (
    NamedMetric(
        "kv_tier_capacity_bytes", "gauge", "capacity", "Size of a tier of KV below the device."
    ),
    NamedMetric("kv_tier_valid_bytes", "gauge", "valid", "Bytes of blocks that can be reused."),
    NamedMetric(
        "kv_tier_filling_bytes", "gauge", "filling", "Bytes that a copy or a read fills now."
    ),
    NamedMetric(
        "kv_tier_claimed_bytes",
        "gauge",
        "claimed",
        "Bytes of blocks that somebody reads now; they are not evicted.",
    ),
    NamedMetric(
        "kv_tier_retention_seconds",
        "gauge",
        "retention",
        "How long a block stayed before it was evicted, recently; 0: nothing was evicted yet.",
        combine="max",
    ),
    NamedMetric(
        "kv_tier_trouble",
        "gauge",
        "trouble",
        "1 while the tier works in part or not at all; /health says why.",
        combine="max",
    ),
    NamedMetric(
        "kv_tier_hit_tokens_total",
        "counter",
        "hit_tokens",
        "Prompt tokens that came to the device from here instead of being computed.",
    ),
    NamedMetric("kv_tier_stored_blocks_total", "counter", "stored", "Blocks that came in."),
    NamedMetric(
        "kv_tier_evicted_blocks_total",
        "counter",
        "evicted",
        "Blocks that went out for lack of room.",
    ),
    NamedMetric(
        "kv_tier_refused_blocks_total", "counter", "refused", "Blocks that were not taken in."
    ),
    NamedMetric(
        "kv_tier_unsaved_blocks_total",
        "counter",
        "unsaved",
        "Blocks of the tier above that were evicted before they could be copied here.",
    ),
    NamedMetric(
        "kv_tier_read_failures_total",
        "counter",
        "failed",
        "Blocks that could not be read or did not match their checksum: they were computed again.",
    ),
    NamedMetric("kv_tier_read_bytes_total", "counter", "read", "Bytes read from the tier."),
    NamedMetric("kv_tier_written_bytes_total", "counter", "written", "Bytes written to the tier."),
    NamedMetric(
        "kv_tier_shared_blocks",
        "gauge",
        "shared",
        "Blocks that other workers have sealed below the same directory, and that can be read.",
    ),
    NamedMetric(
        "kv_tier_shared_read_blocks_total",
        "counter",
        "shared_read",
        "Blocks of other workers that were read; their tokens count as hits of the disk.",
    ),
    NamedMetric(
        "kv_tier_shared_read_failures_total",
        "counter",
        "shared_failed",
        "Blocks of other workers that were gone or bad: they were computed again.",
    ),
    NamedMetric(
        "kv_tier_early_starts_total",
        "counter",
        "early_starts",
        "Prompts whose prefill began before all layers of their prefix had come from host memory.",
    ),
    NamedMetric(
        "kv_tier_early_start_failures_total",
        "counter",
        "early_failed",
        "Those of them that were computed again, since layers were late or could not be copied.",
    ),
)
"""All metrics of tiers, in the order of `docs/metrics.md`. The label is the tier's name: `host`,
`disk`, or `remote` for what other workers have."""

LANE_METRICS: Final[tuple[NamedMetric[LaneSample], ...]] = (
    NamedMetric(
        "kv_lane_backlog_bytes",
        "gauge",
        "backlog",
        "Bytes that wait for a path of KV or are under way on it.",
    ),
    NamedMetric(
        "kv_lane_bandwidth_bytes_per_second",
        "gauge",
        "bandwidth",
        "Speed of the path while it is busy, recently; 0: not known yet.",
    ),
    NamedMetric(
        "kv_lane_latency_seconds",
        "gauge",
        "latency",
        "Time from the start of a job on the path to its first byte.",
        combine="max",
    ),
)
"""All metrics of lanes. The label is the lane's name: d2h and h2d (between device and host),
disk_read, disk_write, fetch (from other workers)."""

PLAN_METRICS: Final[tuple[NamedMetric[PlanSample], ...]] = (
    NamedMetric(
        "kv_plans_total",
        "counter",
        "plans",
        "Fetches of prefixes that have ended, by the source whose blocks were to come last.",
    ),
    NamedMetric(
        "kv_plan_predicted_seconds_total",
        "counter",
        "predicted",
        "How long these fetches were predicted to take.",
    ),
    NamedMetric("kv_plan_actual_seconds_total", "counter", "actual", "How long they took."),
    NamedMetric(
        "kv_plan_gained_seconds_total",
        "counter",
        "gained",
        "By how much they were sooner than to compute the blocks that came, as predicted.",
    ),
    NamedMetric(
        "kv_plan_lost_seconds_total",
        "counter",
        "lost",
        "By how much others were later than that.",
    ),
)
"""All metrics of plans. The label is the source: host, disk, peer."""

MISS_METRICS: Final[tuple[NamedMetric[MissSample], ...]] = (
    NamedMetric(
        "kv_missed_blocks_total",
        "counter",
        "blocks",
        "Blocks that were known below the device or at another worker and were not fetched: "
        "computed (that is sooner), bound (too much is fetched already), room (the device has "
        "none, or the host tier of vLLM), or why a fetch did not bring them (absent, deadline, "
        "busy, corrupt and others).",
    ),
)
"""The metric of misses. The label is the reason."""

_MOST: Final = ("retention", "trouble", "latency")
"""Fields of which the larger one counts."""


def merge_named(one: Mapping[str, S], other: Mapping[str, S]) -> dict[str, S]:
    """The tiers, or the lanes, of two workers with the same labels, as those of one."""
    merged = dict(one)
    for name, sample in other.items():
        merged[name] = _sum(merged[name], sample) if name in merged else sample
    return merged


def _sum(one: S, other: S) -> S:
    values = {}
    for field in fields(one):
        pair = (getattr(one, field.name), getattr(other, field.name))
        values[field.name] = max(pair) if field.name in _MOST else sum(pair)
    return type(one)(**values)

"""Keeps engine counters monotonic across restarts of the engine core.

A restarted core counts from zero, but Prometheus counters must never fall. Pure. The service feeds
it every second, so what a dying core did after its last snapshot is not counted.
"""

from __future__ import annotations

from typing import Any

import msgspec

from pdserve.messages.engine import EngineStats
from pdserve.messages.tiers import PlanStats, TierStats

_FIELDS = EngineStats.__struct_fields__
_GAUGES = ("running", "waiting", "uncomputed_tokens", "kv_tokens", "itl", "remote", "sending")
_RECORDS = ("tiers", "lanes", "plans", "missed_blocks")
COUNTERS = tuple(
    name for name in _FIELDS if name not in _GAUGES + _RECORDS and not name.startswith("blocks_")
)
TIER_COUNTERS = (
    *("blocks_stored", "blocks_evicted", "blocks_refused", "blocks_unsaved"),
    *("hit_tokens", "failed", "read_bytes", "written_bytes"),
    *("shared_read", "shared_failed", "early_starts", "early_failed"),
)
PLAN_COUNTERS = tuple(name for name in PlanStats.__struct_fields__ if name != "source")

_MISSED = ("missed", "")
_Counts = dict[tuple[str, Any], dict[str, Any]]
"""Counters of records by kind and key: of tiers by number, of plans by source, and of missed blocks
by reason."""


class CumulativeStats:
    """The newest snapshot, its counters raised by the totals of earlier core lives."""

    def __init__(self) -> None:
        self._base = dict.fromkeys(COUNTERS, 0.0)
        self._records: _Counts = {}
        self._last = EngineStats()

    def note(self, stats: EngineStats) -> None:
        """Takes a snapshot; a snapshot whose counters have fallen begins a new core life."""
        if _fell(self._last, stats):
            for name in COUNTERS:
                self._base[name] += getattr(self._last, name)
            self._records = _sum(self._records, _counts(self._last))
        self._last = stats

    def snapshot(self) -> EngineStats:
        """Current gauges, and counters summed over all core lives."""
        raised = {}
        for name in COUNTERS:
            value = getattr(self._last, name)
            raised[name] = type(value)(value + self._base[name])
        counts = _sum(self._records, _counts(self._last))
        return msgspec.structs.replace(
            self._last,
            tiers=_tiers(self._last, counts),
            plans=tuple(
                PlanStats(source=key, **values)
                for (kind, key), values in sorted(counts.items())
                if kind == "plan"
            ),
            missed_blocks=counts[_MISSED],
            **raised,
        )


def _tiers(last: EngineStats, counts: _Counts) -> tuple[TierStats, ...]:
    """Tiers of this life, and those that only an earlier one had: a core that loads has none
    yet."""
    now = {one.tier: one for one in last.tiers}
    return tuple(
        msgspec.structs.replace(now.get(key) or TierStats(tier=key), **values)
        for (kind, key), values in sorted(counts.items())
        if kind == "tier"
    )


def _fell(before: EngineStats, now: EngineStats) -> bool:
    """True if a counter is lower than before: the core has begun a new life."""
    if any(getattr(now, name) < getattr(before, name) for name in COUNTERS):
        return True
    counts = _counts(now)
    return any(
        value > counts.get(record, {}).get(name, 0)
        for record, values in _counts(before).items()
        for name, value in values.items()
    )


def _counts(stats: EngineStats) -> _Counts:
    return {
        **{("tier", one.tier): _values(one, TIER_COUNTERS) for one in stats.tiers},
        **{("plan", one.source): _values(one, PLAN_COUNTERS) for one in stats.plans},
        _MISSED: stats.missed_blocks,
    }


def _values(record: TierStats | PlanStats, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: getattr(record, name) for name in names}


def _sum(one: _Counts, other: _Counts) -> _Counts:
    found = dict(one)
    for record, values in other.items():
        known = found.get(record, {})
        found[record] = {
            name: known.get(name, 0) + values.get(name, 0) for name in {**known, **values}
        }
    return found

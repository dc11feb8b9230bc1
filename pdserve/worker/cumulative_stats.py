"""Keeps engine counters monotonic across restarts of the engine core.

A restarted core counts from zero, but Prometheus counters must never fall. Pure. The service feeds
it every second, so what a dying core did after its last snapshot is not counted.
"""

from __future__ import annotations

import msgspec

from pdserve.messages.engine import EngineStats
from pdserve.messages.tiers import TierStats

_FIELDS = EngineStats.__struct_fields__
_GAUGES = ("running", "waiting", "uncomputed_tokens", "kv_tokens", "itl", "remote", "sending")
_RECORDS = ("tiers", "lanes")
COUNTERS = tuple(
    name for name in _FIELDS if name not in _GAUGES + _RECORDS and not name.startswith("blocks_")
)
TIER_COUNTERS = (
    *("blocks_stored", "blocks_evicted", "blocks_refused", "blocks_unsaved"),
    *("hit_tokens", "failed", "read_bytes", "written_bytes"),
    *("shared_read", "shared_failed"),
)

_Tiers = dict[int, dict[str, int]]
"""Counters of tiers, by the tier's number."""


class CumulativeStats:
    """The newest snapshot, its counters raised by the totals of earlier core lives."""

    def __init__(self) -> None:
        self._base = dict.fromkeys(COUNTERS, 0.0)
        self._tiers: _Tiers = {}
        self._last = EngineStats()

    def note(self, stats: EngineStats) -> None:
        """Takes a snapshot; a snapshot whose counters have fallen begins a new core life."""
        if _fell(self._last, stats):
            for name in COUNTERS:
                self._base[name] += getattr(self._last, name)
            self._tiers = _sum(self._tiers, _counts(self._last))
        self._last = stats

    def snapshot(self) -> EngineStats:
        """Current gauges, and counters summed over all core lives."""
        raised = {}
        for name in COUNTERS:
            value = getattr(self._last, name)
            raised[name] = type(value)(value + self._base[name])
        return msgspec.structs.replace(self._last, tiers=self._all_tiers(), **raised)

    def _all_tiers(self) -> tuple[TierStats, ...]:
        """Tiers of this life, and those that only an earlier one had: a core that loads has none
        yet."""
        now = {one.tier: one for one in self._last.tiers}
        counts = _sum(self._tiers, _counts(self._last))
        return tuple(
            msgspec.structs.replace(now.get(tier) or TierStats(tier=tier), **counts[tier])
            for tier in sorted(counts)
        )


def _fell(before: EngineStats, now: EngineStats) -> bool:
    """True if a counter is lower than before: the core has begun a new life."""
    if any(getattr(now, name) < getattr(before, name) for name in COUNTERS):
        return True
    counts = _counts(now)
    return any(
        value > counts.get(tier, {}).get(name, 0)
        for tier, values in _counts(before).items()
        for name, value in values.items()
    )


def _counts(stats: EngineStats) -> _Tiers:
    return {one.tier: {name: getattr(one, name) for name in TIER_COUNTERS} for one in stats.tiers}


def _sum(one: _Tiers, other: _Tiers) -> _Tiers:
    found = dict(one)
    for tier, values in other.items():
        known = found.get(tier, {})
        found[tier] = {name: value + known.get(name, 0) for name, value in values.items()}
    return found

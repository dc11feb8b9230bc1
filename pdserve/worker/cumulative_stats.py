"""Keeps engine counters monotonic across restarts of the engine core.

A restarted core counts from zero, but Prometheus counters must never fall. Pure. The service feeds
it every second, so what a dying core did after its last snapshot is not counted.
"""

from __future__ import annotations

import msgspec

from pdserve.messages.engine import EngineStats

_FIELDS = EngineStats.__struct_fields__
_GAUGES = ("running", "waiting", "uncomputed_tokens", "kv_tokens", "itl", "remote", "sending")
_RECORDS = ("tiers", "lanes")
COUNTERS = tuple(
    name for name in _FIELDS if name not in _GAUGES + _RECORDS and not name.startswith("blocks_")
)


class CumulativeStats:
    """The newest snapshot, its counters raised by the totals of earlier core lives."""

    def __init__(self) -> None:
        self._base = dict.fromkeys(COUNTERS, 0.0)
        self._last = EngineStats()

    def note(self, stats: EngineStats) -> None:
        """Takes a snapshot; a snapshot whose counters have fallen begins a new core life."""
        if any(getattr(stats, name) < getattr(self._last, name) for name in COUNTERS):
            for name in COUNTERS:
                self._base[name] += getattr(self._last, name)
        self._last = stats

    def snapshot(self) -> EngineStats:
        """Current gauges, and counters summed over all core lives."""
        raised = {}
        for name in COUNTERS:
            value = getattr(self._last, name)
            raised[name] = type(value)(value + self._base[name])
        return msgspec.structs.replace(self._last, **raised)

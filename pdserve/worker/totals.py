"""Counters that survive the engine: totals over all lives of its core.

A core counts from zero; scrapers want counters that never fall. Pure; the service feeds it every
second, so what a dying core did since then is not counted.
"""

from __future__ import annotations

import msgspec

from pdserve.messages.engine import EngineStats

_FIELDS = EngineStats.__struct_fields__
_GAUGES = ("running", "waiting", "uncomputed_tokens", "kv_tokens", "itl", "remote", "sending")
COUNTERS = tuple(name for name in _FIELDS if name not in _GAUGES and not name.startswith("blocks_"))


class EngineTotals:
    """The newest snapshot, its counters raised by those of earlier lives."""

    def __init__(self) -> None:
        self._base = dict.fromkeys(COUNTERS, 0.0)
        self._last = EngineStats()

    def note(self, stats: EngineStats) -> None:
        """Take a snapshot; one whose counters have fallen begins a new life."""
        if any(getattr(stats, name) < getattr(self._last, name) for name in COUNTERS):
            for name in COUNTERS:
                self._base[name] += getattr(self._last, name)
        self._last = stats

    def snapshot(self) -> EngineStats:
        """Gauges of now, counters of all lives."""
        raised = {}
        for name in COUNTERS:
            value = getattr(self._last, name)
            raised[name] = type(value)(value + self._base[name])
        return msgspec.structs.replace(self._last, **raised)

"""Adds what a worker's KV fetches came to to the process's metrics. Pure but for the counters."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdserve.observe.instruments import Counter as Instrument
    from pdserve.observe.instruments import Family

__all__ = ["GrowthCounter"]


class GrowthCounter:
    """Passes the growth of one worker's counts on. Several workers of a process share a metric, so
    each adds what is new."""

    def __init__(self, family: Family[Instrument]) -> None:
        self._family = family
        self._told: Counter[str] = Counter()

    def note(self, counts: Mapping[str, int]) -> None:
        """Takes the worker's present counts, which only grow."""
        for name, count in counts.items():
            grown = count - self._told[name]
            if grown > 0:
                self._family.labels(name).inc(grown)
                self._told[name] = count

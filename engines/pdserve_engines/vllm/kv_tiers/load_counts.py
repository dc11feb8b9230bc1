"""Counts what loads for vLLM's requests came to, and the known blocks that were not loaded. Pure.

`PrefixLoads` tells of both. A plan that pulls blocks from another worker first counts once, from
the beginning of the pull to the end of the load.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from msgspec.structs import replace

from pdserve.engine_core.tiers.plan_tally import PlanTally

if TYPE_CHECKING:
    from pdserve.messages.engine import EngineStats

__all__ = ["LoadCounts"]


class LoadCounts:
    """The counts of one vLLM engine."""

    def __init__(self) -> None:
        self.plans = PlanTally()
        """What loads came to, against what was predicted."""
        self._missed: Counter[str] = Counter()

    def missed(self, blocks: int, why: str) -> None:
        """So many blocks, if any, were known below the device or at another worker, and were not
        loaded: `computed` (that is sooner), `room` (the host tier has none for what comes from
        another worker), or why they did not come."""
        if blocks > 0:
            self._missed[why] += blocks

    def add_stats(self, stats: EngineStats) -> EngineStats:
        """The stats with these counts."""
        missed = {"computed": 0, **self._missed}
        return replace(stats, plans=self.plans.stats(), missed_blocks=missed)

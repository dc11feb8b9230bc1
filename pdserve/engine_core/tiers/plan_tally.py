"""Compares what fetches of prefixes came to with what was predicted. Pure.

A plan counts for the source whose blocks were predicted to come last: that one decides when the
fetch ends. What it saved is the predicted time to compute the blocks that have come, less the time
that the fetch took. So a fetch that is late, or brings less, costs time.

The onboarder tells it of each end; the worker's metrics show the sums.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from pdserve.messages.tiers import PlanStats

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pdserve.engine_core.tiers.onboarder import FetchPlan
    from pdserve.ids import Seconds
    from pdserve.messages.tiers import SourceName

__all__ = ["PlanTally"]


class PlanTally:
    """The plans of one core whose fetches have ended."""

    def __init__(self, sources: Iterable[SourceName] = ()) -> None:
        """`sources` are told of before the first of their plans, too."""
        self._sums: dict[SourceName, PlanStats] = {}
        for source in sources:
            self.tell_of(source)

    def tell_of(self, source: SourceName) -> None:
        """Have a source in the sums from now on."""
        self._sums.setdefault(source, PlanStats(source=source))

    def ended(self, plan: FetchPlan, came: int, took: Seconds) -> None:
        """A fetch has brought the plan's first `came` blocks. Ignores plans that predicted nothing,
        such as those that stage blocks for a peer."""
        if not plan.saves:
            return
        known = self._sums.get(plan.last) or PlanStats(source=plan.last)
        saved = plan.saves * came / plan.count - took
        self._sums[plan.last] = replace(
            known,
            plans=known.plans + 1,
            predicted=known.predicted + plan.seconds,
            actual=known.actual + took,
            gained=known.gained + max(0.0, saved),
            lost=known.lost + max(0.0, -saved),
        )

    def stats(self) -> tuple[PlanStats, ...]:
        """The sums by source."""
        return tuple(self._sums.values())

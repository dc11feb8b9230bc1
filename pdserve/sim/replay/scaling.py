"""Defines what changes a cluster during a replay: a planner, or a rule that it is compared with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.ids import Seconds
    from pdserve.sim.replay.cluster import ReplayCluster

__all__ = ["Scaler"]


class Scaler(Protocol):
    """Starts, stops and switches workers of a replay. Needs `ReplayConfig.scaling`."""

    async def begin(self, cluster: ReplayCluster, now: Callable[[], Seconds]) -> None:
        """The cluster serves, and the first request is next. `now` returns seconds since the
        trace's beginning."""
        ...

    async def end(self) -> None:
        """The last request has ended. Ends its tasks; the workers stay."""
        ...

    def summary(self) -> dict[str, Any]:
        """What it did and what it cost, for the summary of the replay; after `end`."""
        ...

"""Decides whether the demand is known well enough to plan by. Pure.

No arrivals are data: the demand is zero. A missing report is not: then the planner is *blind*. A
blind planner removes and switches nothing, and adds a worker only if requests wait in the routers,
which is seen without any prediction. It is never blind in silence for long.
"""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING, NamedTuple

from pdserve.planner.rules.votes import Votes

if TYPE_CHECKING:
    from pdserve.ids import Seconds
    from pdserve.planner.config import PlannerConfig, PoolConfig
    from pdserve.planner.outlook import DemandView

__all__ = ["Sanity", "Sight", "blindness"]


class Sight(NamedTuple):
    """What may be decided."""

    blind: str = ""
    """Why nothing is known, in words; empty: enough is."""
    doubt: str = ""
    """Why nothing may be removed although the demand is known; empty: it may."""
    add: bool = False
    """Blind, but requests wait so long that one more worker is needed."""
    alarm: str = ""
    """Blind for too long, and because of whom; empty: it is not."""


def blindness(config: PlannerConfig, demand: DemandView | None) -> str:
    """Why the demand is not known, in words; empty: it is."""
    if demand is None:
        return "no router has reported the demand for this model"
    if not demand.known:
        return demand.faults or "no router has reported its demand"
    wrong = [name for name in _FIGURES if not isfinite(getattr(demand, name))]
    if wrong:
        return f"{wrong[0]} is not a number"
    if demand.peak_300 <= 0 and demand.held == 0:
        return ""  # nothing has to be predicted
    if demand.poor:
        return "the routers' predictions have been wrong for a while"
    if demand.first_tokens < config.min_first_tokens:
        return f"{demand.first_tokens} first tokens seen of {config.min_first_tokens} needed"
    return ""


_FIGURES = (
    *("work", "level", "work_300", "peak_300"),
    *("held_work", "held_wait", "queued_work"),
)


class Sanity:
    """How well one model's demand is known, and since when."""

    def __init__(self, config: PlannerConfig) -> None:
        self._config = config
        self._votes = Votes()
        self._blind_since: Seconds | None = None

    def look(self, now: Seconds, pool: PoolConfig, demand: DemandView | None) -> Sight:
        """What may be decided at this tick."""
        blind = blindness(self._config, demand)
        if not blind:
            self._blind_since = None
            self._votes.clear()
            return Sight(doubt=demand.faults if demand is not None else "")
        if self._blind_since is None:
            self._blind_since = now
        since = now - self._blind_since
        alarm = f"for {since:.0f} s: {blind}" if since >= self._config.alarm else ""
        return Sight(blind, blind, self._votes.add(_waits(self._config, pool, demand)), alarm)


def _waits(config: PlannerConfig, pool: PoolConfig, demand: DemandView | None) -> bool:
    """True if held requests wait so long that they are about to miss the objective."""
    if demand is None or pool.ttft is None:
        return False
    return demand.held > 0 and demand.held_wait > config.blind_wait * pool.ttft

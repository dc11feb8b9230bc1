"""Keeps what operators have told the planners: which models are paused, and which are pinned. Pure.

All planners of a cluster keep the same wishes. For each model and sort the newest one holds, in
whatever order they arrive, so copies that meet agree. Wishes end by themselves, and with the last
planner: what must last stands in the planner file.
"""

from __future__ import annotations

from time import localtime, strftime
from typing import TYPE_CHECKING, Final

from pdserve.messages.planner_orders import PlannerWish

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pdserve.ids import Seconds

__all__ = ["LONGEST", "PAUSE", "PIN", "Wishes", "until_words"]

PAUSE: Final = "pause"
PIN: Final = "pin"
LONGEST: Final[Seconds] = 365 * 86400.0
"""Longest time that a wish may hold: what must last stands in the planner file."""
_MOST: Final = 512
"""Most wishes that are kept: two for each of 256 models."""
_LATER: Final[Seconds] = 0.001
"""How much newer an operator's word is than the one that it replaces, at least."""
_REMEMBERED: Final[Seconds] = 3600.0
"""How long a wish that is over is kept, so that an old copy of the one before does not return."""


class Wishes:
    """The wishes of one cluster's operators, as one planner knows them."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], PlannerWish] = {}

    @property
    def all(self) -> tuple[PlannerWish, ...]:
        """Every wish that is known, ended ones included, for the other planners."""
        return tuple(self._known[key] for key in sorted(self._known))

    def full(self, model: str, sort: str) -> bool:
        """True if a wish of this sort for `model` would be one too many."""
        return len(self._known) >= _MOST and (model, sort) not in self._known

    def enter(
        self,
        wall: float,
        *,
        model: str,
        sort: str,
        by: str,
        seconds: Seconds = 0.0,
        mix: Mapping[str, int] | None = None,
    ) -> None:
        """An operator says something now, which holds for so many `seconds`; 0 ends what held.

        It is newer than what is known, also if that came from a planner whose clock is ahead, or
        the clock here has gone back.
        """
        known = self._known.get((model, sort))
        at = wall if known is None else max(wall, known.at + _LATER)
        until = wall + seconds if seconds else 0.0
        wish = PlannerWish(model=model, sort=sort, at=at, until=until, by=by, mix=dict(mix or {}))
        self.hear(wall, [wish])

    def hear(self, wall: float, wishes: Iterable[PlannerWish]) -> bool:
        """Takes over what is newer than what is known; returns True if anything is."""
        news = False
        for wish in wishes:
            key = (wish.model, wish.sort)
            known = self._known.get(key)
            if known is not None and _order(known) >= _order(wish):
                continue
            if self.full(*key):
                continue
            self._known[key] = wish
            news = True
        return self._forget(wall) or news

    def _forget(self, wall: float) -> bool:
        old = [key for key, one in self._known.items() if one.until + _REMEMBERED < wall]
        old = [key for key in old if self._known[key].at + _REMEMBERED < wall]
        for key in old:
            del self._known[key]
        return bool(old)

    def holding(self, wall: float) -> tuple[PlannerWish, ...]:
        """The wishes that hold now."""
        return tuple(one for one in self.all if one.until > wall)

    def paused(self, wall: float) -> dict[str, str]:
        """By model: who paused it, and until when."""
        holding = (one for one in self.holding(wall) if one.sort == PAUSE)
        return {one.model: f"{one.by or 'an operator'} until {until_words(one)}" for one in holding}

    def pins(self, wall: float) -> dict[str, dict[str, int]]:
        """By model: the workers by mode that are fixed."""
        return {one.model: dict(one.mix) for one in self.holding(wall) if one.sort == PIN}


def _order(wish: PlannerWish) -> tuple[float, float, str]:
    """Two wishes of the same moment have an order, too, the same on all planners."""
    return (wish.at, wish.until, wish.by)


def until_words(wish: PlannerWish) -> str:
    """When it ends, on this machine's clock."""
    return strftime("%Y-%m-%d %H:%M:%S", localtime(wish.until))

"""Which requests wait at a worker although another one would begin them sooner.

Work that waits in an engine cannot be given to another by a router; but its frontend can take it
back and ask anew, as long as nothing of it has been computed. Whether it should:

    here     predicted time to its first token where it is: what was placed before it there, and its
             own prompt. Who is late by a second is taken to be late by another one
    there    what waits at another worker with room, and the whole prompt: nothing cached

It is worth it if it saves a quarter of a second, and 30 %, and did so half a second ago: numbers
are some tenths of a second old. A few requests at a time, each to a worker that the earlier ones of
the same look have left room at; the same one is not asked for again for a while, since its frontend
has its reasons, and one that has been through several workers stays.

Pure: time comes in. It knows neither bookings' fates nor who is told; the desk owns one and gives
it what it knows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from pdserve.ids import NodeId, Seconds
    from pdserve.router.bookings import Booking

__all__ = ["MOST_ATTEMPTS", "Group", "Place", "Rebalancer", "Waiting", "waiting"]

_LEAST: Final[Seconds] = 0.25
_SHARE: Final = 0.3
"""A move must save this much, and this part of what is left."""
_SETTLED: Final[Seconds] = 0.5
"""For so long it must have been worth it."""
_AGAIN: Final[Seconds] = 5.0
"""Before the same booking is asked for again."""
_MOST: Final = 4
"""Moves in one look."""
MOST_ATTEMPTS: Final = 3
"""A request that routers have placed more often than this stays where it is."""
_MICRO: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class Waiting:
    """A booking whose request has not begun."""

    booking: int
    worker: NodeId
    here: Seconds
    """Predicted from now to its first token where it is."""
    late: Seconds
    """Of that, what does not rest on predictions of this moment."""
    prompt_tokens: int
    sequences: int = 1


@dataclass(frozen=True, slots=True)
class Place:
    """A worker that may take one more."""

    node: NodeId
    wait: Seconds
    """Predicted until it begins what comes now."""
    room: int
    """Sequences that it could run besides."""
    idle: bool = False
    """No prompt waits there, or is being computed."""


@dataclass(frozen=True, slots=True)
class Group:
    """One model's."""

    waiting: Sequence[Waiting]
    places: Sequence[Place]
    cost: Callable[[NodeId, int], Seconds]
    """Predicted for so many prompt tokens there."""
    trusted: bool = True
    """Predictions are good. If not, only who is late may go, and only to who is idle."""


def waiting(
    now: Seconds, bookings: Iterable[Booking], since: Seconds, sequences: int
) -> list[Waiting]:
    """Those at one worker that have not begun. Args: `bookings` are all there without a first
    token, in the order in which they came; the first since `since`. By the worker's report the
    last `sequences` wait; those before them are being computed."""
    found: list[Waiting] = []
    ahead = 0.0
    for booking in bookings:
        work = booking.work / _MICRO
        passed = 0.0 if found else min(max(0.0, now - since), 0.9 * work)
        expected = ahead + work
        if booking.dispatch is not None and booking.dispatch.predicted_ttft is not None:
            expected = booking.dispatch.predicted_ttft
        late = max(0.0, now - booking.placed - expected)
        ahead += work - passed
        found.append(
            Waiting(
                booking.id,
                booking.worker.node,
                max(ahead, late),
                late,
                booking.prompt_tokens,
                booking.sequences,
            )
        )
    last: list[Waiting] = []
    for one in reversed(found):
        sequences -= one.sequences
        if sequences < 0:
            break
        last.append(one)
    return last[::-1]


class Rebalancer:
    """See above."""

    def __init__(self) -> None:
        self._since: dict[int, Seconds] = {}
        """Bookings for which a move is worth it, since when."""
        self._told: dict[int, Seconds] = {}
        """Bookings that were asked for, when."""

    def look(self, now: Seconds, groups: Iterable[Group]) -> list[int]:
        """The bookings whose frontends had better ask anew, those that gain most first."""
        moves: list[int] = []
        worth: dict[int, Seconds] = {}
        there: set[int] = set()
        for group in groups:
            there.update(one.booking for one in group.waiting)
            self._judge(now, group, worth, moves)
        self._since = worth
        self._told = {booking: at for booking, at in self._told.items() if booking in there}
        self._told |= dict.fromkeys(moves, now)
        return moves

    def _judge(
        self, now: Seconds, group: Group, worth: dict[int, Seconds], moves: list[int]
    ) -> None:
        taken: dict[NodeId, Seconds] = {}
        room = {place.node: place.room for place in group.places}
        for one in sorted(group.waiting, key=lambda one: (-_here(group, one), one.booking)):
            best = _best(group, one, room, taken)
            if best is None:
                continue
            node, there = best
            here = _here(group, one)
            if here - there <= max(_LEAST, _SHARE * here):
                continue
            since = worth[one.booking] = self._since.get(one.booking, now)
            lately = now - self._told.get(one.booking, -_AGAIN) < _AGAIN
            if now - since < _SETTLED or lately or len(moves) >= _MOST:
                continue
            moves.append(one.booking)
            room[node] -= one.sequences
            taken[node] = taken.get(node, 0.0) + group.cost(node, one.prompt_tokens)


def _here(group: Group, one: Waiting) -> Seconds:
    return one.here if group.trusted else one.late


def _best(
    group: Group, one: Waiting, room: dict[NodeId, int], taken: dict[NodeId, Seconds]
) -> tuple[NodeId, Seconds] | None:
    """Who would have its first token soonest, and after how long."""
    found = [
        (place.wait + taken.get(place.node, 0.0) + group.cost(place.node, one.prompt_tokens), place)
        for place in group.places
        if place.node != one.worker
        and room[place.node] >= one.sequences
        and (group.trusted or (place.idle and place.node not in taken))
    ]
    if not found:
        return None
    there, place = min(found, key=lambda pair: (pair[0], pair[1].node))
    return place.node, there

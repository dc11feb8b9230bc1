"""Finds requests that wait at a worker although another worker would begin them sooner.

A router cannot move work that waits in an engine, but the frontend can abort it and route it again
while nothing of it has been computed. A move is compared by predicted time to first token:

    here     work placed before it at its worker, and its own prefill. A request that is late by a
             second is expected to be late by another one
    there    work waiting at another worker with room, and the whole prompt: nothing cached

It is worth it if it saves a quarter of a second and 30 %, and did so half a second ago, because the
numbers are some tenths of a second old. Each pass proposes a few moves, each to a worker that still
has room after the earlier ones. A booking is not proposed again for a while, since its frontend may
have refused, and a request that was placed often stays. Pure; `RouterCore` owns one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from pdserve.ids import NodeId, Seconds
    from pdserve.router.bookings import Booking

__all__ = [
    "MAX_ATTEMPTS",
    "RebalanceGroup",
    "RebalanceTarget",
    "Rebalancer",
    "WaitingBooking",
    "waiting_bookings",
]

_LEAST: Final[Seconds] = 0.25
_SHARE: Final = 0.3
"""Smallest share of the remaining time that a move must save, besides the absolute minimum."""
_SETTLED: Final[Seconds] = 0.5
"""How long a move must have been worth it."""
_AGAIN: Final[Seconds] = 5.0
"""Interval before the same booking is proposed again."""
_MOST: Final = 4
"""Most moves in one pass."""
MAX_ATTEMPTS: Final = 3
"""A request that routers have placed more often than this stays where it is."""
_MICRO: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class WaitingBooking:
    """A booking whose request has not begun."""

    booking: int
    worker: NodeId
    here: Seconds
    """Predicted time from now to its first token at its present worker."""
    late: Seconds
    """The part of `here` that does not rest on predictions of this moment."""
    prompt_tokens: int
    sequences: int = 1


@dataclass(frozen=True, slots=True)
class RebalanceTarget:
    """A worker that may take one more request."""

    node: NodeId
    wait: Seconds
    """Predicted time until it would begin a new request."""
    room: int
    """Further sequences that it could run."""
    idle: bool = False
    """True if no prompt waits or is being computed there."""


@dataclass(frozen=True, slots=True)
class RebalanceGroup:
    """Waiting bookings and targets of one model."""

    waiting: Sequence[WaitingBooking]
    places: Sequence[RebalanceTarget]
    cost: Callable[[NodeId, int], Seconds]
    """Predicts prefill time at a worker from the number of prompt tokens."""
    trusted: bool = True
    """True if predictions are good. If not, only late requests move, and only to idle workers."""


def waiting_bookings(
    now: Seconds, bookings: Iterable[Booking], since: Seconds, sequences: int
) -> list[WaitingBooking]:
    """The bookings at one worker that have not begun.

    Args: `bookings` are all there without a first token, oldest first; the oldest became so at
    `since`. By the worker's report the last `sequences` of them wait; those before are being
    computed.
    """
    found: list[WaitingBooking] = []
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
            WaitingBooking(
                booking.id,
                booking.worker.node,
                max(ahead, late),
                late,
                booking.prompt_tokens,
                booking.sequences,
            )
        )
    last: list[WaitingBooking] = []
    for one in reversed(found):
        sequences -= one.sequences
        if sequences < 0:
            break
        last.append(one)
    return last[::-1]


class Rebalancer:
    """Finds waiting requests that another worker would begin sooner; remembers what it proposed."""

    def __init__(self) -> None:
        self._since: dict[int, Seconds] = {}
        """Bookings for which a move is worth it, and since when."""
        self._told: dict[int, Seconds] = {}
        """Bookings that were proposed, and when."""

    def look(self, now: Seconds, groups: Iterable[RebalanceGroup]) -> list[int]:
        """The bookings that should be routed again, largest gain first."""
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
        self, now: Seconds, group: RebalanceGroup, worth: dict[int, Seconds], moves: list[int]
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


def _here(group: RebalanceGroup, one: WaitingBooking) -> Seconds:
    return one.here if group.trusted else one.late


def _best(
    group: RebalanceGroup,
    one: WaitingBooking,
    room: dict[NodeId, int],
    taken: dict[NodeId, Seconds],
) -> tuple[NodeId, Seconds] | None:
    """The target with the soonest first token, and the time until then."""
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

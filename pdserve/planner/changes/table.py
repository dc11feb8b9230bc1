"""The states of a change, and what each event makes of them. Pure.

A start waits for a worker that serves. Its instance may be pending for long, and its process may
never become a worker, or one of another mode.

    asked ──▶ pending ──▶ booting ──▶ joined ──▶ done
      └──────────┴───────────┴──────────┴─────▶ failed
      └──────────┴─ late, no longer wanted ─────▶ ending ──▶ given_up

A stop drains a worker first. Only a worker that does not end by itself is ended by its actuator.

    ordered ──▶ draining ──▶ stopping ──▶ done
        └──────────┴── undone, refused ──▶ given_up

A switch and an undone drain are orders to the worker, which may refuse.

    ordered ──▶ leaving ──▶ proving ──▶ done
        └──────────┴───────────┴─────▶ given_up

`-` in a table: the event changes nothing there. The last states of a table have no row: nothing
happens to a change that is over.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["ENDS", "TABLES", "Action", "ChangeEvent", "ChangeState", "next_state"]


class Action(Enum):
    """What a change does; the values travel in `messages.planner.Change.action`."""

    START = "start"
    STOP = "stop"
    SWITCH = "mode"
    UNDO = "undo_drain"


class ChangeState(Enum):
    """How far a change is."""

    ASKED = "asked"
    """Its actuator is asked to start it; no list shows it yet."""
    PENDING = "pending"
    """The actuator has the order, and no process runs yet."""
    BOOTING = "booting"
    """Its process runs."""
    JOINED = "joined"
    """Its worker is a member and loads its model."""
    ENDING = "ending"
    """It is given up; its actuator ends what there is of it."""
    ORDERED = "ordered"
    """The worker is told."""
    DRAINING = "draining"
    """The worker takes nothing new, and its streams move."""
    STOPPING = "stopping"
    """It drained for too long; its actuator ends it."""
    LEAVING = "leaving"
    """The worker hands over what cannot stay in the new mode."""
    PROVING = "proving"
    """The worker tests itself in the new mode."""
    DONE = "done"
    FAILED = "failed"
    """A start did not become a worker."""
    GIVEN_UP = "given_up"
    """Nothing has changed."""


class ChangeEvent(Enum):
    """What may happen to a change."""

    PENDING = "seen pending"
    BOOTING = "seen booting"
    LOADING = "seen loading"
    READY = "seen ready"
    """A worker serves as wanted."""
    WRONG = "wrong mode"
    """A worker has registered in a mode that was not asked for."""
    DRAINING = "seen draining"
    LEAVING = "seen leaving"
    PROVING = "seen proving"
    BACK = "seen back"
    """A worker that was on its way serves as before."""
    FAILED = "seen failed"
    """An instance has failed or ended by itself."""
    GONE = "gone"
    """No list has it any more."""
    REFUSED = "refused"
    """The worker, or the actuator, will not do it."""
    LATE = "timed out"
    WITHDRAWN = "withdrawn"
    """It is no longer wanted."""


S, E = ChangeState, ChangeEvent
ENDS: Final = frozenset((S.DONE, S.FAILED, S.GIVEN_UP))
"""States in which a change is over."""

_Table = dict[ChangeState, dict[ChangeEvent, ChangeState]]


def _read(text: str) -> _Table:
    """A table of words: the first line names the states, the first word of each other line the
    event, and a cell the state after it."""
    head, *lines = (line.split() for line in text.strip().splitlines())
    table: _Table = {S(name): {} for name in head[1:]}
    for event, *cells in lines:
        for state, cell in zip(table, cells, strict=True):
            table[state][E[event]] = state if cell == "-" else S(cell)
    return table


TABLES: Final[Mapping[Action, _Table]] = {
    # A worker of the wrong mode has failed as a start at once: its drain is a stop of its own. One
    # that serves before it could be ended is as good as any other.
    Action.START: _read("""
        event      asked    pending  booting  joined   ending
        PENDING    pending  -        -        -        -
        BOOTING    booting  booting  -        -        -
        LOADING    joined   joined   joined   -        -
        READY      done     done     done     done     done
        WRONG      failed   failed   failed   failed   failed
        DRAINING   -        -        -        -        -
        LEAVING    -        -        -        -        -
        PROVING    -        -        -        -        -
        BACK       -        -        -        -        -
        FAILED     failed   failed   failed   failed   given_up
        GONE       -        failed   failed   failed   given_up
        REFUSED    failed   -        -        -        -
        LATE       ending   ending   ending   ending   -
        WITHDRAWN  ending   ending   ending   ending   -
    """),
    # A worker that was lost, or whose instance has failed, is gone as well.
    Action.STOP: _read("""
        event      ordered   draining  stopping
        PENDING    -         -         -
        BOOTING    -         -         -
        LOADING    -         -         -
        READY      -         given_up  -
        WRONG      -         -         -
        DRAINING   draining  -         -
        LEAVING    -         -         -
        PROVING    -         -         -
        BACK       -         given_up  given_up
        FAILED     done      done      done
        GONE       done      done      done
        REFUSED    given_up  given_up  -
        LATE       given_up  stopping  -
        WITHDRAWN  given_up  given_up  -
    """),
    Action.SWITCH: _read("""
        event      ordered   leaving   proving
        PENDING    -         -         -
        BOOTING    -         -         -
        LOADING    -         -         -
        READY      done      done      done
        WRONG      given_up  given_up  given_up
        DRAINING   given_up  given_up  given_up
        LEAVING    leaving   -         -
        PROVING    proving   proving   -
        BACK       -         given_up  given_up
        FAILED     given_up  given_up  given_up
        GONE       given_up  given_up  given_up
        REFUSED    given_up  given_up  given_up
        LATE       given_up  given_up  given_up
        WITHDRAWN  given_up  given_up  given_up
    """),
    Action.UNDO: _read("""
        event      ordered
        PENDING    -
        BOOTING    -
        LOADING    -
        READY      done
        WRONG      -
        DRAINING   -
        LEAVING    -
        PROVING    -
        BACK       done
        FAILED     given_up
        GONE       given_up
        REFUSED    given_up
        LATE       given_up
        WITHDRAWN  given_up
    """),
}


def next_state(action: Action, state: ChangeState, event: ChangeEvent) -> ChangeState:
    """The state after the event; a change that is over stays as it is."""
    return state if state in ENDS else TABLES[action][state][event]

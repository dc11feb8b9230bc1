"""The states of a worker that changes its mode, and what each event makes of them.

    serving ──ordered──▶ leaving ──empty──▶ flipping ──flipped──▶ proving ──proved──▶ serving
       ▲                    │                   │                    │
       └── timed out, ──────┘                 failed               failed
           cancelled, last,                     ▼                    ▼
           draining                         returning ◀──────────────┘
       ▲                                        │
       └────────────── flipped, failed ─────────┘

    leaving     takes nothing new and waits until what cannot stay has gone
    flipping    replaces the clients of the prefill queues; a moment without waiting
    proving     has the new mode and shows that it works before it takes anything
    returning   takes its former mode back

An event that a state does not list changes nothing. Pure.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["TABLE", "ModeEvent", "ModeState", "next_state"]


class ModeState(Enum):
    """Where a change of mode is."""

    SERVING = "serving"
    LEAVING = "leaving"
    FLIPPING = "flipping"
    PROVING = "proving"
    RETURNING = "returning"


class ModeEvent(Enum):
    """What may happen to a worker's mode."""

    ORDERED = "ordered"
    """An operator wants another mode, and nothing speaks against it."""
    EMPTY = "empty"
    """Nothing is left that could not stay in the new mode."""
    TIMED_OUT = "timed out"
    """Something was left when the time had passed."""
    CANCELLED = "cancelled"
    """The operator wants the present mode after all."""
    LAST = "last"
    """No other worker would do what this one does now."""
    DRAINING = "draining"
    """The process drains."""
    FLIPPED = "flipped"
    """The queue clients of the mode are there."""
    PROVED = "proved"
    """The self-test of the new mode was passed."""
    FAILED = "failed"
    """The step of this state did not work."""


S, E = ModeState, ModeEvent
TABLE: Final[Mapping[ModeState, Mapping[ModeEvent, ModeState]]] = {
    S.SERVING: {E.ORDERED: S.LEAVING},
    S.LEAVING: {
        E.EMPTY: S.FLIPPING,
        E.TIMED_OUT: S.SERVING,
        E.CANCELLED: S.SERVING,
        E.LAST: S.SERVING,
        E.DRAINING: S.SERVING,
    },
    S.FLIPPING: {E.FLIPPED: S.PROVING, E.FAILED: S.RETURNING},
    S.PROVING: {E.PROVED: S.SERVING, E.FAILED: S.RETURNING, E.DRAINING: S.SERVING},
    # It returns once: with neither mode working, the engine is at fault and not the mode.
    S.RETURNING: {E.FLIPPED: S.SERVING, E.FAILED: S.SERVING},
}


def next_state(state: ModeState, event: ModeEvent) -> ModeState:
    """The state after the event."""
    return TABLE[state].get(event, state)

"""The life of one request that an adapter has handed to a foreign engine, as a table.

    posted ─▶ accepted ─▶ running ─▶ ending ─▶ freed
                  └──────────┴─▶ held ──────────┘        ended here, blocks kept for a peer
    any of them ─▶ aborting ─▶ freed, or lost            output is dropped; the engine is gone

Every pair of state and event has a cell, or a reason why it cannot happen. So an adapter has no
case of its own for a late token, a second abort or a death in between. Pure: the adapter performs
the actions, each at once, in order.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["CELLS", "IMPOSSIBLE", "RequestAction", "RequestEvent", "RequestLife", "RequestState"]


class RequestState(Enum):
    """Where the request is."""

    POSTED = "posted"
    """On its way to the engine's thread."""
    ACCEPTED = "accepted"
    """The engine has it and has generated nothing."""
    RUNNING = "running"
    """Tokens have come."""
    ENDING = "ending"
    """It has ended for pdserve; the engine has been told and has not answered."""
    ABORTING = "aborting"
    """It was dropped; the engine has not said that it is over."""
    HELD = "held"
    """It has ended; the engine keeps its blocks for a peer."""
    FREED = "freed"
    """The engine holds nothing of it."""
    LOST = "lost"
    """The engine is gone."""


class RequestEvent(Enum):
    """What happens to it."""

    ADMITTED = "admitted"
    """The engine has taken it."""
    TOKENS = "tokens"
    """Tokens that do not end it."""
    STOPPED = "stopped"
    """Tokens that end it by pdserve's rules; the engine may go on."""
    FINISH = "finish"
    """The engine has ended it."""
    PREFILLED = "prefilled"
    """The engine has ended it and keeps its blocks for a peer."""
    ERROR = "error"
    """The engine could not serve it."""
    DROP = "drop"
    """It was aborted, or its deadline has passed."""
    SENT = "sent"
    """The peer has the blocks, or the engine has safely given them up."""
    DEAD = "dead"
    """The engine has broken down."""


class RequestAction(Enum):
    """What the adapter does."""

    REPORT = "report"
    """Send the tokens to the node."""
    END = "end"
    """Send the end to the node."""
    FAIL = "fail"
    """Send the error to the node."""
    CANCEL = "cancel"
    """Tell the engine to stop."""
    FREE = "free"
    """Forget the request."""


_S, _E, _A = RequestState, RequestEvent, RequestAction
_Cell = tuple[RequestState, tuple[RequestAction, ...]]

_RUNS: Mapping[RequestEvent, _Cell] = {
    _E.TOKENS: (_S.RUNNING, (_A.REPORT,)),
    _E.STOPPED: (_S.ENDING, (_A.REPORT, _A.CANCEL)),
    _E.FINISH: (_S.FREED, (_A.REPORT, _A.END, _A.FREE)),
    _E.PREFILLED: (_S.HELD, (_A.REPORT, _A.END)),
    _E.ERROR: (_S.FREED, (_A.FAIL, _A.FREE)),
    _E.DROP: (_S.ABORTING, (_A.CANCEL,)),
    _E.DEAD: (_S.LOST, (_A.FREE,)),
}

CELLS: Final[Mapping[RequestState, Mapping[RequestEvent, _Cell]]] = {
    _S.POSTED: {
        _E.ADMITTED: (_S.ACCEPTED, ()),
        _E.ERROR: (_S.FREED, (_A.FAIL, _A.FREE)),
        _E.DROP: (_S.ABORTING, ()),
        _E.DEAD: (_S.LOST, (_A.FREE,)),
    },
    _S.ACCEPTED: _RUNS,
    _S.RUNNING: {**_RUNS, _E.ADMITTED: (_S.RUNNING, ())},
    _S.ENDING: {
        _E.TOKENS: (_S.ENDING, ()),
        _E.STOPPED: (_S.ENDING, ()),
        _E.FINISH: (_S.FREED, (_A.FREE,)),
        _E.ERROR: (_S.FREED, (_A.FREE,)),
        _E.DROP: (_S.ENDING, ()),
        _E.DEAD: (_S.LOST, (_A.FREE,)),
    },
    _S.ABORTING: {
        _E.ADMITTED: (_S.ABORTING, (_A.CANCEL,)),
        _E.TOKENS: (_S.ABORTING, ()),
        _E.STOPPED: (_S.ABORTING, ()),
        _E.FINISH: (_S.FREED, (_A.FREE,)),
        _E.PREFILLED: (_S.HELD, (_A.CANCEL,)),
        _E.ERROR: (_S.FREED, (_A.FREE,)),
        _E.DROP: (_S.ABORTING, ()),
        _E.DEAD: (_S.LOST, (_A.FREE,)),
    },
    _S.HELD: {
        _E.ERROR: (_S.FREED, (_A.FREE,)),
        _E.DROP: (_S.HELD, (_A.CANCEL,)),
        _E.SENT: (_S.FREED, (_A.FREE,)),
        _E.DEAD: (_S.LOST, (_A.FREE,)),
    },
    _S.FREED: {_E.DROP: (_S.FREED, ()), _E.DEAD: (_S.FREED, ())},
    _S.LOST: {
        **{event: (_S.LOST, ()) for event in RequestEvent},
    },
}

IMPOSSIBLE: Final[Mapping[str, Mapping[RequestState, tuple[RequestEvent, ...]]]] = {
    "the engine answers only what it has taken": {
        _S.POSTED: (_E.TOKENS, _E.STOPPED, _E.FINISH, _E.PREFILLED),
    },
    "it is taken once": {
        _S.ACCEPTED: (_E.ADMITTED,),
        _S.ENDING: (_E.ADMITTED,),
        _S.HELD: (_E.ADMITTED,),
        _S.FREED: (_E.ADMITTED,),
    },
    "only held blocks are sent": {
        _S.POSTED: (_E.SENT,),
        _S.ACCEPTED: (_E.SENT,),
        _S.RUNNING: (_E.SENT,),
        _S.ENDING: (_E.SENT,),
        _S.ABORTING: (_E.SENT,),
        _S.FREED: (_E.SENT,),
    },
    "the engine says nothing after the end": {
        _S.HELD: (_E.TOKENS, _E.STOPPED, _E.FINISH, _E.PREFILLED),
        _S.FREED: (_E.TOKENS, _E.STOPPED, _E.FINISH, _E.PREFILLED, _E.ERROR),
    },
    "blocks are kept only for a prefill, which pdserve does not stop by its rules": {
        _S.ENDING: (_E.PREFILLED,),
    },
}


class RequestLife:
    """The state of one request; the adapter's engine thread owns it."""

    def __init__(self) -> None:
        self.state = RequestState.POSTED

    @property
    def over(self) -> bool:
        """Nothing follows."""
        return self.state in (RequestState.FREED, RequestState.LOST)

    def fire(self, event: RequestEvent) -> tuple[RequestAction, ...]:
        """Go to the next state and return what is to be done. Raises `AssertionError` for a pair
        that cannot happen: it is a bug of the adapter or of the engine."""
        cell = CELLS[self.state].get(event)
        assert cell is not None, f"{event.value} came to a request that is {self.state.value}"
        self.state, actions = cell
        return actions

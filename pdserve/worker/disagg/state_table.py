"""Defines the KV handoff as two state machines, one table each: states, events and actions.

    decode worker    admit ─▶ queue ─claim▶ attempt ─▶ fill ─notify▶ verify ─▶ active
                       ▲────── no blocks here ─┘
                       └────────┴───────────────▶ local ────────────────────────┘
    prefill worker   claimed ─▶ opening ─▶ computing ─▶ notifying ─▶ notified
                                                           └─▶ sent ────┘

The decode worker owns the request. Its machine ends with the request's last delta; if the request
ends earlier (cancel, expire, error), both workers free its memory. A failed attempt leads back to
the queue. There `ENQUEUE` may answer `REFUSED`, for example after too many attempts. So every path
ends in `active`, or in a local prefill.

Each pair of state and event is either in the cells or listed as impossible with the reason; an
impossible pair at run time is a bug. A message that names another claim or attempt than the present
one arrives here as `STALE`, because the fence (`fence`) has checked it.

Pure: `remote_prefill` and `prefill_job` implement the actions.
"""

from __future__ import annotations

import logging
from enum import Enum
from typing import TYPE_CHECKING, ClassVar, Final, Generic, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = [
    "DECODE_TABLE",
    "PREFILL_TABLE",
    "DecodeAction",
    "DecodeEvent",
    "DecodeState",
    "PrefillAction",
    "PrefillEvent",
    "PrefillState",
    "StateMachine",
    "StateTable",
    "TableCell",
    "UndefinedTransition",
    "markdown",
]

_log = logging.getLogger(__name__)


# ---------------------------------------------------------------- decode worker


class DecodeState(Enum):
    """State, at its decode worker, of a request whose prompt is to be prefilled elsewhere."""

    ADMIT = "admit"
    """The engine has no room for it yet."""
    QUEUE = "queue"
    """Blocks are reserved; no prefill worker has asked for them yet."""
    ATTEMPT = "attempt"
    """A prefill worker has asked; the engine sets up a path and binds blocks."""
    FILL = "fill"
    """A prefill worker computes and sends, under a lease."""
    VERIFY = "verify"
    """The handoff has arrived; the engine waits for the last bytes and checks them."""
    LOCAL = "local"
    """The prompt is prefilled here after all."""
    ACTIVE = "active"
    """The first token has come."""
    RELEASED = "released"
    """The request has ended and its memory is free."""


class DecodeEvent(Enum):
    """Events of such a request."""

    ADMITTED = "admitted"
    """Engine: blocks are reserved."""
    REFUSED = "refused"
    """Queue: no prefill worker will take it; or enqueueing it is pointless."""
    IMPATIENT = "impatient"
    """The item waited longer than a remote prefill is worth."""
    CLAIM = "claim"
    """A prefill worker with a valid claim asks for blocks; no other attempt is open, or the worker
    that holds it is dead or silent."""
    AGAIN = "again"
    """The worker that holds the attempt asks again, because the reply was lost."""
    STALE = "stale"
    """A claim or message of another attempt than the open one."""
    OPENED = "opened"
    """Engine: the attempt has its blocks."""
    LOST = "lost"
    """Engine: the attempt has failed."""
    HINDERED = "hindered"
    """Engine: it could not open the attempt for a reason at this worker: its pool has no free
    blocks or is not registered yet. It admits the request again when it can."""
    RENEW = "renew"
    """The attempt's worker renews its lease."""
    NOTIFY = "notify"
    """The attempt's worker hands over."""
    FAILED = "failed"
    """The attempt's worker gives up."""
    LAPSE = "lapse"
    """The lease ended without renewal."""
    DIED = "died"
    """The life of the attempt's worker is over."""
    FIRST = "first token"
    """Engine: the first token of any choice."""
    DONE = "done"
    """Engine: the last choice has ended."""
    ERROR = "error"
    """Engine: the request ended in an error."""
    EXPIRE = "expire"
    """The request's deadline passed before its first token."""
    CANCEL = "cancel"
    """The request's frontend cancelled it or is gone."""
    FENCE = "fence"
    """This node begins a new life: all claims and attempts of the old one are void."""


class DecodeAction(Enum):
    """Actions at the decode worker."""

    AWAIT = "await"
    """Wait for free blocks again."""
    ENQUEUE = "enqueue"
    """Enqueue the prompt, or answer `REFUSED` if that is pointless."""
    UNQUEUE = "unqueue"
    """Take the prompt out of the queue."""
    OPEN = "open"
    """Number an attempt, start its lease, let the engine bind blocks."""
    JOIN = "join"
    """Let this caller wait for the ticket too."""
    ANSWER = "answer"
    """Send ticket and request to all waiting callers."""
    DISMISS = "dismiss"
    """Tell all waiting callers that there is no ticket."""
    TURN_AWAY = "turn away"
    """Tell the caller that its attempt or claim is stale."""
    ACCEPT = "accept"
    """Acknowledge the message."""
    EXTEND = "extend"
    """Renew the lease."""
    ACTIVATE = "activate"
    """Give the handoff to the engine."""
    GIVE_UP = "give up"
    """Tell the engine to drop the attempt; its blocks go to quarantine."""
    WITHDRAW = "withdraw"
    """Tell the attempt's worker that it is over, if that worker lives."""
    EXCLUDE = "exclude"
    """Do not ask this worker again for this request."""
    CLOSE = "close"
    """Close the attempt: its later messages are stale."""
    PREFILL_HERE = "prefill here"
    """Let the engine here compute the prompt."""
    SETTLE = "settle"
    """Record where the prompt was prefilled and what it cost."""
    FREE = "free"
    """Abort the request at the engine."""
    FAIL = "fail"
    """Send the error to the request's frontend."""
    FORGET = "forget"
    """Cancel timers and drop all records of the request."""


S = TypeVar("S", bound=Enum)
E = TypeVar("E", bound=Enum)
D = TypeVar("D", bound=Enum)


class TableCell(NamedTuple, Generic[S, D]):
    """The effect of an event in a state."""

    next: S
    actions: tuple[D, ...]
    """Performed in this order. Only the last one may cause another event."""


class StateTable(Generic[S, E, D]):
    """The rules of one state machine; every pair of state and event has one."""

    def __init__(
        self,
        name: str,
        states: type[S],
        events: type[E],
        start: S,
        end: S,
        cells: Mapping[S, Mapping[E, tuple[S, tuple[D, ...]]]],
        impossible: Mapping[str, Mapping[S, tuple[E, ...]]],
    ) -> None:
        """`impossible`: pairs by the reason why they cannot happen. Errors: `ValueError` for a pair
        that has both a cell and a reason, or neither."""
        self.name = name
        self.start, self.end = start, end
        self.cells = {
            (state, event): TableCell(*cell)
            for state, row in cells.items()
            for event, cell in row.items()
        }
        self.impossible = {
            (state, event): reason
            for reason, rows in impossible.items()
            for state, row in rows.items()
            for event in row
        }
        self.impossible |= {(end, event): "the state is final" for event in events}
        for pair in ((state, event) for state in states for event in events):
            if (pair in self.cells) == (pair in self.impossible):
                raise ValueError(f"{name}: {pair} must have one meaning")


class UndefinedTransition(AssertionError):
    """An event in a state where it cannot happen."""


class StateMachine(Generic[S, E, D]):
    """The state of one request or claim. Its owner performs the actions that `feed` returns."""

    __slots__ = ("state", "table")

    strict: ClassVar[bool] = False
    """True in tests: an impossible event raises. Otherwise it is logged and ignored."""

    def __init__(self, table: StateTable[S, E, D]) -> None:
        self.table = table
        self.state: S = table.start

    def feed(self, event: E) -> tuple[D, ...]:
        """Moves to the next state and returns the actions to perform. Errors: `UndefinedTransition`
        if `strict`."""
        cell = self.table.cells.get((self.state, event))
        if cell is None:
            self._undefined(event)
            return ()
        self.state = cell.next
        return cell.actions

    def _undefined(self, event: E) -> None:
        why = self.table.impossible[self.state, event]
        words = f"{self.table.name}: {event.value!r} in {self.state.value!r}, although {why}"
        if self.strict:
            raise UndefinedTransition(words)
        _log.error(
            "undefined handoff transition, event ignored (please report this bug): %s", words
        )


_BACK: Final = (DecodeAction.EXCLUDE, DecodeAction.CLOSE, DecodeAction.ENQUEUE)
"""Actions after a failed attempt."""

_DECODE_CELLS: Final[
    dict[DecodeState, dict[DecodeEvent, tuple[DecodeState, tuple[DecodeAction, ...]]]]
] = {
    DecodeState.ADMIT: {
        DecodeEvent.ADMITTED: (DecodeState.QUEUE, (DecodeAction.ENQUEUE,)),
        DecodeEvent.IMPATIENT: (DecodeState.LOCAL, (DecodeAction.PREFILL_HERE,)),
        DecodeEvent.STALE: (DecodeState.ADMIT, (DecodeAction.TURN_AWAY,)),
        DecodeEvent.FENCE: (DecodeState.ADMIT, ()),
        DecodeEvent.DONE: (DecodeState.RELEASED, (DecodeAction.FORGET,)),
        DecodeEvent.ERROR: (DecodeState.RELEASED, (DecodeAction.FORGET, DecodeAction.FAIL)),
        DecodeEvent.EXPIRE: (
            DecodeState.RELEASED,
            (DecodeAction.FREE, DecodeAction.FORGET, DecodeAction.FAIL),
        ),
        DecodeEvent.CANCEL: (DecodeState.RELEASED, (DecodeAction.FREE, DecodeAction.FORGET)),
    },
    DecodeState.QUEUE: {
        DecodeEvent.REFUSED: (DecodeState.LOCAL, (DecodeAction.PREFILL_HERE,)),
        DecodeEvent.IMPATIENT: (
            DecodeState.LOCAL,
            (DecodeAction.UNQUEUE, DecodeAction.PREFILL_HERE),
        ),
        DecodeEvent.FENCE: (DecodeState.LOCAL, (DecodeAction.UNQUEUE, DecodeAction.PREFILL_HERE)),
        DecodeEvent.CLAIM: (DecodeState.ATTEMPT, (DecodeAction.OPEN,)),
        DecodeEvent.STALE: (DecodeState.QUEUE, (DecodeAction.TURN_AWAY,)),
        DecodeEvent.FIRST: (DecodeState.ACTIVE, (DecodeAction.UNQUEUE, DecodeAction.SETTLE)),
        DecodeEvent.DONE: (DecodeState.RELEASED, (DecodeAction.UNQUEUE, DecodeAction.FORGET)),
        DecodeEvent.ERROR: (
            DecodeState.RELEASED,
            (DecodeAction.UNQUEUE, DecodeAction.FORGET, DecodeAction.FAIL),
        ),
        DecodeEvent.EXPIRE: (
            DecodeState.RELEASED,
            (DecodeAction.UNQUEUE, DecodeAction.FREE, DecodeAction.FORGET, DecodeAction.FAIL),
        ),
        DecodeEvent.CANCEL: (
            DecodeState.RELEASED,
            (DecodeAction.UNQUEUE, DecodeAction.FREE, DecodeAction.FORGET),
        ),
    },
    DecodeState.ATTEMPT: {
        DecodeEvent.OPENED: (DecodeState.FILL, (DecodeAction.ANSWER,)),
        DecodeEvent.LOST: (DecodeState.QUEUE, (DecodeAction.DISMISS, *_BACK)),
        DecodeEvent.HINDERED: (
            DecodeState.ADMIT,
            (DecodeAction.DISMISS, DecodeAction.CLOSE, DecodeAction.AWAIT),
        ),
        DecodeEvent.LAPSE: (
            DecodeState.QUEUE,
            (DecodeAction.DISMISS, DecodeAction.GIVE_UP, *_BACK),
        ),
        DecodeEvent.DIED: (DecodeState.QUEUE, (DecodeAction.DISMISS, DecodeAction.GIVE_UP, *_BACK)),
        DecodeEvent.CLAIM: (
            DecodeState.ATTEMPT,
            (
                DecodeAction.DISMISS,
                DecodeAction.GIVE_UP,
                DecodeAction.EXCLUDE,
                DecodeAction.CLOSE,
                DecodeAction.OPEN,
            ),
        ),
        DecodeEvent.AGAIN: (DecodeState.ATTEMPT, (DecodeAction.JOIN,)),
        DecodeEvent.STALE: (DecodeState.ATTEMPT, (DecodeAction.TURN_AWAY,)),
        DecodeEvent.REFUSED: (DecodeState.ATTEMPT, ()),
        DecodeEvent.FENCE: (
            DecodeState.LOCAL,
            (
                DecodeAction.DISMISS,
                DecodeAction.GIVE_UP,
                DecodeAction.CLOSE,
                DecodeAction.PREFILL_HERE,
            ),
        ),
        DecodeEvent.FIRST: (
            DecodeState.ACTIVE,
            (DecodeAction.DISMISS, DecodeAction.GIVE_UP, DecodeAction.CLOSE, DecodeAction.SETTLE),
        ),
        DecodeEvent.DONE: (
            DecodeState.RELEASED,
            (DecodeAction.DISMISS, DecodeAction.CLOSE, DecodeAction.FORGET),
        ),
        DecodeEvent.ERROR: (
            DecodeState.RELEASED,
            (DecodeAction.DISMISS, DecodeAction.CLOSE, DecodeAction.FORGET, DecodeAction.FAIL),
        ),
        DecodeEvent.EXPIRE: (
            DecodeState.RELEASED,
            (
                DecodeAction.DISMISS,
                DecodeAction.CLOSE,
                DecodeAction.FREE,
                DecodeAction.FORGET,
                DecodeAction.FAIL,
            ),
        ),
        DecodeEvent.CANCEL: (
            DecodeState.RELEASED,
            (DecodeAction.DISMISS, DecodeAction.CLOSE, DecodeAction.FREE, DecodeAction.FORGET),
        ),
    },
    DecodeState.FILL: {
        DecodeEvent.RENEW: (DecodeState.FILL, (DecodeAction.EXTEND,)),
        DecodeEvent.NOTIFY: (
            DecodeState.VERIFY,
            (DecodeAction.EXTEND, DecodeAction.ACCEPT, DecodeAction.ACTIVATE),
        ),
        DecodeEvent.LOST: (DecodeState.QUEUE, (DecodeAction.WITHDRAW, *_BACK)),
        DecodeEvent.FAILED: (
            DecodeState.QUEUE,
            (DecodeAction.ACCEPT, DecodeAction.GIVE_UP, *_BACK),
        ),
        DecodeEvent.LAPSE: (
            DecodeState.QUEUE,
            (DecodeAction.GIVE_UP, DecodeAction.WITHDRAW, *_BACK),
        ),
        DecodeEvent.DIED: (DecodeState.QUEUE, (DecodeAction.GIVE_UP, *_BACK)),
        DecodeEvent.CLAIM: (
            DecodeState.ATTEMPT,
            (
                DecodeAction.GIVE_UP,
                DecodeAction.WITHDRAW,
                DecodeAction.EXCLUDE,
                DecodeAction.CLOSE,
                DecodeAction.OPEN,
            ),
        ),
        DecodeEvent.AGAIN: (DecodeState.FILL, (DecodeAction.JOIN, DecodeAction.ANSWER)),
        DecodeEvent.STALE: (DecodeState.FILL, (DecodeAction.TURN_AWAY,)),
        DecodeEvent.REFUSED: (DecodeState.FILL, ()),
        DecodeEvent.FENCE: (
            DecodeState.LOCAL,
            (DecodeAction.GIVE_UP, DecodeAction.CLOSE, DecodeAction.PREFILL_HERE),
        ),
        DecodeEvent.FIRST: (
            DecodeState.ACTIVE,
            (DecodeAction.GIVE_UP, DecodeAction.WITHDRAW, DecodeAction.CLOSE, DecodeAction.SETTLE),
        ),
        DecodeEvent.DONE: (
            DecodeState.RELEASED,
            (DecodeAction.WITHDRAW, DecodeAction.CLOSE, DecodeAction.FORGET),
        ),
        DecodeEvent.ERROR: (
            DecodeState.RELEASED,
            (DecodeAction.WITHDRAW, DecodeAction.CLOSE, DecodeAction.FORGET, DecodeAction.FAIL),
        ),
        DecodeEvent.EXPIRE: (
            DecodeState.RELEASED,
            (
                DecodeAction.WITHDRAW,
                DecodeAction.CLOSE,
                DecodeAction.FREE,
                DecodeAction.FORGET,
                DecodeAction.FAIL,
            ),
        ),
        DecodeEvent.CANCEL: (
            DecodeState.RELEASED,
            (DecodeAction.WITHDRAW, DecodeAction.CLOSE, DecodeAction.FREE, DecodeAction.FORGET),
        ),
    },
    DecodeState.VERIFY: {
        DecodeEvent.RENEW: (DecodeState.VERIFY, (DecodeAction.EXTEND,)),
        DecodeEvent.NOTIFY: (DecodeState.VERIFY, (DecodeAction.ACCEPT,)),
        DecodeEvent.FIRST: (DecodeState.ACTIVE, (DecodeAction.SETTLE,)),
        DecodeEvent.LOST: (DecodeState.QUEUE, (DecodeAction.WITHDRAW, *_BACK)),
        DecodeEvent.FAILED: (
            DecodeState.QUEUE,
            (DecodeAction.ACCEPT, DecodeAction.GIVE_UP, *_BACK),
        ),
        DecodeEvent.LAPSE: (
            DecodeState.QUEUE,
            (DecodeAction.GIVE_UP, DecodeAction.WITHDRAW, *_BACK),
        ),
        DecodeEvent.DIED: (DecodeState.QUEUE, (DecodeAction.GIVE_UP, *_BACK)),
        DecodeEvent.AGAIN: (DecodeState.VERIFY, (DecodeAction.TURN_AWAY,)),
        DecodeEvent.STALE: (DecodeState.VERIFY, (DecodeAction.TURN_AWAY,)),
        DecodeEvent.REFUSED: (DecodeState.VERIFY, ()),
        DecodeEvent.FENCE: (
            DecodeState.LOCAL,
            (DecodeAction.GIVE_UP, DecodeAction.CLOSE, DecodeAction.PREFILL_HERE),
        ),
        DecodeEvent.DONE: (
            DecodeState.RELEASED,
            (DecodeAction.WITHDRAW, DecodeAction.CLOSE, DecodeAction.FORGET),
        ),
        DecodeEvent.ERROR: (
            DecodeState.RELEASED,
            (DecodeAction.WITHDRAW, DecodeAction.CLOSE, DecodeAction.FORGET, DecodeAction.FAIL),
        ),
        DecodeEvent.EXPIRE: (
            DecodeState.RELEASED,
            (
                DecodeAction.WITHDRAW,
                DecodeAction.CLOSE,
                DecodeAction.FREE,
                DecodeAction.FORGET,
                DecodeAction.FAIL,
            ),
        ),
        DecodeEvent.CANCEL: (
            DecodeState.RELEASED,
            (DecodeAction.WITHDRAW, DecodeAction.CLOSE, DecodeAction.FREE, DecodeAction.FORGET),
        ),
    },
    DecodeState.LOCAL: {
        DecodeEvent.ADMITTED: (DecodeState.LOCAL, ()),
        DecodeEvent.REFUSED: (DecodeState.LOCAL, ()),
        DecodeEvent.STALE: (DecodeState.LOCAL, (DecodeAction.TURN_AWAY,)),
        DecodeEvent.FENCE: (DecodeState.LOCAL, ()),
        DecodeEvent.FIRST: (DecodeState.ACTIVE, (DecodeAction.SETTLE,)),
        DecodeEvent.DONE: (DecodeState.RELEASED, (DecodeAction.FORGET,)),
        DecodeEvent.ERROR: (DecodeState.RELEASED, (DecodeAction.FORGET, DecodeAction.FAIL)),
        DecodeEvent.EXPIRE: (
            DecodeState.RELEASED,
            (DecodeAction.FREE, DecodeAction.FORGET, DecodeAction.FAIL),
        ),
        DecodeEvent.CANCEL: (DecodeState.RELEASED, (DecodeAction.FREE, DecodeAction.FORGET)),
    },
    DecodeState.ACTIVE: {
        DecodeEvent.RENEW: (DecodeState.ACTIVE, ()),
        DecodeEvent.NOTIFY: (DecodeState.ACTIVE, (DecodeAction.ACCEPT,)),
        DecodeEvent.FAILED: (DecodeState.ACTIVE, (DecodeAction.ACCEPT,)),
        DecodeEvent.AGAIN: (DecodeState.ACTIVE, (DecodeAction.TURN_AWAY,)),
        DecodeEvent.STALE: (DecodeState.ACTIVE, (DecodeAction.TURN_AWAY,)),
        DecodeEvent.REFUSED: (DecodeState.ACTIVE, ()),
        DecodeEvent.DIED: (DecodeState.ACTIVE, ()),
        DecodeEvent.FENCE: (DecodeState.ACTIVE, ()),
        DecodeEvent.DONE: (DecodeState.RELEASED, (DecodeAction.FORGET,)),
        DecodeEvent.ERROR: (DecodeState.RELEASED, (DecodeAction.FORGET, DecodeAction.FAIL)),
        DecodeEvent.CANCEL: (DecodeState.RELEASED, (DecodeAction.FREE, DecodeAction.FORGET)),
    },
}

_DECODE_IMPOSSIBLE: Final[dict[str, dict[DecodeState, tuple[DecodeEvent, ...]]]] = {
    "the engine admits a request once": {
        state: (DecodeEvent.ADMITTED,)
        for state in (
            DecodeState.QUEUE,
            DecodeState.ATTEMPT,
            DecodeState.FILL,
            DecodeState.VERIFY,
            DecodeState.ACTIVE,
        )
    },
    "the prompt is not enqueued yet": {DecodeState.ADMIT: (DecodeEvent.REFUSED,)},
    "patience only bounds the wait for a worker": {
        state: (DecodeEvent.IMPATIENT,)
        for state in (
            DecodeState.ATTEMPT,
            DecodeState.FILL,
            DecodeState.VERIFY,
            DecodeState.LOCAL,
            DecodeState.ACTIVE,
        )
    },
    "the fence accepts no claim in this state": {
        state: (DecodeEvent.CLAIM,)
        for state in (DecodeState.ADMIT, DecodeState.VERIFY, DecodeState.LOCAL, DecodeState.ACTIVE)
    },
    "no attempt is open, and messages of other attempts are stale": {
        state: (
            *(
                DecodeEvent.AGAIN,
                DecodeEvent.OPENED,
                DecodeEvent.LOST,
                DecodeEvent.HINDERED,
                DecodeEvent.RENEW,
            ),
            *(DecodeEvent.NOTIFY, DecodeEvent.FAILED, DecodeEvent.LAPSE, DecodeEvent.DIED),
        )
        for state in (DecodeState.ADMIT, DecodeState.QUEUE, DecodeState.LOCAL)
    },
    "its worker does not know the attempt yet": {
        DecodeState.ATTEMPT: (DecodeEvent.RENEW, DecodeEvent.NOTIFY, DecodeEvent.FAILED)
    },
    "the engine opens an attempt once": {
        state: (DecodeEvent.OPENED, DecodeEvent.HINDERED)
        for state in (DecodeState.FILL, DecodeState.VERIFY, DecodeState.ACTIVE)
    },
    "nothing was computed yet": {DecodeState.ADMIT: (DecodeEvent.FIRST,)},
    "the first token comes once, and ends lease and deadline": {
        DecodeState.ACTIVE: (
            DecodeEvent.FIRST,
            DecodeEvent.EXPIRE,
            DecodeEvent.LAPSE,
            DecodeEvent.LOST,
        )
    },
}

DECODE_TABLE: Final = StateTable(
    "decode worker",
    DecodeState,
    DecodeEvent,
    DecodeState.ADMIT,
    DecodeState.RELEASED,
    _DECODE_CELLS,
    _DECODE_IMPOSSIBLE,
)


# ---------------------------------------------------------------- prefill worker


class PrefillState(Enum):
    """State of a claim at its prefill worker."""

    CLAIMED = "claimed"
    """No link to the decode worker yet."""
    OPENING = "opening"
    """The decode worker was asked for an attempt."""
    COMPUTING = "computing"
    NOTIFYING = "notifying"
    """The prompt is computed; the decode worker has not acknowledged the handoff."""
    NOTIFIED = "notified"
    """The handoff is acknowledged; blocks are still being sent."""
    SENT = "sent"
    """All blocks have arrived; the decode worker has not acknowledged the handoff."""
    ENDED = "ended"
    """The claim has ended."""


class PrefillEvent(Enum):
    """Events of a claim."""

    LINKED = "linked"
    OPENED = "opened"
    """Decode worker: sends ticket and request."""
    REFUSED = "refused"
    """Decode worker: refuses the attempt."""
    UNREACHED = "unreached"
    """Decode worker: could not be reached."""
    PREFILLED = "prefilled"
    """Engine: the prompt is computed."""
    SENT = "sent"
    """Engine: all blocks have arrived."""
    ERROR = "error"
    """Engine: the prompt could not be computed, or its KV could not be sent."""
    TAKEN = "taken"
    """Decode worker: acknowledges the handoff."""
    NOT_TAKEN = "not taken"
    """Decode worker: the attempt of this handoff is over."""
    OVER = "over"
    """Decode worker: the attempt is over, in a renewal's reply or a withdrawal."""
    UNCLAIMED = "unclaimed"
    """Queue: the item was cancelled."""
    LAPSE = "lapse"
    """The lease ended without renewal."""
    DIED = "died"
    """The life of the decode worker is over."""
    FENCE = "fence"
    """This node closes, or begins a new life."""


class PrefillAction(Enum):
    """Actions at the prefill worker."""

    ASK = "ask"
    """Ask for an attempt."""
    PREFILL = "prefill"
    """Let the engine compute and send; renew the lease from now on."""
    NOTIFY = "notify"
    """Send the handoff until there is an answer."""
    ABORT = "abort"
    """Abort the prompt at the engine."""
    TELL = "tell"
    """Tell the decode worker that the attempt has failed."""
    END_DONE = "end: done"
    END_REFUSED = "end: refused"
    END_FAILED = "end: failed"
    END_CANCELLED = "end: cancelled"


_P, _E, _D = PrefillState, PrefillEvent, PrefillAction

_PREFILL_CELLS: Final[
    dict[PrefillState, dict[PrefillEvent, tuple[PrefillState, tuple[PrefillAction, ...]]]]
] = {
    _P.CLAIMED: {
        _E.LINKED: (_P.OPENING, (_D.ASK,)),
        _E.REFUSED: (_P.ENDED, (_D.END_REFUSED,)),
        _E.UNREACHED: (_P.ENDED, (_D.END_FAILED,)),
        _E.UNCLAIMED: (_P.ENDED, (_D.END_CANCELLED,)),
        _E.LAPSE: (_P.ENDED, (_D.END_FAILED,)),
        _E.DIED: (_P.ENDED, (_D.END_FAILED,)),
        _E.FENCE: (_P.ENDED, (_D.END_FAILED,)),
    },
    _P.OPENING: {
        _E.OPENED: (_P.COMPUTING, (_D.PREFILL,)),
        _E.REFUSED: (_P.ENDED, (_D.END_REFUSED,)),
        _E.UNREACHED: (_P.ENDED, (_D.END_FAILED,)),
        _E.UNCLAIMED: (_P.ENDED, (_D.END_CANCELLED,)),
        _E.LAPSE: (_P.ENDED, (_D.END_FAILED,)),
        _E.DIED: (_P.ENDED, (_D.END_FAILED,)),
        _E.FENCE: (_P.ENDED, (_D.END_FAILED,)),
    },
    _P.COMPUTING: {
        _E.PREFILLED: (_P.NOTIFYING, (_D.NOTIFY,)),
        _E.ERROR: (_P.ENDED, (_D.TELL, _D.END_FAILED)),
        _E.OVER: (_P.ENDED, (_D.ABORT, _D.END_CANCELLED)),
        _E.UNCLAIMED: (_P.COMPUTING, ()),
        _E.LAPSE: (_P.ENDED, (_D.ABORT, _D.TELL, _D.END_FAILED)),
        _E.DIED: (_P.ENDED, (_D.ABORT, _D.END_FAILED)),
        _E.FENCE: (_P.ENDED, (_D.ABORT, _D.END_FAILED)),
    },
    _P.NOTIFYING: {
        _E.SENT: (_P.SENT, ()),
        _E.TAKEN: (_P.NOTIFIED, ()),
        _E.NOT_TAKEN: (_P.ENDED, (_D.ABORT, _D.END_FAILED)),
        _E.ERROR: (_P.ENDED, (_D.TELL, _D.END_FAILED)),
        _E.OVER: (_P.ENDED, (_D.ABORT, _D.END_CANCELLED)),
        _E.UNCLAIMED: (_P.NOTIFYING, ()),
        _E.LAPSE: (_P.ENDED, (_D.ABORT, _D.TELL, _D.END_FAILED)),
        _E.DIED: (_P.ENDED, (_D.ABORT, _D.END_FAILED)),
        _E.FENCE: (_P.ENDED, (_D.ABORT, _D.END_FAILED)),
    },
    _P.NOTIFIED: {
        _E.SENT: (_P.ENDED, (_D.END_DONE,)),
        _E.ERROR: (_P.ENDED, (_D.TELL, _D.END_FAILED)),
        _E.OVER: (_P.ENDED, (_D.ABORT, _D.END_DONE)),
        _E.UNCLAIMED: (_P.NOTIFIED, ()),
        _E.LAPSE: (_P.ENDED, (_D.ABORT, _D.TELL, _D.END_FAILED)),
        _E.DIED: (_P.ENDED, (_D.ABORT, _D.END_FAILED)),
        _E.FENCE: (_P.ENDED, (_D.ABORT, _D.END_FAILED)),
    },
    _P.SENT: {
        _E.TAKEN: (_P.ENDED, (_D.END_DONE,)),
        _E.NOT_TAKEN: (_P.ENDED, (_D.END_FAILED,)),
        _E.OVER: (_P.ENDED, (_D.END_CANCELLED,)),
        _E.UNCLAIMED: (_P.SENT, ()),
        _E.LAPSE: (_P.ENDED, (_D.END_FAILED,)),
        _E.DIED: (_P.ENDED, (_D.END_FAILED,)),
        _E.FENCE: (_P.ENDED, (_D.END_FAILED,)),
    },
}

_OF_ENGINE: Final = (_E.PREFILLED, _E.SENT, _E.ERROR)
_OF_NOTIFY: Final = (_E.TAKEN, _E.NOT_TAKEN)
_OF_OPEN: Final = (_E.LINKED, _E.OPENED, _E.REFUSED, _E.UNREACHED)

_PREFILL_IMPOSSIBLE: Final[dict[str, dict[PrefillState, tuple[PrefillEvent, ...]]]] = {
    "it was not asked for an attempt": {_P.CLAIMED: (_E.OPENED,)},
    "it is linked": {_P.OPENING: (_E.LINKED,)},
    "there is no attempt yet": {
        state: (*_OF_ENGINE, *_OF_NOTIFY, _E.OVER) for state in (_P.CLAIMED, _P.OPENING)
    },
    "the attempt has been opened": {
        state: _OF_OPEN for state in (_P.COMPUTING, _P.NOTIFYING, _P.NOTIFIED, _P.SENT)
    },
    "the engine has not computed it yet": {_P.COMPUTING: (_E.SENT, *_OF_NOTIFY)},
    "the engine says so once": {
        _P.NOTIFYING: (_E.PREFILLED,),
        _P.NOTIFIED: (_E.PREFILLED,),
        _P.SENT: _OF_ENGINE,
    },
    "the decode worker has answered": {_P.NOTIFIED: _OF_NOTIFY},
}

PREFILL_TABLE: Final = StateTable(
    "prefill worker",
    PrefillState,
    PrefillEvent,
    PrefillState.CLAIMED,
    PrefillState.ENDED,
    _PREFILL_CELLS,
    _PREFILL_IMPOSSIBLE,
)


# ---------------------------------------------------------------- for people


def markdown() -> str:
    """Both tables in Markdown, as docs/disaggregation.md shows them."""
    return "\n".join(
        [*_section(DECODE_TABLE, DecodeState, DecodeEvent), "", *_section(PREFILL_TABLE, _P, _E)]
    )


def _section(table: StateTable[S, E, D], states: type[S], events: type[E]) -> Iterator[str]:
    yield f"At the {table.name}:"
    yield ""
    yield "| state | event | next | what is done |"
    yield "|---|---|---|---|"
    for state in states:
        for event in events:
            cell = table.cells.get((state, event))
            if cell is not None:
                done = ", ".join(action.value for action in cell.actions) or "–"
                following = "" if cell.next is state else cell.next.value
                yield f"| {state.value} | {event.value} | {following} | {done} |"

"""The handoff as two state machines, each one table: what happens when, and what is done.

    decode worker    admit ─▶ queue ─claim▶ attempt ─▶ fill ─notify▶ verify ─▶ active
                       ▲────── no blocks here ─┘
                       └────────┴───────────────▶ local ────────────────────────┘
    prefill worker   claimed ─▶ opening ─▶ computing ─▶ notifying ─▶ notified
                                                           └─▶ sent ────┘

The decode worker owns the request. Its machine ends with the request's last delta, and whatever
ends it earlier (cancel, expire, error) frees both workers. An attempt that comes to nothing leads
back to the queue, where `ENQUEUE` may find that there has been enough of it and answer `REFUSED`;
that is how every road ends in `active` or in a prefill at home.

Each pair of state and event stands in `CELLS`, or in `IMPOSSIBLE` with the reason: meeting one of
those is a bug. Words that name another claim or attempt than the present one never reach a cell of
their own: the fence (`fence`) has made them `STALE` before.

Pure: what the actions mean is `remote_prefill`'s and `prefill_job`'s; nobody is named here.
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
    """Of a request whose prompt is to be prefilled elsewhere, at its decode worker."""

    ADMIT = "admit"
    """The engine has no room for it yet."""
    QUEUE = "queue"
    """Room is set aside; no prefill worker has asked for its blocks."""
    ATTEMPT = "attempt"
    """One has; the engine makes a path and binds blocks."""
    FILL = "fill"
    """A prefill worker computes and sends, under a lease."""
    VERIFY = "verify"
    """The handoff is here; the engine waits for the last bytes and checks them."""
    LOCAL = "local"
    """It is prefilled here after all."""
    ACTIVE = "active"
    """Its first token has come."""
    RELEASED = "released"
    """Nothing is left of it."""


class DecodeEvent(Enum):
    """What happens to it."""

    ADMITTED = "admitted"
    """Engine: there is room."""
    REFUSED = "refused"
    """Queue: nobody will take it; or there is no sense in asking."""
    IMPATIENT = "impatient"
    """Nobody took it for longer than it was worth waiting for."""
    CLAIM = "claim"
    """A prefill worker holds a valid claim and asks for the blocks; nobody else has an attempt, or
    whoever has is dead or silent."""
    AGAIN = "again"
    """The attempt's own worker asks once more: the answer was lost."""
    STALE = "stale"
    """A claim or a word of an attempt that is not the present one."""
    OPENED = "opened"
    """Engine: the attempt's blocks may be filled."""
    LOST = "lost"
    """Engine: nothing came of the attempt."""
    HINDERED = "hindered"
    """Engine: it could not open the attempt, for a cause at this worker: its pool has no free
    blocks, or is not registered yet. It admits the request anew when it can."""
    RENEW = "renew"
    """The attempt's worker is still at it."""
    NOTIFY = "notify"
    """It hands over."""
    FAILED = "failed"
    """It gives up."""
    LAPSE = "lapse"
    """It was silent for as long as the lease lasts."""
    DIED = "died"
    """That life of it is over."""
    FIRST = "first token"
    """Engine: of whatever choice."""
    DONE = "done"
    """Engine: the last choice has ended."""
    ERROR = "error"
    """Engine: the request ended in an error."""
    EXPIRE = "expire"
    """The request's deadline has passed without a first token."""
    CANCEL = "cancel"
    """Its frontend wants nothing more, or is gone."""
    FENCE = "fence"
    """This node begins another life: claims and attempts of the old one are void."""


class DecodeAction(Enum):
    """What is done about it."""

    AWAIT = "await"
    """Wait for room again."""
    ENQUEUE = "enqueue"
    """Ask the prefill queue, or answer `REFUSED` if that is pointless."""
    UNQUEUE = "unqueue"
    """Take it out of the queue."""
    OPEN = "open"
    """Number an attempt, begin its lease, let the engine bind blocks."""
    JOIN = "join"
    """The caller waits for the ticket, too."""
    ANSWER = "answer"
    """Ticket and request to whoever waits for them."""
    DISMISS = "dismiss"
    """Those who wait for a ticket hear that there is none."""
    TURN_AWAY = "turn away"
    """The caller hears that it is not current."""
    ACCEPT = "accept"
    """The caller hears that it has been understood."""
    EXTEND = "extend"
    """The lease begins anew."""
    ACTIVATE = "activate"
    """The engine takes the handoff."""
    GIVE_UP = "give up"
    """The engine wants nothing more of the attempt; its blocks are fenced."""
    WITHDRAW = "withdraw"
    """Its worker is told, if it lives."""
    EXCLUDE = "exclude"
    """Its worker is not asked again for this request."""
    CLOSE = "close"
    """The attempt is over: nothing it says is current any more."""
    PREFILL_HERE = "prefill here"
    """The engine computes the prompt."""
    SETTLE = "settle"
    """Note where the prompt was prefilled, and what it took."""
    FREE = "free"
    """The engine drops the request."""
    FAIL = "fail"
    """Its frontend hears the error."""
    FORGET = "forget"
    """Timers and entries go."""


S = TypeVar("S", bound=Enum)
E = TypeVar("E", bound=Enum)
D = TypeVar("D", bound=Enum)


class TableCell(NamedTuple, Generic[S, D]):
    """What an event does in a state."""

    next: S
    actions: tuple[D, ...]
    """In this order. At most the last of them may bring about the next event."""


class StateTable(Generic[S, E, D]):
    """One machine's rules, complete by construction."""

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
        """`impossible`: by reason. Raises `ValueError` for a pair that is in both or in neither."""
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
        self.impossible |= {(end, event): "it is over and forgotten" for event in events}
        for pair in ((state, event) for state in states for event in events):
            if (pair in self.cells) == (pair in self.impossible):
                raise ValueError(f"{name}: {pair} must have one meaning")


class UndefinedTransition(AssertionError):
    """An event in a state where it cannot happen."""


class StateMachine(Generic[S, E, D]):
    """One request's state. Its owner performs what `feed` returns."""

    __slots__ = ("state", "table")

    strict: ClassVar[bool] = False
    """Raise where the table is undefined: for tests. Otherwise it is logged, and nothing done."""

    def __init__(self, table: StateTable[S, E, D]) -> None:
        self.table = table
        self.state: S = table.start

    def feed(self, event: E) -> tuple[D, ...]:
        """The state moves on; returns what is to be done. Raises `UndefinedTransition` where
        `strict`."""
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
"""An attempt that has come to nothing."""

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
    "nobody has asked the queue yet": {DecodeState.ADMIT: (DecodeEvent.REFUSED,)},
    "patience is for those who wait for a worker": {
        state: (DecodeEvent.IMPATIENT,)
        for state in (
            DecodeState.ATTEMPT,
            DecodeState.FILL,
            DecodeState.VERIFY,
            DecodeState.LOCAL,
            DecodeState.ACTIVE,
        )
    },
    "the fence lets nobody in who could claim it": {
        state: (DecodeEvent.CLAIM,)
        for state in (DecodeState.ADMIT, DecodeState.VERIFY, DecodeState.LOCAL, DecodeState.ACTIVE)
    },
    "no attempt is open, and words of others are stale": {
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
    """Of a claim, at its prefill worker."""

    CLAIMED = "claimed"
    """No link to the decode worker yet."""
    OPENING = "opening"
    """The decode worker was asked for an attempt."""
    COMPUTING = "computing"
    NOTIFYING = "notifying"
    """Computed; the decode worker has not said that it has the handoff."""
    NOTIFIED = "notified"
    """It has; the blocks are still being read."""
    SENT = "sent"
    """The blocks have arrived, and the decode worker has not answered."""
    ENDED = "ended"
    """Nothing is left of it."""


class PrefillEvent(Enum):
    """What happens to it."""

    LINKED = "linked"
    OPENED = "opened"
    """Decode worker: here are blocks and request."""
    REFUSED = "refused"
    """Decode worker: no."""
    UNREACHED = "unreached"
    """It did not answer."""
    PREFILLED = "prefilled"
    """Engine: all is computed."""
    SENT = "sent"
    """Engine: all has arrived."""
    ERROR = "error"
    """Engine: it could not be computed, or not be brought over."""
    TAKEN = "taken"
    """Decode worker: I have the handoff."""
    NOT_TAKEN = "not taken"
    """Decode worker: that attempt is over."""
    OVER = "over"
    """Decode worker, asked or not: that attempt is over."""
    UNCLAIMED = "unclaimed"
    """Queue: the item was cancelled."""
    LAPSE = "lapse"
    """The lease could not be renewed for as long as it lasts."""
    DIED = "died"
    """That life of the decode worker is over."""
    FENCE = "fence"
    """This node ends, or begins another life."""


class PrefillAction(Enum):
    """What is done about it."""

    ASK = "ask"
    """For an attempt."""
    PREFILL = "prefill"
    """The engine computes, the lease is renewed from now on."""
    NOTIFY = "notify"
    """Hand over, again and again until there is an answer."""
    ABORT = "abort"
    """The engine drops it."""
    TELL = "tell"
    """The decode worker hears that the attempt has failed."""
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
    """Both tables, as docs/disaggregation.md shows them."""
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

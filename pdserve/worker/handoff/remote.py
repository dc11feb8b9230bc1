"""One request whose prompt is prefilled elsewhere, from its admission to its last delta.

Everything that is heard of it becomes an event of the table, everything the table wants is done
here: through the engine port, the queue, and answers to prefill workers. It is the engine's sink
and the queue's listener for the request. Made by `decode`, which knows it while it lives.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final, NamedTuple

from msgspec.structs import replace

from pdserve.blocks.hashing import short_names
from pdserve.errors import DeadlineExceeded, PayloadTooLarge, TransferRefused
from pdserve.messages.handoff import Notify, Opened, PrefillItem, Taken
from pdserve.runtime.methods import OPEN_ATTEMPT
from pdserve.worker.handoff.fence import Fence, Holder
from pdserve.worker.handoff.overlap import tokens_of
from pdserve.worker.handoff.ports import Life
from pdserve.worker.handoff.source import Source
from pdserve.worker.handoff.table import DECODE, Do, Event, Machine, State

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.engine.api import Handle, TokenSink
    from pdserve.errors import PdserveError
    from pdserve.ids import Epoch, NodeId, Seconds
    from pdserve.messages.handoff import AttemptFailed, Handoff, OpenAttempt
    from pdserve.messages.request import GenerateRequest, Started, TokenDelta
    from pdserve.messages.transfer import Ticket
    from pdserve.net.base import Call
    from pdserve.net.timers import Timer
    from pdserve.worker.handoff.choice import Decision
    from pdserve.worker.handoff.decode import Decode
    from pdserve.worker.handoff.ports import PrefillQueue

__all__ = ["MOST_ATTEMPTS", "RemoteRequest"]

_log = logging.getLogger(__name__)

MOST_ATTEMPTS: Final = 3
"""Then the prompt is prefilled here: what fails this often may be the request's own doing."""

_LONGEST: Final[Seconds] = 60.0
"""An attempt may take so long, or"""
_SLOWEST: Final = 10.0
"""so many times as long as was predicted; then its engine is taken for stuck."""


class _Word(NamedTuple):
    """What comes with an event."""

    call: Call | None = None
    by: Life | None = None
    claim: int = 0
    why: str = ""
    handoff: Handoff | None = None
    ticket: Ticket | None = None
    error: PdserveError | None = None
    started: Started | None = None


_NOTHING: Final = _Word()

_OUTCOMES: Final = {
    Event.LOST: "lost",
    Event.FAILED: "failed",
    Event.LAPSE: "lapsed",
    Event.DIED: "died",
    Event.CLAIM: "superseded",
    Event.FIRST: "superseded",
    Event.FENCE: "fenced",
}
"""Of an attempt that this event closes; all others leave it `unwanted`."""


class RemoteRequest:
    """See above."""

    def __init__(
        self,
        owner: Decode,
        request: GenerateRequest,
        sink: TokenSink,
        decision: Decision,
        queue: PrefillQueue,
        before: int = 0,
    ) -> None:
        """`queue`: who is asked, that of prefill workers or a `Source`. `before`: prompt tokens
        that were still to come when it was decided."""
        self.handle: Handle = 0
        self.machine = Machine(DECODE)
        self.request = request
        self.fence = Fence()
        self._owner = owner
        self._sink = sink
        self._decision = decision
        self._queue = queue
        self._moves = isinstance(queue, Source)
        """It has run on the worker that is asked, and comes from nowhere else."""
        self._before = before
        self._reason = decision.reason
        """Why the prompt is prefilled where it is."""
        self._choices = len(request.live)
        """Those that have not ended."""
        self._early: list[Callable[[], None]] = []
        """What the engine said before its handle was known."""
        now = owner.node.now()
        self._deadline = None if request.deadline is None else now + request.deadline
        self._expiry: Timer | None = None
        if request.deadline is not None:
            self._expiry = owner.node.timers.call_later(max(0.0, request.deadline), self._expired)
        self._watch: Timer | None = None
        """Of the present state: patience, or the lease."""
        self._cached = 0
        self._rounds = 0
        self._excluded = owner.cut_off()
        self._callers: list[Call] = []
        """Who waits for the present attempt's ticket."""
        self._ticket: Ticket | None = None
        self._brought: tuple[Life, Handoff] | None = None
        """The last handoff that the engine was given, and from whom."""
        self._since = now
        """When the present phase began."""
        self._claimed = now
        self._line = ""

    @property
    def state(self) -> State:
        return self.machine.state

    @property
    def coming(self) -> int:
        """Prompt tokens that are still to come."""
        return tokens_of(self.request) - self._cached if self.state in _REMOTE else 0

    @property
    def late(self) -> float:
        """How many times as long as predicted its attempt has taken already; 1: it is not late."""
        if self.state not in (State.FILL, State.VERIFY) or not self._decision.fill:
            return 1.0
        return max(1.0, (self._owner.node.now() - self._claimed) / self._decision.fill)

    def __repr__(self) -> str:
        return f"<{self.request.request_id} {self.handle} {self.state.value}>"

    def begin(self, handle: Handle) -> None:
        """The engine has taken it under this number."""
        self.handle = handle
        self._be_patient()
        early, self._early = self._early, []
        for heard in early:
            heard()

    def discard(self) -> None:
        """The engine has not taken it."""
        self._unwatch()
        if self._expiry is not None:
            self._expiry.cancel()

    def feed(self, event: Event, word: _Word = _NOTHING) -> None:
        """An event happens to it."""
        before = self.state
        actions = self.machine.feed(event)
        if self.state is not before or event is Event.CLAIM:
            self._unwatch()
        for action in actions:
            _PERFORM[action](self, event, word)

    # ------------------------------------------------------------------ from the engine

    def on_admitted(self, cached_tokens: int) -> None:
        """See `engine.api.RemoteSink`."""
        if not self.handle:
            self._early.append(lambda: self.on_admitted(cached_tokens))
            return
        self._cached = cached_tokens
        self._owner.tally.phase("admit", self._owner.node.now() - self._since)
        self.feed(Event.ADMITTED)

    def on_opened(self, attempt: int, ticket: Ticket) -> None:
        """See `engine.api.RemoteSink`."""
        if self._is_open(attempt) and self.state is State.ATTEMPT:
            self._phase("open")
            self.feed(Event.OPENED, _Word(ticket=ticket))

    def on_attempt_lost(self, attempt: int, error: PdserveError) -> None:
        """See `engine.api.RemoteSink`."""
        if self._is_open(attempt) and self.state is not State.ACTIVE:
            _log.warning("%s: attempt %d: %s", self._name, attempt, error.message)
            self.feed(Event.LOST, _Word(error=error))

    def on_delta(self, delta: TokenDelta) -> None:
        """See `engine.api.TokenSink`."""
        started = delta.started
        if started is not None:
            if self.state is not State.ACTIVE:
                self.feed(Event.FIRST, _Word(started=started))
            delta = replace(delta, started=replace(started, prefill=self._line))
        if delta.finish is not None:
            self._choices -= 1
            if not self._choices:
                self.feed(Event.DONE)
        self._sink.on_delta(delta)

    def on_error(self, error: PdserveError) -> None:
        """See `engine.api.TokenSink`."""
        if not self.handle:
            self._early.append(lambda: self.on_error(error))
            return
        self.feed(Event.ERROR, _Word(error=error))

    def _is_open(self, attempt: int) -> bool:
        """Not one that was given up while the engine spoke."""
        holder = self.fence.holder
        return holder is not None and holder.attempt == attempt

    # ------------------------------------------------------------------ from the queue

    def on_owner(self, owner: NodeId, epoch: Epoch, round: int) -> None:
        """See `ports.QueueListener`."""
        self._rounds = round + 1
        self.fence.queued(Life(owner, epoch), round)

    def on_queued(self, owner: NodeId, epoch: Epoch) -> None:
        """See `ports.QueueListener`: it changes nothing, patience runs since the request came."""

    def on_refused(self, reason: str) -> None:
        """See `ports.QueueListener`."""
        if self.state is State.QUEUE:
            self._reason = reason
        self.feed(Event.REFUSED)

    # ------------------------------------------------------------------ from prefill workers

    def asked(self, question: OpenAttempt, by: Life, call: Call) -> None:
        """For an attempt."""
        holder = self.fence.holder
        alive = holder is not None and self._owner.lives(holder.life)
        now = self._owner.node.now()
        event, why = self.fence.claim(question, by, self.state, now, alive=alive)
        self.feed(event, _Word(call=call, by=by, claim=question.claim, why=why))

    def renewed(self, attempt: int, by: Life) -> bool:
        """False: it is over."""
        current = self.fence.current(attempt, by) and self.state is not State.ATTEMPT
        if current:
            self.feed(Event.RENEW)
        return current

    def told(self, event: Event, words: Notify | AttemptFailed, by: Life, call: Call) -> None:
        """`NOTIFY`, or `FAILED`."""
        handoff = None
        if not self.fence.current(words.attempt, by) or self.state is State.ATTEMPT:
            event = Event.STALE
        elif isinstance(words, Notify):
            handoff = words.handoff
        else:
            _log.warning("%s: %s says: %s: %s", self._name, by.node, words.kind, words.message)
        self.feed(event, _Word(call=call, by=by, handoff=handoff))

    def held_by(self, life: Life) -> bool:
        """The present attempt is theirs."""
        holder = self.fence.holder
        return holder is not None and holder.life == life

    # ------------------------------------------------------------------ from time

    def _expired(self) -> None:
        stage = _STAGES.get(self.state, self.state.value)
        self.feed(Event.EXPIRE, _Word(error=DeadlineExceeded(f"the deadline passed {stage}")))

    def _impatient(self) -> None:
        self._reason = "no_room" if self.state is State.ADMIT else "unclaimed"
        self.feed(Event.IMPATIENT)

    def _lapse(self) -> None:
        """The lease has ended, unless it was renewed since the timer was set."""
        holder = self.fence.holder
        if holder is not None and self._owner.node.now() < holder.lapses:
            self._watch_lease()
        else:
            self.feed(Event.LAPSE)

    def _unwatch(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None

    def _watch_lease(self) -> None:
        holder = self._holder
        self._watch = self._owner.node.timers.call_at(holder.lapses, self._lapse)

    def _be_patient(self) -> None:
        """With the engine's admission, or with the queue."""
        patience = self._owner.chooser.patience(self._decision, self._rest())
        self._watch = self._owner.node.timers.call_later(patience, self._impatient)

    def _rest(self) -> Seconds | None:
        """Until the deadline."""
        return None if self._deadline is None else self._deadline - self._owner.node.now()

    def _phase(self, name: str) -> None:
        """One is over, the next begins."""
        now = self._owner.node.now()
        self._owner.tally.phase(name, now - self._since)
        self._since = now

    # ------------------------------------------------------------------ what is done

    @property
    def _holder(self) -> Holder:
        """Of the attempt that is open."""
        assert self.fence.holder is not None
        return self.fence.holder

    @property
    def _name(self) -> str:
        return f"request {self.request.request_id} ({self.handle})"

    def _enqueue(self, event: Event, word: _Word) -> None:
        self._since = self._owner.node.now()
        pointless = self._pointless()
        if pointless:
            self.on_refused(pointless)
            return
        if self.fence.attempts:
            self._decision = self._owner.decide(self.request, self._cached)
        self._be_patient()
        self._queue.enqueue(self._item(), self)

    def _pointless(self) -> str:
        """Why there is no sense in asking the queue, one word; empty: there is."""
        if self._moves:
            return "source_failed" if self.fence.attempts else ""
        if self.fence.attempts >= MOST_ATTEMPTS:
            return "attempts_failed"
        rest = self._rest()
        if self.fence.attempts and rest is not None and rest < 2 * self._decision.there:
            return "no_time"
        if self._owner.chooser.mode == "never":
            return "never"
        if self._excluded and not self._owner.others_prefill(self.request.model, self._excluded):
            return "no_prefill_worker"
        return ""

    def _item(self) -> PrefillItem:
        request, owner = self.request, self._owner
        card = owner.worker.cards()[request.model]
        return PrefillItem(
            request=self.handle,
            round=self._rounds,
            model=card.name,
            compat_hash=card.compat_hash,
            prompt_tokens=tokens_of(request),
            cached_tokens=self._cached,
            names=short_names(request.block_names),
            names_id=request.names_id,
            block_size=card.block_size,
            priority=request.priority,
            deadline=self._rest(),
            excluded=tuple(self._excluded),
        )

    def _unqueue(self, event: Event, word: _Word) -> None:
        self.fence.unqueued()
        self._queue.cancel(self.handle)

    def _open(self, event: Event, word: _Word) -> None:
        assert word.by is not None
        assert word.call is not None
        node = self._owner.node
        if self.fence.attempts:
            self._since = node.now()
        else:
            self._phase("queue")
        self._claimed = node.now()
        self._queue.opened(self.handle)
        most = max(_LONGEST, _SLOWEST * self._decision.there)
        holder = self.fence.open(word.by, word.claim, node.now(), most)
        self._callers.append(word.call)
        self._watch_lease()
        self._owner.worker.open_attempt(self.handle, holder.attempt, *word.by)

    def _join(self, event: Event, word: _Word) -> None:
        assert word.call is not None
        self._callers.append(word.call)

    def _answer(self, event: Event, word: _Word) -> None:
        holder, self._ticket = self._holder, word.ticket or self._ticket
        assert self._ticket is not None
        if event is Event.OPENED:
            self._watch_lease()
        request = replace(self.request, deadline=self._rest())
        opened = Opened(attempt=holder.attempt, ticket=self._ticket, request=request)
        callers, self._callers = self._callers, []
        for call in callers:
            try:
                call.reply(opened)
            except PayloadTooLarge as error:  # its worker gives up, and then the lease ends
                _log.error("%s: %s", self._name, error.message)
                call.fail(error)

    def _dismiss(self, event: Event, word: _Word) -> None:
        callers, self._callers = self._callers, []
        why = word.error.message if word.error else f"the request is not to be had ({event.value})"
        for call in callers:
            call.fail(self._refusal(call, why))

    def _turn_away(self, event: Event, word: _Word) -> None:
        call = word.call
        assert call is not None
        if call.method == OPEN_ATTEMPT.id:
            call.fail(self._refusal(call, word.why))
        else:
            call.reply(Taken(current=False))

    def _refusal(self, call: Call, why: str) -> TransferRefused:
        return TransferRefused.at(self._name, call.link.peer.node, "opening an attempt", why)

    def _accept(self, event: Event, word: _Word) -> None:
        assert word.call is not None
        word.call.reply(Taken())

    def _extend(self, event: Event, word: _Word) -> None:
        holder = self._holder
        holder.renewed = self._owner.node.now()
        if event is Event.NOTIFY:
            self._watch_lease()

    def _activate(self, event: Event, word: _Word) -> None:
        holder = self._holder
        assert word.handoff is not None
        self._phase("fill")
        self._brought = holder.life, word.handoff
        self._owner.worker.activate(self.handle, holder.attempt, word.handoff)

    def _give_up(self, event: Event, word: _Word) -> None:
        self._owner.worker.give_up(self.handle, self._holder.attempt)

    def _withdraw(self, event: Event, word: _Word) -> None:
        holder = self._holder
        self._owner.withdraw(holder.life, self.handle, holder.attempt, event.value)

    def _exclude(self, event: Event, word: _Word) -> None:
        holder = self._holder
        self._excluded.append(holder.life.node)
        _log.info(
            "%s: attempt %d of %s came to nothing: %s",
            self._name,
            holder.attempt,
            holder.life.node,
            event.value,
        )

    def _close(self, event: Event, word: _Word) -> None:
        self.fence.close()
        if event is not Event.CLAIM:
            self.fence.unqueued()
        self._ticket = None
        self._owner.tally.attempt(_OUTCOMES.get(event, "unwanted"))

    def _prefill_here(self, event: Event, word: _Word) -> None:
        if event is Event.FENCE:
            self._reason = "own_rejoin"
        self.fence.unqueued()
        self._owner.tally.decided(remote=False, reason=self._reason)
        _log.info("%s is prefilled here: %s", self._name, self._reason)
        self._owner.worker.prefill_here(self.handle)

    def _settle(self, event: Event, word: _Word) -> None:
        """The engine alone knows whose work it goes on with: it may have been quicker than us."""
        started, brought = word.started, self._brought
        assert started is not None
        if self._expiry is not None:
            self._expiry.cancel()
        if started.received_tokens and brought is not None:
            life, handoff = brought
            self._phase("activate")
            how = "moved" if self._moves else "remote"
            self._line = f"{how}; node={life.node}; reason={self._decision.reason}"
            self._owner.tally.decided(remote=True, reason=self._decision.reason)
            if self.fence.holder is not None:
                self._owner.tally.attempt("done")
            if not self._moves:  # nothing was prefilled there
                self._learn(handoff, started)
            return
        self._line = f"local; node={self._owner.node.id}; reason={self._reason}"
        self._owner.learn_local(self.request, started)

    def _learn(self, handoff: Handoff, started: Started) -> None:
        there = handoff.started
        self._owner.chooser.learnt.remote(
            handoff.tokens,
            handoff.cached_tokens,
            started.received_tokens + self._before,
            there.queue_seconds + there.prefill_seconds,
            self._owner.node.now() - self._claimed,
        )

    def _free(self, event: Event, word: _Word) -> None:
        self._owner.worker.abort(self.handle)

    def _fail(self, event: Event, word: _Word) -> None:
        assert word.error is not None
        self._sink.on_error(word.error)

    def _forget(self, event: Event, word: _Word) -> None:
        self._unwatch()
        if self._expiry is not None:
            self._expiry.cancel()
        self._owner.forget(self)


_REMOTE: Final = (State.ADMIT, State.QUEUE, State.ATTEMPT, State.FILL, State.VERIFY)
_STAGES: Final = {
    State.ADMIT: "while the request waited for room for its KV",
    State.QUEUE: "while the request waited for a prefill worker",
    State.ATTEMPT: "while a path to a prefill worker was made",
    State.FILL: "during prefill on another worker",
    State.VERIFY: "while KV was on its way",
    State.LOCAL: "during prefill",
}

_PERFORM: Final[dict[Do, Callable[[RemoteRequest, Event, _Word], None]]] = {
    Do.ENQUEUE: RemoteRequest._enqueue,
    Do.UNQUEUE: RemoteRequest._unqueue,
    Do.OPEN: RemoteRequest._open,
    Do.JOIN: RemoteRequest._join,
    Do.ANSWER: RemoteRequest._answer,
    Do.DISMISS: RemoteRequest._dismiss,
    Do.TURN_AWAY: RemoteRequest._turn_away,
    Do.ACCEPT: RemoteRequest._accept,
    Do.EXTEND: RemoteRequest._extend,
    Do.ACTIVATE: RemoteRequest._activate,
    Do.GIVE_UP: RemoteRequest._give_up,
    Do.WITHDRAW: RemoteRequest._withdraw,
    Do.EXCLUDE: RemoteRequest._exclude,
    Do.CLOSE: RemoteRequest._close,
    Do.PREFILL_HERE: RemoteRequest._prefill_here,
    Do.SETTLE: RemoteRequest._settle,
    Do.FREE: RemoteRequest._free,
    Do.FAIL: RemoteRequest._fail,
    Do.FORGET: RemoteRequest._forget,
}

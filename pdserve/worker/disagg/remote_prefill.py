"""Runs one request whose prompt another worker prefills, from admission to its last delta.

It turns every message and callback into events of the state table, and performs the table's actions
through the engine port, the queue and replies to prefill workers. It is the request's engine sink
and queue listener. `decode_handler` creates it and owns it while it lives.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final, NamedTuple

from msgspec.structs import replace

from pdserve.blocks.hashing import short_hashes
from pdserve.errors import (
    DeadlineExceeded,
    NotReady,
    Overloaded,
    PayloadTooLarge,
    TransferRefused,
)
from pdserve.ids import NodeLife
from pdserve.messages.handoff import AttemptAck, AttemptOpened, NotifyHandoff, PrefillItem
from pdserve.messages.request import MAX_WORKER_PHASES, WorkerPhase
from pdserve.observe.logs import about
from pdserve.runtime.rpc_methods import OPEN_ATTEMPT
from pdserve.worker.disagg.fence import Fence, Holder
from pdserve.worker.disagg.kv_fetch import KvFetcher
from pdserve.worker.disagg.overlap import tokens_of
from pdserve.worker.disagg.policy import patience
from pdserve.worker.disagg.state_table import (
    DECODE_TABLE,
    DecodeAction,
    DecodeEvent,
    DecodeState,
    StateMachine,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.engine.port import Handle, TokenSink
    from pdserve.errors import PdserveError
    from pdserve.ids import Epoch, NodeId, Seconds
    from pdserve.messages.handoff import AttemptFailed, Handoff, OpenAttempt
    from pdserve.messages.request import FirstTokenStats, GenerateRequest, TokenDelta
    from pdserve.messages.transfer import TransferTicket
    from pdserve.net.base import IncomingCall
    from pdserve.net.timers import Timer
    from pdserve.worker.disagg.decode_handler import DecodeHandler
    from pdserve.worker.disagg.policy import DisaggDecision
    from pdserve.worker.disagg.ports import PrefillQueuePort

__all__ = ["MAX_PREFILL_ATTEMPTS", "RemotePrefillRequest"]

_log = logging.getLogger(__name__)

MAX_PREFILL_ATTEMPTS: Final = 3
"""After this many failed attempts the prompt is prefilled here: the request itself may be the
cause."""

_LONGEST: Final[Seconds] = 60.0
"""Seconds that an attempt may make no progress, at least."""
_SLOWEST: Final = 10.0
"""The limit without progress is this many times the predicted time, if that is longer; beyond it
the prefill worker's engine counts as stuck."""
_STUCK: Final[Seconds] = 120.0
"""Seconds without progress from which on it counts as stuck whatever was predicted: an attempt that
hung teaches the prediction its own length, so each further one would wait ten times longer."""


class _Word(NamedTuple):
    """The data of an event."""

    call: IncomingCall | None = None
    by: NodeLife | None = None
    claim: int = 0
    why: str = ""
    handoff: Handoff | None = None
    ticket: TransferTicket | None = None
    error: PdserveError | None = None
    started: FirstTokenStats | None = None


_NOTHING: Final = _Word()

_OURS: Final = (Overloaded, NotReady)
"""Errors for which this worker, not the prefill worker, is responsible: its pool has no free
blocks, or is not registered yet."""

_OUTCOMES: Final = {
    DecodeEvent.LOST: "lost",
    DecodeEvent.HINDERED: "hindered",
    DecodeEvent.FAILED: "failed",
    DecodeEvent.LAPSE: "lapsed",
    DecodeEvent.DIED: "died",
    DecodeEvent.CLAIM: "superseded",
    DecodeEvent.FIRST: "superseded",
    DecodeEvent.FENCE: "fenced",
}
"""Outcome of an attempt by the event that closes it; `unwanted` for all other events."""


class RemotePrefillRequest:
    """The state of one request. Implements `engine.port.RemotePrefillSink` and
    `ports.QueueListener`."""

    def __init__(
        self,
        owner: DecodeHandler,
        request: GenerateRequest,
        sink: TokenSink,
        decision: DisaggDecision,
        queue: PrefillQueuePort,
        before: int = 0,
    ) -> None:
        """`queue`: the prefill queue, or a `KvFetcher`. `before`: prompt tokens that other requests
        were still waiting for when this decision was made."""
        self.handle: Handle = 0
        self.machine = StateMachine(DECODE_TABLE)
        self.request = request
        self.fence = Fence()
        self._owner = owner
        self._sink = sink
        self._decision = decision
        self._queue = queue
        self._moves = isinstance(queue, KvFetcher)
        """True if the request ran on the worker that is asked, so that only this worker can have
        its KV."""
        self._before = before
        self._reason = decision.reason
        """The reason, in one word, for where the prompt is prefilled."""
        self._choices = len(request.live)
        """Number of choices that have not ended."""
        self._early: list[Callable[[], None]] = []
        """Engine callbacks that came before the handle was known."""
        now = owner.node.now()
        self._deadline = None if request.deadline is None else now + request.deadline
        self._expiry: Timer | None = None
        if request.deadline is not None:
            self._expiry = owner.node.timers.call_later(max(0.0, request.deadline), self._expired)
        self._watch: Timer | None = None
        """The timer of the present state: patience or lease."""
        self._cached = 0
        self._rounds = 0
        self._failed = 0
        """Failed attempts, not counting those that found no free blocks here."""
        self._hindered: Seconds | None = None
        """Time when the engine here first could not open an attempt."""
        self._excluded = owner.cut_off()
        self._callers: list[IncomingCall] = []
        """Calls that wait for the open attempt's ticket."""
        self._ticket: TransferTicket | None = None
        self._brought: tuple[NodeLife, Handoff] | None = None
        """The last handoff given to the engine, and the worker that sent it."""
        self._since = now
        """Time when the present phase began."""
        self._claimed = now
        self._line = ""
        self._began = now
        self._reports: list[WorkerPhase] = []
        """Phases for the frontend, if the request asks for them."""

    @property
    def state(self) -> DecodeState:
        return self.machine.state

    @property
    def coming(self) -> int:
        """Prompt tokens that the prefill worker has still to deliver."""
        return tokens_of(self.request) - self._cached if self.state in _REMOTE else 0

    @property
    def queued(self) -> bool:
        """True if a prefill worker computes its prompt, or may be asked to."""
        return not self._moves and self.state in _REMOTE

    @property
    def late(self) -> float:
        """Ratio of actual to predicted time of the open attempt; 1 if it is not late."""
        if self.state not in (DecodeState.FILL, DecodeState.VERIFY) or not self._decision.fill:
            return 1.0
        return max(1.0, (self._owner.node.now() - self._claimed) / self._decision.fill)

    def __repr__(self) -> str:
        return f"<{self.request.request_id} {self.handle} {self.state.value}>"

    def begin(self, handle: Handle) -> None:
        """Records the engine's handle and starts to wait for admission."""
        self.handle = handle
        self._be_patient()
        early, self._early = self._early, []
        for heard in early:
            heard()

    def discard(self) -> None:
        """Cancels the timers: the engine refused the submission."""
        self._unwatch()
        if self._expiry is not None:
            self._expiry.cancel()

    def feed(self, event: DecodeEvent, word: _Word = _NOTHING) -> None:
        """Feeds an event to the state table and performs the resulting actions."""
        before = self.state
        actions = self.machine.feed(event)
        if self.state is not before or event is DecodeEvent.CLAIM:
            self._unwatch()
        for action in actions:
            _PERFORM[action](self, event, word)

    # ------------------------------------------------------------------ from the engine

    def on_admitted(self, cached_tokens: int) -> None:
        """Enqueues the prompt: its KV blocks are reserved."""
        if not self.handle:
            self._early.append(lambda: self.on_admitted(cached_tokens))
            return
        if self.state in (DecodeState.QUEUE, DecodeState.ATTEMPT):
            return  # said again after an attempt without blocks that had been given up meanwhile
        self._cached = cached_tokens
        self._owner.tally.phase("admit", self._owner.node.now() - self._since)
        self.feed(DecodeEvent.ADMITTED)

    def on_opened(self, attempt: int, ticket: TransferTicket) -> None:
        """Sends the ticket to the prefill worker; ignored if the attempt is no longer open."""
        if self._is_open(attempt) and self.state is DecodeState.ATTEMPT:
            self._phase("open")
            self.feed(DecodeEvent.OPENED, _Word(ticket=ticket))

    def on_attempt_lost(self, attempt: int, error: PdserveError) -> None:
        """Ends the open attempt, and waits for blocks or tries the next worker; ignored if the
        attempt is no longer open."""
        if self._is_open(attempt) and self.state is not DecodeState.ACTIVE:
            _log.warning("attempt %d: %s", attempt, error.message, extra=self._about)
            ours = isinstance(error, _OURS) and self.state is DecodeState.ATTEMPT
            self.feed(DecodeEvent.HINDERED if ours else DecodeEvent.LOST, _Word(error=error))

    def on_delta(self, delta: TokenDelta) -> None:
        """Passes the delta on; the first token ends the open attempt, the last `finish` ends the
        request."""
        started = delta.started
        if started is not None:
            if self.state is not DecodeState.ACTIVE:
                self.feed(DecodeEvent.FIRST, _Word(started=started))
            phases = (*self._reports, *started.phases)
            started = replace(started, prefill=self._line, phases=phases)
            delta = replace(delta, started=self._with_cached_there(started))
        if delta.finish is not None:
            self._choices -= 1
            if not self._choices:
                self.feed(DecodeEvent.DONE)
        self._sink.on_delta(delta)

    def on_error(self, error: PdserveError) -> None:
        """Ends the request with the engine's error."""
        if not self.handle:
            self._early.append(lambda: self.on_error(error))
            return
        self.feed(DecodeEvent.ERROR, _Word(error=error))

    def _is_open(self, attempt: int) -> bool:
        """True if this is the open attempt and not one given up before the engine reported."""
        holder = self.fence.holder
        return holder is not None and holder.attempt == attempt

    # ------------------------------------------------------------------ from the queue

    def on_owner(self, owner: NodeId, epoch: Epoch, round: int) -> None:
        """Sets the fence: only claims of this router life and round are valid from now on."""
        self._rounds = round + 1
        self.fence.queued(NodeLife(owner, epoch), round)

    def on_queued(self, owner: NodeId, epoch: Epoch) -> None:
        """Does nothing: the waiting time counts from `enqueue`."""

    def on_refused(self, reason: str) -> None:
        """Prefills the prompt here if it was still queued; otherwise the refusal has no effect."""
        if self.state is DecodeState.QUEUE:
            self._reason = reason
        self.feed(DecodeEvent.REFUSED)

    # ------------------------------------------------------------------ from prefill workers

    def claimed_in_vain(self, reason: str) -> None:
        """Prefills the prompt here: a worker that cannot prefill it has the item, and the queue
        gives it to no other one."""
        if self.state is DecodeState.QUEUE:
            self._reason = reason
            self.feed(DecodeEvent.IMPATIENT)

    def asked(self, message: OpenAttempt, by: NodeLife, call: IncomingCall) -> None:
        """Handles a prefill worker's request for an attempt."""
        holder = self.fence.holder
        alive = holder is not None and self._owner.lives(holder.life)
        now = self._owner.node.now()
        event, why = self.fence.claim(message, by, self.state, now, alive=alive)
        self.feed(event, _Word(call=call, by=by, claim=message.claim, why=why))

    def renewed(self, attempt: int, by: NodeLife, progress: int = 0) -> bool:
        """Renews the lease; returns False if the attempt is over. `progress`: see `RenewLeases`."""
        current = self.fence.current(attempt, by) and self.state is not DecodeState.ATTEMPT
        if current:
            self._holder.note(progress, self._owner.node.now())
            self.feed(DecodeEvent.RENEW)
        return current

    def told(
        self,
        event: DecodeEvent,
        words: NotifyHandoff | AttemptFailed,
        by: NodeLife,
        call: IncomingCall,
    ) -> None:
        """Handles a handoff (`NOTIFY`) or a reported failure (`FAILED`) of a prefill worker."""
        handoff = None
        if not self.fence.current(words.attempt, by) or self.state is DecodeState.ATTEMPT:
            event = DecodeEvent.STALE
        elif isinstance(words, NotifyHandoff):
            handoff = words.handoff
        else:
            _log.warning("%s says: %s: %s", by.node, words.kind, words.message, extra=self._about)
        self.feed(event, _Word(call=call, by=by, handoff=handoff))

    def held_by(self, life: NodeLife) -> bool:
        """True if this node life holds the open attempt."""
        holder = self.fence.holder
        return holder is not None and holder.life == life

    # ------------------------------------------------------------------ from time

    def _expired(self) -> None:
        stage = _STAGES.get(self.state, self.state.value)
        self.feed(DecodeEvent.EXPIRE, _Word(error=DeadlineExceeded(f"the deadline passed {stage}")))

    def _impatient(self) -> None:
        self._reason = "no_room" if self.state is DecodeState.ADMIT else "unclaimed"
        self.feed(DecodeEvent.IMPATIENT)

    def _lapse(self) -> None:
        """Ends the attempt, unless the lease was renewed after the timer was set."""
        holder = self.fence.holder
        now = self._owner.node.now()
        if holder is not None and now < holder.lapses:
            self._watch_lease()
            return
        if holder is not None and now >= holder.latest and not self._moves:
            self._owner.chooser.learnt.overdue(tokens_of(self.request), now - self._claimed)
        self.feed(DecodeEvent.LAPSE)

    def _unwatch(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None

    def _watch_lease(self) -> None:
        holder = self._holder
        self._watch = self._owner.node.timers.call_at(holder.lapses, self._lapse)

    def _be_patient(self) -> None:
        """Starts the timer that bounds the wait for admission, or for a prefill worker."""
        patience = self._owner.chooser.patience(self._decision, self._rest())
        self._watch = self._owner.node.timers.call_later(patience, self._impatient)

    def _rest(self) -> Seconds | None:
        """Seconds until the deadline; None if there is none."""
        return None if self._deadline is None else self._deadline - self._owner.node.now()

    def _phase(self, name: str) -> None:
        """Records the duration of a phase; the next one begins."""
        now = self._owner.node.now()
        self._owner.tally.phase(name, now - self._since)
        if self.request.trace:
            self._report(name, now)
        self._since = now

    def _report(self, name: str, now: Seconds) -> None:
        if len(self._reports) >= MAX_WORKER_PHASES:
            return
        holder = self.fence.holder
        node = "" if holder is None else holder.life.node
        self._reports.append(
            WorkerPhase(
                f"handoff_{name}",
                max(0.0, self._since - self._began),
                now - self._began,
                tokens_of(self.request) - self._cached if name == "fill" else 0,
                node,
                self._backend(node) if name == "fill" else "",
                self.fence.attempts,
            )
        )

    def _backend(self, node: str) -> str:
        """What moves KV from that worker."""
        paths = self._owner.engine.paths()
        return next((path.backend for path in paths if path.node == node and not path.down), "")

    # ------------------------------------------------------------------ what is done

    @property
    def _holder(self) -> Holder:
        """The holder of the open attempt."""
        assert self.fence.holder is not None
        return self.fence.holder

    @property
    def _about(self) -> dict[str, object]:
        return about(self.request, handle=self.handle)

    @property
    def _name(self) -> str:
        return f"request {self.request.request_id} ({self.handle})"

    def _await(self, event: DecodeEvent, word: _Word) -> None:
        """Waits for blocks. Prefilling here would wait for the same blocks, so the limit is that of
        `always`, counted from the first time."""
        now = self._since = self._owner.node.now()
        if self._hindered is None:
            self._hindered = now
        whole = patience(0.0, self._rest(), always=True)
        left = max(0.0, self._hindered + whole - now)
        self._watch = self._owner.node.timers.call_later(left, self._impatient)

    def _enqueue(self, event: DecodeEvent, word: _Word) -> None:
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
        """The reason, in one word, not to enqueue; empty if there is none."""
        if self._moves:
            return "source_failed" if self._failed else ""
        if self._failed >= MAX_PREFILL_ATTEMPTS:
            return "attempts_failed"
        rest = self._rest()
        if self.fence.attempts and rest is not None and rest < 2 * self._decision.there:
            return "no_time"
        if self._owner.chooser.mode == "never":
            return "never"
        if self._excluded and not self._owner.others_prefill(self.request, self._excluded):
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
            names=short_hashes(request.block_names),
            names_id=request.names_id,
            block_size=card.block_size,
            priority=request.priority,
            deadline=self._rest(),
            excluded=(*self._excluded, *owner.lacking(request.lora)),
            # KV that moves has nothing to do with the mode.
            generation=0 if self._moves else owner.generation,
        )

    def _unqueue(self, event: DecodeEvent, word: _Word) -> None:
        self.fence.unqueued()
        self._queue.cancel(self.handle)

    def _open(self, event: DecodeEvent, word: _Word) -> None:
        assert word.by is not None
        assert word.call is not None
        node = self._owner.node
        if self.fence.attempts:
            self._since = node.now()
        else:
            self._phase("queue")
        self._claimed = node.now()
        self._queue.opened(self.handle)
        most = min(_STUCK, max(_LONGEST, _SLOWEST * self._decision.there))
        holder = self.fence.open(word.by, word.claim, node.now(), most)
        self._callers.append(word.call)
        self._watch_lease()
        self._owner.engine.open_attempt(self.handle, holder.attempt, *word.by)

    def _join(self, event: DecodeEvent, word: _Word) -> None:
        assert word.call is not None
        self._callers.append(word.call)

    def _answer(self, event: DecodeEvent, word: _Word) -> None:
        holder, self._ticket = self._holder, word.ticket or self._ticket
        assert self._ticket is not None
        if event is DecodeEvent.OPENED:
            self._watch_lease()
        request = replace(self.request, deadline=self._rest(), trace=False)
        opened = AttemptOpened(attempt=holder.attempt, ticket=self._ticket, request=request)
        callers, self._callers = self._callers, []
        for call in callers:
            try:
                call.reply(opened)
            except PayloadTooLarge as error:  # its worker gives up, and then the lease ends
                _log.error("%s", error.message, extra=self._about)
                call.fail(error)

    def _dismiss(self, event: DecodeEvent, word: _Word) -> None:
        callers, self._callers = self._callers, []
        why = word.error.message if word.error else f"the attempt has ended ({event.value})"
        for call in callers:
            call.fail(self._refusal(call, why))

    def _turn_away(self, event: DecodeEvent, word: _Word) -> None:
        call = word.call
        assert call is not None
        if call.method == OPEN_ATTEMPT.id:
            call.fail(self._refusal(call, word.why))
        else:
            call.reply(AttemptAck(current=False))

    def _refusal(self, call: IncomingCall, why: str) -> TransferRefused:
        return TransferRefused.at(self._name, call.life.node, "opening an attempt", why)

    def _accept(self, event: DecodeEvent, word: _Word) -> None:
        assert word.call is not None
        word.call.reply(AttemptAck())

    def _extend(self, event: DecodeEvent, word: _Word) -> None:
        holder = self._holder
        holder.renewed = self._owner.node.now()
        if event is DecodeEvent.NOTIFY:
            self._watch_lease()

    def _activate(self, event: DecodeEvent, word: _Word) -> None:
        holder = self._holder
        assert word.handoff is not None
        self._phase("fill")
        self._brought = holder.life, word.handoff
        self._owner.engine.activate(self.handle, holder.attempt, word.handoff)

    def _give_up(self, event: DecodeEvent, word: _Word) -> None:
        self._owner.engine.give_up(self.handle, self._holder.attempt)

    def _withdraw(self, event: DecodeEvent, word: _Word) -> None:
        holder = self._holder
        self._owner.withdraw(holder.life, self.handle, holder.attempt, event.value)

    def _exclude(self, event: DecodeEvent, word: _Word) -> None:
        holder = self._holder
        self._failed += 1
        self._excluded.append(holder.life.node)
        _log.info(
            "attempt %d at %s failed: %s",
            *(holder.attempt, holder.life.node, event.value),
            extra=self._about,
        )

    def _close(self, event: DecodeEvent, word: _Word) -> None:
        self.fence.close()
        if event is not DecodeEvent.CLAIM:
            self.fence.unqueued()
        self._ticket = None
        self._owner.tally.attempt(_OUTCOMES.get(event, "unwanted"))

    def _prefill_here(self, event: DecodeEvent, word: _Word) -> None:
        if event is DecodeEvent.FENCE:
            self._reason = "own_rejoin"
        self.fence.unqueued()
        self._owner.tally.decided(remote=False, reason=self._reason)
        _log.info("the prompt is prefilled here: %s", self._reason, extra=self._about)
        self._owner.engine.prefill_here(self.handle)

    def _settle(self, event: DecodeEvent, word: _Word) -> None:
        """Records where the prompt was prefilled and what it cost. Only the engine knows which KV
        it used: a local prefill may have finished first."""
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

    def _with_cached_there(self, started: FirstTokenStats) -> FirstTokenStats:
        """The statistics with what the prefill worker found in its caches, if its KV was used."""
        if not started.received_tokens or self._brought is None or self._moves:
            return started
        _, handoff = self._brought
        cached, sources = handoff.cached_tokens, handoff.started.sources
        return replace(started, prefill_cached=cached, prefill_sources=sources)

    def _learn(self, handoff: Handoff, started: FirstTokenStats) -> None:
        there = handoff.started
        self._owner.chooser.learnt.remote(
            handoff.tokens,
            handoff.cached_tokens,
            started.received_tokens + self._before,
            there.queue_seconds + there.prefill_seconds,
            self._owner.node.now() - self._claimed,
        )

    def _free(self, event: DecodeEvent, word: _Word) -> None:
        self._owner.engine.abort(self.handle)

    def _fail(self, event: DecodeEvent, word: _Word) -> None:
        assert word.error is not None
        self._sink.on_error(word.error)

    def _forget(self, event: DecodeEvent, word: _Word) -> None:
        self._unwatch()
        if self._expiry is not None:
            self._expiry.cancel()
        self._owner.forget(self)


_REMOTE: Final = (
    DecodeState.ADMIT,
    DecodeState.QUEUE,
    DecodeState.ATTEMPT,
    DecodeState.FILL,
    DecodeState.VERIFY,
)
_STAGES: Final = {
    DecodeState.ADMIT: "while the request waited for room for its KV",
    DecodeState.QUEUE: "while the request waited for a prefill worker",
    DecodeState.ATTEMPT: "while a path to a prefill worker was made",
    DecodeState.FILL: "during prefill on another worker",
    DecodeState.VERIFY: "while KV was on its way",
    DecodeState.LOCAL: "during prefill",
}

_PERFORM: Final[dict[DecodeAction, Callable[[RemotePrefillRequest, DecodeEvent, _Word], None]]] = {
    DecodeAction.AWAIT: RemotePrefillRequest._await,
    DecodeAction.ENQUEUE: RemotePrefillRequest._enqueue,
    DecodeAction.UNQUEUE: RemotePrefillRequest._unqueue,
    DecodeAction.OPEN: RemotePrefillRequest._open,
    DecodeAction.JOIN: RemotePrefillRequest._join,
    DecodeAction.ANSWER: RemotePrefillRequest._answer,
    DecodeAction.DISMISS: RemotePrefillRequest._dismiss,
    DecodeAction.TURN_AWAY: RemotePrefillRequest._turn_away,
    DecodeAction.ACCEPT: RemotePrefillRequest._accept,
    DecodeAction.EXTEND: RemotePrefillRequest._extend,
    DecodeAction.ACTIVATE: RemotePrefillRequest._activate,
    DecodeAction.GIVE_UP: RemotePrefillRequest._give_up,
    DecodeAction.WITHDRAW: RemotePrefillRequest._withdraw,
    DecodeAction.EXCLUDE: RemotePrefillRequest._exclude,
    DecodeAction.CLOSE: RemotePrefillRequest._close,
    DecodeAction.PREFILL_HERE: RemotePrefillRequest._prefill_here,
    DecodeAction.SETTLE: RemotePrefillRequest._settle,
    DecodeAction.FREE: RemotePrefillRequest._free,
    DecodeAction.FAIL: RemotePrefillRequest._fail,
    DecodeAction.FORGET: RemotePrefillRequest._forget,
}

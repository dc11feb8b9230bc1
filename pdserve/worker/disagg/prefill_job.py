"""Runs one claim at a prefill worker, until the last block is sent.

It asks the decode worker for an attempt, lets the engine compute and send the KV, hands over, and
ends. All of this happens under the lease, so it ends even if either side fails. It is the engine's
sink for the prompt. `prefill_handler` creates it and renews its lease.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from pdserve.errors import (
    DeadlineExceeded,
    LinkError,
    LinkLost,
    NotReady,
    PayloadTooLarge,
    PdserveError,
    TransferRefused,
)
from pdserve.ids import NodeLife
from pdserve.messages.handoff import (
    LEASE_SECONDS,
    AttemptFailed,
    HeldAttempt,
    NotifyHandoff,
    OpenAttempt,
)
from pdserve.runtime.rpc_methods import ATTEMPT_FAILED, NOTIFY, OPEN_ATTEMPT
from pdserve.worker.disagg.kv_fetch import KvFetchClaim
from pdserve.worker.disagg.state_table import (
    PREFILL_TABLE,
    PrefillAction,
    PrefillEvent,
    PrefillState,
    StateMachine,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from typing import Any

    from pdserve.engine.port import Handle
    from pdserve.ids import NodeId, Seconds
    from pdserve.messages.handoff import AttemptOpened, ClaimOutcome, Handoff
    from pdserve.messages.request import GenerateRequest
    from pdserve.net.timers import Timer
    from pdserve.runtime.peers.peer_ref import PeerRef
    from pdserve.worker.disagg.ports import PrefillClaim
    from pdserve.worker.disagg.prefill_handler import PrefillHandler

__all__ = ["PrefillJob"]

_log = logging.getLogger(__name__)

_PAUSE: Final[Seconds] = 0.2
"""Seconds before a failed message is sent again."""
_ANSWER: Final[Seconds] = 2.0
"""Seconds to wait for the reply to a handoff before it is sent again."""
_TELL: Final[Seconds] = 1.0
"""Seconds to reach the decode worker; after that it learns of the failure from the lease."""

State, Event, Do = PrefillState, PrefillEvent, PrefillAction


class PrefillJob:
    """The state of one claim. Implements `engine.port.PrefillSink`."""

    def __init__(self, owner: PrefillHandler, claim: PrefillClaim) -> None:
        self.claim = claim
        self.uncached = claim.item.prompt_tokens
        """Prompt tokens to compute, as far as known."""
        self.machine = StateMachine(PREFILL_TABLE)
        self.decode = NodeLife(claim.decode, claim.decode_epoch)
        self.held: HeldAttempt | None = None
        """The attempt, once it is open."""
        self._owner = owner
        self._handle: Handle | None = None
        self._opened: AttemptOpened | None = None
        self._handoff: Handoff | None = None
        self._withdrawn: set[int] = set()
        """Attempts that were withdrawn before the reply that opens them arrived."""
        self._why: PdserveError | None = None
        """The error that ended the job."""
        self._task: asyncio.Task[None] | None = None
        self._timer: Timer | None = None
        self._renewed = owner.node.now()
        self._watch()

    @property
    def state(self) -> PrefillState:
        return self.machine.state

    @property
    def waiting(self) -> bool:
        """True until the prompt is computed."""
        return self.state in (State.CLAIMED, State.OPENING, State.COMPUTING)

    @property
    def progress(self) -> int:
        """The counter sent as `RenewLeases.progress`; a change means progress.

        Until the prompt is computed, it counts all tokens that the engine computes, because the
        engine may work on earlier prompts first; afterwards, all blocks sent. It is constant for a
        sequence that moves away (`kv_fetch.KvFetchClaim`): such a job computes next to nothing, so
        the engine's work proves nothing and only the age counts.
        """
        stats = self._owner.engine.stats()
        if isinstance(self.claim, KvFetchClaim):
            return 0
        return stats.computed_tokens if self.state is State.COMPUTING else stats.sent_blocks

    def __repr__(self) -> str:
        return f"<{self.claim!r} {self.state.value}>"

    def begin(self) -> None:
        """Starts to ask the decode worker for an attempt."""
        self._spawn(self._ask())

    def feed(self, event: PrefillEvent) -> None:
        """Feeds an event to the state table and performs the resulting actions."""
        before = self.state
        actions = self.machine.feed(event)
        over = self.state is State.ENDED
        if over and before is not State.ENDED:
            self._stop()
        for action in actions:
            _PERFORM[action](self)
        if self.state is not before or over:
            self._owner.changed()

    # ------------------------------------------------------------------ the lease

    def renewed(self, at: Seconds) -> None:
        """Records a renewal that the decode worker acknowledged; `at`: the time it was sent."""
        self._renewed = max(self._renewed, at)

    def _watch(self) -> None:
        self._timer = self._owner.node.timers.call_at(self._renewed + LEASE_SECONDS, self._lapse)

    def _lapse(self) -> None:
        if self._owner.node.now() < self._renewed + LEASE_SECONDS:
            self._watch()
            return
        self._why = DeadlineExceeded(f"the lease was not renewed for {LEASE_SECONDS:g} s")
        self.feed(Event.LAPSE)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        task, self._task = self._task, None
        if task is not None and task is not asyncio.current_task():
            task.cancel()

    # ------------------------------------------------------------------ asking for an attempt

    @property
    def _decode(self) -> PeerRef:
        """The life of the decode worker that queued the item."""
        return self._owner.node.ref(*self.decode)

    async def _ask(self) -> None:
        """Asks for an attempt until there is an answer or the lease time has passed."""
        node, claim = self._owner.node, self.claim
        until = node.now() + LEASE_SECONDS
        opening = OpenAttempt(
            request=claim.item.request,
            round=claim.item.round,
            owner=claim.owner,
            owner_epoch=claim.owner_epoch,
            model=claim.item.model,
            compat_hash=claim.item.compat_hash,
            claim=claim.number,
            generation=claim.item.generation,
        )
        while (left := until - node.now()) > _PAUSE:
            try:
                link = await self._decode.link(timeout=left)
                if self.state is State.CLAIMED:
                    self.feed(Event.LINKED)
                asked = node.now()
                opened = await link.request(
                    OPEN_ATTEMPT, opening, timeout=until - asked, late=self._too_late
                )
            except (LinkError, DeadlineExceeded, NotReady) as error:
                _log.debug("%r: %s", self, error.message)
                await asyncio.sleep(_PAUSE)
                continue
            except PdserveError as error:
                _log.info("%r was not opened: %s", claim, error.message)
                self.feed(Event.REFUSED)
                return
            self._take(opened, asked)
            return
        self.feed(Event.UNREACHED)

    def _take(self, opened: AttemptOpened, asked: Seconds) -> None:
        self._opened = opened
        self.held = HeldAttempt(self.claim.item.request, opened.attempt)
        self._task = None
        self.renewed(asked)
        self.claim.opened()
        if opened.attempt in self._withdrawn:
            self.feed(Event.REFUSED)
            return
        self.uncached -= min(self.uncached - 1, self._owner.cached(opened.request))
        self.feed(Event.OPENED)

    def withdraw(self, request: int, attempt: int) -> bool:
        """Records that an attempt was withdrawn whose opening reply may still arrive; returns True
        if this job waits for it."""
        expected = self.state is State.OPENING and self.claim.item.request == request
        if expected:
            self._withdrawn.add(attempt)
        return expected

    def _too_late(self, opened: AttemptOpened) -> None:
        """Handles an opening reply that arrived too late: reports the attempt as failed."""
        held = HeldAttempt(self.claim.item.request, opened.attempt)
        self._owner.tell(self, held, LinkLost("the answer came too late", sent=False))

    # ------------------------------------------------------------------ from the engine

    def on_prefilled(self, handoff: Handoff) -> None:
        """Starts to hand over: the prompt is computed."""
        self._handoff = handoff
        self.feed(Event.PREFILLED)

    def on_sent(self) -> None:
        """Ends the job's sending part: all KV has arrived."""
        self._handle = None
        self.feed(Event.SENT)

    def on_error(self, error: PdserveError) -> None:
        """Ends the job: the engine could not compute the prompt or send its KV."""
        self._handle = None
        self._why = error
        self.feed(Event.ERROR)

    # ------------------------------------------------------------------ what is done

    def _go_on(self) -> None:
        """Does nothing: `_ask` continues as soon as it has a link."""

    def _prefill(self) -> None:
        assert self._opened is not None
        opened, decode = self._opened, self.decode
        self._owner.hold(self)
        if self._owner.has_lost(self.claim, opened.request):
            self.on_error(TransferRefused("its KV is no longer cached here"))
            return
        request = _without_source(opened.request, self._owner.node.id)
        try:
            self._handle = self._owner.engine.prefill(request, opened.ticket, *decode, self)
        except PdserveError as error:
            self.on_error(error)

    def _notify(self) -> None:
        self._spawn(self._hand_over())

    async def _hand_over(self) -> None:
        """Sends the handoff until the decode worker answers or the lease ends. It may arrive twice;
        the decode worker counts it once."""
        assert self.held is not None
        assert self._handoff is not None
        words = NotifyHandoff(self.held.request, self.held.attempt, self._handoff)
        while True:
            try:
                asked = self._owner.node.now()
                taken = await self._decode.ask(NOTIFY, words, timeout=_ANSWER)
            except PayloadTooLarge as error:  # it will not become smaller
                self._task, self._why = None, error
                self._tell()
                self.feed(Event.NOT_TAKEN)
                return
            except PdserveError as error:
                _log.debug("%r: %s", self, error.message)
                await asyncio.sleep(_PAUSE)
                continue
            self._task = None
            if taken.current:
                self.renewed(asked)
            self.feed(Event.TAKEN if taken.current else Event.NOT_TAKEN)
            return

    def _abort(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            self._owner.engine.abort(handle)

    def _tell(self) -> None:
        assert self.held is not None
        assert self._why is not None
        self._owner.tell(self, self.held, self._why)

    async def say_failed(self, held: HeldAttempt, error: PdserveError) -> None:
        """Reports the failure once; if the message is lost, the lease ends the attempt."""
        words = AttemptFailed(
            held.request, held.attempt, type(error).__name__, error.message[:2000]
        )
        try:
            await self._decode.ask(ATTEMPT_FAILED, words, timeout=_TELL)
        except PdserveError as problem:
            _log.debug("%r: %s", self, problem.message)

    def _end(self, outcome: ClaimOutcome) -> None:
        if self._why is not None:
            _log.warning("%r failed: %s", self.claim, self._why.message)
        self.claim.end(outcome)
        self._owner.ended(self, outcome)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self._task = self._owner.spawn(work, "prefill for a peer")


_PERFORM: Final[dict[PrefillAction, Callable[[PrefillJob], None]]] = {
    Do.ASK: PrefillJob._go_on,
    Do.PREFILL: PrefillJob._prefill,
    Do.NOTIFY: PrefillJob._notify,
    Do.ABORT: PrefillJob._abort,
    Do.TELL: PrefillJob._tell,
    Do.END_DONE: lambda self: self._end("done"),
    Do.END_REFUSED: lambda self: self._end("refused"),
    Do.END_FAILED: lambda self: self._end("failed"),
    Do.END_CANCELLED: lambda self: self._end("cancelled"),
}


def _without_source(request: GenerateRequest, node: NodeId) -> GenerateRequest:
    """The request without `node` as a source of KV. A router names sources for the decode worker,
    and a worker that would ask itself would not use what it has."""
    others = tuple(source for source in request.kv_sources if source.node != node)
    return request if others == request.kv_sources else replace(request, kv_sources=others)

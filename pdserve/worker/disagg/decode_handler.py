"""Handles the requests of a worker whose KV comes from another worker.

    submit           decides where the prompt is prefilled. If here, it is an ordinary submission;
                     if elsewhere, it becomes a `RemotePrefillRequest`. A decode worker uses the
                     prefill queue. Any worker can fetch KV from the worker that a request names as
                     its source, where the request ran before
    open attempt     a prefill worker with a claim asks for blocks; answered with the ticket
    renew            a prefill worker renews its leases; answered with the attempts that are over
    notify           a prefill worker hands over
    attempt failed   a prefill worker gives up
    disagg           an operator changes the disaggregation mode
    withdraw         sent to a prefill worker when its attempt is no longer wanted; if the message
                     is lost, the next renewal tells it

Leases run on the node's timers, so they end even if nothing else happens here. A request is in
`_remote` from its submission to its last delta, error or abort. Owned by the worker's agent.
"""

from __future__ import annotations

import logging
from collections import Counter
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from pdserve.errors import NoMethod, PdserveError, TransferRefused
from pdserve.ids import NodeId, NodeLife
from pdserve.messages.handoff import AttemptAck, DisaggSet, LeasesRenewed, WithdrawAttempt
from pdserve.messages.status import HandoffStats
from pdserve.observe.logs import about
from pdserve.runtime.peers.handlers import answers
from pdserve.runtime.registry import MemberGone
from pdserve.runtime.rpc_methods import (
    ATTEMPT_FAILED,
    DISAGG,
    NOTIFY,
    OPEN_ATTEMPT,
    RENEW,
    WITHDRAW,
)
from pdserve.worker.disagg.first_guess import FirstGuess, measured_token
from pdserve.worker.disagg.kv_fetch import KvFetcher
from pdserve.worker.disagg.local_prompts import LocalPrompts
from pdserve.worker.disagg.overlap import cached_tokens, fits_message, tokens_of
from pdserve.worker.disagg.policy import DisaggDecision, DisaggInputs
from pdserve.worker.disagg.remote_prefill import RemotePrefillRequest
from pdserve.worker.disagg.state_table import DecodeEvent, DecodeState
from pdserve.worker.disagg.stats import DisaggCounters

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from pdserve.engine.port import Handle, TokenSink
    from pdserve.ids import Seconds
    from pdserve.messages.card import ModelCard
    from pdserve.messages.handoff import (
        AttemptFailed,
        AttemptOpened,
        NotifyHandoff,
        OpenAttempt,
        RenewLeases,
        SetDisagg,
    )
    from pdserve.messages.node import NodeCard
    from pdserve.messages.request import FirstTokenStats, GenerateRequest, TokenDelta
    from pdserve.net.base import IncomingCall
    from pdserve.observe.metrics import Metrics
    from pdserve.runtime.node import Node
    from pdserve.runtime.registry import MemberEvent
    from pdserve.worker.disagg.policy import DisaggPolicy
    from pdserve.worker.disagg.ports import DisaggWorker, PrefillQueuePort

__all__ = ["DecodeHandler"]

_log = logging.getLogger(__name__)

_WITHDRAW_TIMEOUT: Final[Seconds] = 1.0
"""Timeout of a withdrawal; the next renewal reports the same."""


class DecodeHandler:
    """Decides where prompts are prefilled, and runs the requests that are prefilled elsewhere."""

    def __init__(
        self,
        node: Node,
        worker: DisaggWorker,
        queue: PrefillQueuePort | None,
        chooser: DisaggPolicy,
        overlap: Callable[[bytes], int],
        metrics: Metrics,
    ) -> None:
        """`queue`: None if this worker uses no prefill queue; it then only fetches KV from the
        worker that a request names. `overlap` returns how many leading block hashes of its argument
        are in the pool."""
        self.node = node
        self.worker = worker
        self.engine = worker.engine
        self.queue = queue
        self.generation = 0
        """The worker's mode generation; 0: not counted."""
        self.paused = False
        """True while the mode changes: prompts of new requests are computed here."""
        self.chooser = chooser
        self.tally = DisaggCounters(metrics)
        self._overlap = overlap
        self._remote: dict[Handle, RemotePrefillRequest] = {}
        self.local = LocalPrompts()
        node.host(self)
        self._guess = FirstGuess(
            node.id, node.timers, worker.engine, chooser, self._prefill_workers
        )
        self._deaf = node.on_member(self._on_member)
        for state in _WAYS:
            metrics.handoffs.labels(state.value).read_from(partial(self._in, state))

    def use_queue(self, queue: PrefillQueuePort | None, generation: int) -> None:
        """Closes the prefill queue's client and takes another one, or none, with a new mode. No
        request may wait for a prefill."""
        if self.queue is not None:
            self.queue.close()
        self.queue = queue
        self.generation = generation
        self._guess.wake()

    def __len__(self) -> int:
        """Number of requests whose KV comes from another worker; each counts until its last
        delta."""
        return len(self._remote)

    # ------------------------------------------------------------------ for the channels

    def submit(self, request: GenerateRequest, sink: TokenSink) -> Handle:
        """Submits a request; its prompt may be prefilled on another worker. Errors: as
        `engine.port.Engine.submit`."""
        if request.source:
            return self._submit_from(_source(request), request, sink)
        if self.queue is None:
            return self.engine.submit(request, sink)
        if self.paused:
            return self._submit_here(request, sink, "mode_change")
        decision = self.decide(request, self._cached(request))
        if _log.isEnabledFor(logging.DEBUG):
            _log.debug("decided: %s", decision, extra=about(request))
        if not decision.remote:
            return self._submit_here(request, sink, decision.reason)
        return self._submit_remote(
            RemotePrefillRequest(self, request, sink, decision, self.queue, self.coming()), sink
        )

    def _submit_from(self, source: NodeLife, request: GenerateRequest, sink: TokenSink) -> Handle:
        """Fetches the request's KV from `source`; prefills here if an obstacle prevents that."""
        cached = self._cached(request)
        obstacle = self._obstacle_to(source, request, cached)
        if obstacle:
            _log.info(
                "the request's KV is not fetched from %s: %s",
                *(source.node, obstacle),
                extra=about(request),
            )
            return self._submit_here(request, sink, obstacle)
        usual = self.decide(request, cached)
        decision = DisaggDecision(True, "source", usual.here, usual.there, usual.fill)
        queue = KvFetcher(self.node, source)
        return self._submit_remote(RemotePrefillRequest(self, request, sink, decision, queue), sink)

    def _submit_remote(self, remote: RemotePrefillRequest, sink: TokenSink) -> Handle:
        request = remote.request
        try:
            handle = self.engine.submit_remote(request, remote)
        except TransferRefused as error:
            remote.discard()
            _log.warning("the prompt is prefilled here: %s", error.message, extra=about(request))
            return self._submit_here(request, sink, "not_possible")
        except BaseException:
            remote.discard()
            raise
        self._remote[handle] = remote
        remote.begin(handle)
        return handle

    def abort(self, handle: Handle) -> None:
        """Aborts a request here at once, and tells its prefill worker, if any, in the background.
        Idempotent; `handle`'s sink gets no further calls."""
        remote = self._remote.get(handle)
        if remote is None:
            self.local.done(handle)
            self.engine.abort(handle)
        else:
            remote.feed(DecodeEvent.CANCEL)

    @property
    def unstarted(self) -> int:
        """Number of sequences whose prompt is still being prefilled elsewhere."""
        waiting = [r.request for r in self._remote.values() if r.state is not DecodeState.ACTIVE]
        return sum(len(request.live) for request in waiting)

    @property
    def queued(self) -> int:
        """Number of requests that need the prefill queue, or a prefill worker."""
        return sum(remote.queued for remote in self._remote.values())

    def close(self) -> None:
        """Refuses all queued prompts and makes no further decisions; running requests end with
        their streams. Idempotent."""
        self._deaf()
        self._guess.close()
        if self.queue is not None:
            self.queue.close()

    def _submit_here(self, request: GenerateRequest, sink: TokenSink, reason: str) -> Handle:
        here = _Here(self, request, sink, reason)
        handle = here.handle = self.engine.submit(request, here)
        if not here.started:
            self.local.add(handle, tokens_of(request) - self._cached(request))
        self.tally.decided(remote=False, reason=reason)
        return handle

    # ------------------------------------------------------------------ deciding

    def _cached(self, request: GenerateRequest) -> int:
        return cached_tokens(request, self.worker, self._overlap)

    def decide(self, request: GenerateRequest, cached: int) -> DisaggDecision:
        """Decides from the current state where the request's prompt is prefilled. `cached`: leading
        prompt tokens in the pool here."""
        stats = self.engine.stats()
        card = self.worker.cards().get(request.model)
        prospect = DisaggInputs(
            tokens=tokens_of(request),
            cached=cached,
            obstacle=self._obstacle(request),
            # Within a long step, more streams begin here than the engine has told of.
            streams=max(stats.running, self._active),
            backlog=self.local.backlog(stats.uncomputed_tokens),
            queue=None if card is None or self.queue is None else self.queue.state(card.name),
            coming=self.coming(),
            late=self._late(),
        )
        return self.chooser.decide(prospect)

    @property
    def _active(self) -> int:
        """Sequences whose prompt was prefilled elsewhere, and which run here."""
        active = (r for r in self._remote.values() if r.state is DecodeState.ACTIVE)
        return sum(len(one.request.live) for one in active)

    def coming(self) -> int:
        """Number of prompt tokens that prefill workers have still to deliver."""
        return sum(remote.coming for remote in self._remote.values())

    def _late(self) -> float:
        return max((remote.late for remote in self._remote.values()), default=1.0)

    def _obstacle(self, request: GenerateRequest) -> str:
        card, capabilities = self.worker.cards().get(request.model), self.engine.capabilities
        if request.pooling:
            return "embedding"
        if request.images:
            return "images"
        if request.diverged:
            return "migrated_choices"
        if not fits_message(request):
            return "too_long"
        if card is None or not card.compat_hash or capabilities is None:
            return "not_possible"
        if not capabilities.transfers:
            return "not_possible"
        if self._all_misfit(request):
            return "no_worker"
        cut_off = self.cut_off()
        return "no_way" if cut_off and not self.others_prefill(request, cut_off) else ""

    def _obstacle_to(self, source: NodeLife, request: GenerateRequest, cached: int) -> str:
        """The reason, in one word, why the KV is not fetched from `source`; empty if it can be."""
        card, capabilities = self.worker.cards().get(request.model), self.engine.capabilities
        if card is None or capabilities is None or not capabilities.transfers:
            return "not_possible"
        if request.pooling:
            return "embedding"
        if request.images:
            return "images"
        if request.diverged:
            return "migrated_choices"
        if not fits_message(request):
            return "too_long"
        if request.sampling.prompt_logprobs is not None:  # those of the prompt are not in KV
            return "not_possible"
        if tokens_of(request) - cached <= card.block_size:
            return "source_short"
        if not self.lives(source):
            return "source_gone"
        if source.node in self.cut_off():
            return "no_way"
        theirs = self.node.registry.get(source.node)
        fits = theirs is None or _may_have(theirs.card, card, request.lora)
        return "" if fits else "source_misfit"

    def cut_off(self) -> list[NodeId]:
        """Workers to which no transfer backend worked when tried less than a minute ago."""
        none = [path for path in self.engine.paths() if path.backend == "none" and path.down]
        return [NodeId(path.node) for path in none]

    def _all_misfit(self, request: GenerateRequest) -> bool:
        """True if prefill workers serve a model of this name, but all of them with other weights or
        settings, or without the request's adapter."""
        if self.others_prefill(request, ()):
            return False
        name = self.worker.cards()[request.model].name
        cards = [member.card for member in self.node.registry if member.card is not None]
        offers = [
            one
            for card in cards
            if card.mode == "prefill" or card.prompt_share
            for one in card.models
        ]
        return any(one.name == name for one in offers)

    def learn_local(self, request: GenerateRequest, started: FirstTokenStats) -> None:
        """Records the cost of a prompt that was prefilled here, for the prediction."""
        uncached = tokens_of(request) - started.cached_tokens
        if uncached > 0:
            self.chooser.learnt.local(uncached, started.work_seconds)

    # ------------------------------------------------------------------ for the requests

    def lives(self, life: NodeLife) -> bool:
        """True if this node life is a member of the cluster."""
        member = self.node.registry.get(life.node)
        return member is not None and member.epoch == life.epoch

    def others_prefill(self, request: GenerateRequest, than: Collection[NodeId]) -> bool:
        """True if a node outside `than` may prefill the request, judged by the published cards.
        The queue would find out too, but it waits for workers that may come back."""
        return any(
            _may_prefill(member.card, self.worker.cards()[request.model], request.lora)
            for member in self.node.registry
            if member.node not in than
        )

    def _prefill_workers(self) -> list[NodeLife]:
        """Members that may prefill for a model of this worker, if it uses a prefill queue."""
        cards = () if self.queue is None else tuple(self.worker.cards().values())
        return [
            NodeLife(member.node, member.epoch)
            for member in self.node.registry
            if member.node != self.node.id
            and member.card is not None
            and member.card.transfers
            and any(_may_prefill(member.card, card) for card in cards)
        ]

    def lacking(self, lora: str) -> list[NodeId]:
        """Workers that lack this adapter, so that the queue gives them no item that needs it;
        none if it is empty."""
        if not lora:
            return []
        workers = self.node.registry.by_role("worker")
        return [member.node for member in workers if not _has_lora(member.card, lora)]

    def forget(self, remote: RemotePrefillRequest) -> None:
        """Removes a request that has ended."""
        self._remote.pop(remote.handle, None)

    def withdraw(self, life: NodeLife, request: Handle, attempt: int, reason: str) -> None:
        """Tells a prefill worker, in the background, that its attempt is over."""
        if self.lives(life) and not self.node.tasks.closed:
            words = WithdrawAttempt(request, attempt, reason)
            _ = self.node.tasks.spawn(self._withdraw(life, words), "withdraw an attempt")

    async def _withdraw(self, life: NodeLife, words: WithdrawAttempt) -> None:
        try:
            await self.node.ref(*life).ask(WITHDRAW, words, timeout=_WITHDRAW_TIMEOUT)
        except PdserveError as error:
            _log.debug("attempt %d of %d: %s", words.attempt, words.request, error.message)

    # ------------------------------------------------------------------ from prefill workers

    @answers(OPEN_ATTEMPT)
    def _open(self, message: OpenAttempt, call: IncomingCall) -> AttemptOpened | None:
        remote = self._remote.get(message.request)
        why = "there is no such request, or it has ended"
        if message.generation not in (0, self.generation):
            why = "it has changed its mode since it queued the request"
        elif remote is not None and not self._peer_has(remote.request.lora, call):
            why = f"it has no adapter {remote.request.lora!r}"
            remote.claimed_in_vain("no_worker")
        elif remote is not None and self._fits(message):
            remote.asked(message, call.life, call)
            return None
        elif remote is not None:
            why = f"its KV {message.compat_hash!r} of {message.model!r} is not compatible"
        name, peer = f"request {message.request}", call.life.node
        raise TransferRefused.at(name, peer, "opening an attempt", why)

    def _peer_has(self, lora: str, call: IncomingCall) -> bool:
        """True if the caller has this adapter. One that joined after the item was queued may lack
        it, and one of an older release would compute the prompt without it."""
        peer = self.node.registry.get(call.life.node)
        return not lora or (peer is not None and _has_lora(peer.card, lora))

    def _fits(self, message: OpenAttempt) -> bool:
        """True if the prefill worker's KV is compatible with ours, or it does not state a
        compatibility hash."""
        if not message.compat_hash:
            return True
        card = self.worker.cards().get(message.model)
        return card is not None and card.compat_hash == message.compat_hash

    @answers(RENEW)
    def _renew(self, message: RenewLeases, call: IncomingCall) -> LeasesRenewed:
        by, over = call.life, []
        for held, progress in zip_longest(message.held, message.progress[: len(message.held)]):
            remote = self._remote.get(held.request)
            if remote is None or not remote.renewed(held.attempt, by, progress or 0):
                over.append(held)
        return LeasesRenewed(tuple(over))

    @answers(NOTIFY)
    def _notify(self, words: NotifyHandoff, call: IncomingCall) -> AttemptAck | None:
        return self._told(DecodeEvent.NOTIFY, words, call)

    @answers(ATTEMPT_FAILED)
    def _failed(self, words: AttemptFailed, call: IncomingCall) -> AttemptAck | None:
        return self._told(DecodeEvent.FAILED, words, call)

    def _told(
        self, event: DecodeEvent, words: NotifyHandoff | AttemptFailed, call: IncomingCall
    ) -> AttemptAck | None:
        remote = self._remote.get(words.request)
        if remote is None:
            return AttemptAck(current=False)
        remote.told(event, words, call.life, call)
        return None

    # ------------------------------------------------------------------ from operators

    @answers(DISAGG)
    def _set_mode(self, words: SetDisagg, call: IncomingCall) -> DisaggSet:
        if self.queue is None:
            raise NoMethod(f"method {DISAGG.id} is served by workers with a prefill queue only")
        before, self.chooser.mode = self.chooser.mode, words.disagg
        _log.info("disaggregation mode is now %r, was %r", words.disagg, before)
        return DisaggSet(before)

    # ------------------------------------------------------------------ from membership

    def _on_member(self, event: MemberEvent) -> None:
        if not isinstance(event, MemberGone):
            self._guess.wake()
            return
        gone = NodeLife(event.member.node, event.member.epoch)
        fenced = event.reason == "own rejoin"
        for remote in tuple(self._remote.values()):
            if fenced:
                remote.feed(DecodeEvent.FENCE)
            elif remote.held_by(gone):
                remote.feed(DecodeEvent.DIED)

    # ------------------------------------------------------------------ looking

    def _in(self, state: DecodeState) -> int:
        return sum(remote.state is state for remote in self._remote.values())

    def transfer_token(self) -> Seconds:
        """Seconds to move a token's KV here, as measured when paths were made; 0: none was."""
        return measured_token(self.engine)

    def numbers(self) -> HandoffStats:
        """KV handoff counters for status."""
        states = Counter(remote.state for remote in self._remote.values())
        return HandoffStats(
            mode="decode",
            disagg=self.chooser.mode if self.queue is not None else "",
            remote=dict(self.tally.remote),
            local=dict(self.tally.local),
            ended=dict(self.tally.attempts),
            states={state.value: states[state] for state in _WAYS if states[state]},
        )


_WAYS: Final = tuple(
    state for state in DecodeState if state not in (DecodeState.ACTIVE, DecodeState.RELEASED)
)
"""States before the first token."""


def _has_lora(card: NodeCard | None, lora: str) -> bool:
    """True if the node has published that it has this adapter."""
    return card is not None and card.has_lora(lora)


def _may_prefill(card: NodeCard | None, model: ModelCard, lora: str = "") -> bool:
    """True if the node may prefill for the model, with its adapter `lora` unless that is empty. A
    node that has published no card yet may prefill for the model itself."""
    if lora and not _has_lora(card, lora):
        return False
    if card is None:
        return True
    what = (model.name, model.compat_hash)
    serves = not card.models or any((one.name, one.compat_hash) == what for one in card.models)
    takes = card.mode in ("", "prefill") or card.prompt_share > 0
    return card.role in ("", "worker") and takes and serves


def _may_have(card: NodeCard | None, model: ModelCard, lora: str = "") -> bool:
    """True if the node may hold compatible KV: same weights, same adapter, same block layout. A
    node that has published no card yet may hold KV of the model itself."""
    if lora and not _has_lora(card, lora):
        return False
    if card is None or not card.models:
        return True
    return bool(card.transfers) and any(
        one.name == model.name and one.compat_hash == model.compat_hash for one in card.models
    )


def _source(request: GenerateRequest) -> NodeLife:
    return NodeLife(NodeId(request.source), request.source_epoch)


class _Here:
    """The sink of a request that is prefilled here from the beginning."""

    __slots__ = ("_line", "_owner", "_request", "_sink", "handle", "started")

    def __init__(
        self, owner: DecodeHandler, request: GenerateRequest, sink: TokenSink, reason: str
    ) -> None:
        self._owner = owner
        self._request = request
        self._sink = sink
        self._line = f"local; node={owner.node.id}; reason={reason}"
        self.handle: Handle | None = None
        """None: it is being submitted."""
        self.started = False
        """True once its first token has come, or it has ended."""

    def on_delta(self, delta: TokenDelta) -> None:
        """Passes the delta on; the first one with statistics also trains the prediction and names
        this node."""
        started = delta.started
        if started is not None:
            if not self.started:
                self._owner.learn_local(self._request, started)
                self._begun()
            delta = replace(delta, started=replace(started, prefill=self._line))
        self._sink.on_delta(delta)

    def on_error(self, error: PdserveError) -> None:
        """Passes the error on."""
        self._begun()
        self._sink.on_error(error)

    def _begun(self) -> None:
        """Nothing of the prompt is left to compute."""
        self.started = True
        if self.handle is not None:
            self._owner.local.done(self.handle)

"""Runs prefills and KV handoffs for other workers: takes claims and renews their leases.

    claims      a prefill worker gets claims from the queue; it offers credits while its engine has
                little left to compute
    hand over   any worker may be asked for the KV of a request that ran on it; this is a claim too
    renewals    once a second, one message per decode worker renews the leases of all its attempts;
                attempts that the reply reports as over are dropped at once. Renewals run on the
                node's timers, whatever the engine does
    withdraw    a decode worker no longer wants an attempt

Every claim is in `_claims` until it ends. Owned by the worker's agent.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Final

from pdserve.blocks.hashing import HASH_BYTES
from pdserve.errors import Draining, PdserveError
from pdserve.ids import NodeLife
from pdserve.messages.handoff import RENEW_INTERVAL, AttemptAck, KvFetchReply, RenewLeases
from pdserve.messages.status import HandoffStats
from pdserve.runtime.peers.handlers import answers
from pdserve.runtime.registry import MemberGone
from pdserve.runtime.rpc_methods import HAND_OVER, RENEW, WITHDRAW
from pdserve.worker.disagg.credits import Credits
from pdserve.worker.disagg.kv_fetch import KvFetchClaim
from pdserve.worker.disagg.overlap import cached_tokens
from pdserve.worker.disagg.prefill_job import PrefillJob
from pdserve.worker.disagg.state_table import PrefillEvent, PrefillState
from pdserve.worker.disagg.stats import DisaggCounters

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from typing import Any

    from pdserve.ids import Seconds
    from pdserve.messages.handoff import (
        ClaimOutcome,
        HeldAttempt,
        KvFetch,
        LeasesRenewed,
        WithdrawAttempt,
    )
    from pdserve.messages.request import GenerateRequest
    from pdserve.net.base import IncomingCall
    from pdserve.net.timers import Timer
    from pdserve.observe.metrics import Metrics
    from pdserve.runtime.node import Node
    from pdserve.runtime.registry import MemberEvent
    from pdserve.worker.disagg.ports import ClaimSource, DisaggWorker, PrefillClaim

    MakeClaims = Callable[
        [Callable[[PrefillClaim], None], Callable[[PrefillClaim], None]], ClaimSource
    ]

__all__ = ["MAX_KV_FETCHES", "PrefillHandler"]

_log = logging.getLogger(__name__)

MAX_KV_FETCHES: Final = 16
"""Maximum number of sequences that move away at once; beyond it the new worker computes the KV."""
_RENEW_TIMEOUT: Final[Seconds] = 1.5
"""Seconds; several tries fit into one lease."""


class _Renewals:
    """The leases held at one life of a decode worker."""

    __slots__ = ("asks", "held", "timer")

    def __init__(self) -> None:
        self.held: dict[tuple[int, int], PrefillJob] = {}
        self.asks = False
        """True while a renewal waits for its reply."""
        self.timer: Timer | None = None


class PrefillHandler:
    """Runs the claims of one worker."""

    def __init__(
        self,
        node: Node,
        worker: DisaggWorker,
        make_claims: MakeClaims | None,
        overlap: Callable[[bytes], int],
        metrics: Metrics,
    ) -> None:
        """`make_claims` creates the queue client, given a callback for each new claim and one for
        each claim that is no longer wanted; None: no queue is served. `overlap` returns how many
        leading block hashes of its argument are in the pool."""
        self.node = node
        self.worker = worker
        self.engine = worker.engine
        self.tally = DisaggCounters(metrics)
        self._overlap = overlap
        self._claims: dict[int, PrefillJob] = {}
        """Jobs by identity of the claim, since each router numbers its own claims."""
        self._renewals: dict[NodeLife, _Renewals] = {}
        self._credits = Credits()
        self._tells = False
        self._closed = False
        self.on_work: Callable[[], object] = lambda: None
        """Called when there is something to do; must be quick."""
        self._idle = asyncio.Event()
        """Set when no claim is left; maintained only while a drain waits."""
        self._queue: ClaimSource | None = None
        self._share = 1.0
        self.paused = False
        """True while the mode changes: no credits are offered."""
        self._given = 0
        self.use_claims(make_claims)
        node.host(self)
        self._deaf = node.on_member(self._on_member)
        for state in PrefillState:
            if state is not PrefillState.ENDED:
                metrics.handoffs.labels(state.value).read_from(partial(self._in, state))

    def use_claims(self, make_claims: MakeClaims | None, share: float = 1.0) -> None:
        """Leaves all queues and serves them anew, or none, with a new mode. Prompts that are
        computed are still sent. `share`: the part of each step that claimed prompts may take."""
        for prefilling in self._claims.values():
            if not prefilling.waiting:  # so that no router gives it to another worker
                prefilling.claim.end("done")
        if self._queue is not None:
            self._queue.close()
        self._queue = None if make_claims is None else make_claims(self._take, self._stop)
        self._share = share
        self.changed()

    def __len__(self) -> int:
        """Number of claims that have not ended."""
        return len(self._claims)

    @property
    def waiting(self) -> int:
        """Number of claims whose prompt is not computed yet."""
        return sum(one.waiting for one in self._claims.values())

    async def drain(self, timeout: Seconds) -> bool:
        """Offers no more credits and waits until every claim has ended, because computed KV must
        still be handed over. Returns False if `timeout` seconds pass first."""
        self.changed()
        if not self._claims:
            return True
        self._idle.clear()
        try:
            async with asyncio.timeout(timeout):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        """Leaves the queues and drops all claims; decode workers learn it from the cluster's
        membership. Idempotent."""
        self._closed = True
        self._deaf()
        if self._queue is not None:
            self._queue.close()
        for prefilling in tuple(self._claims.values()):
            prefilling.feed(PrefillEvent.FENCE)

    # ------------------------------------------------------------------ from the queue

    def _take(self, claim: PrefillClaim) -> None:
        self.on_work()
        prefilling = self._claims[id(claim)] = PrefillJob(self, claim)
        self._credits.took(claim.item.prompt_tokens)
        prefilling.begin()
        self.changed()

    def _stop(self, claim: PrefillClaim) -> None:
        prefilling = self._claims.get(id(claim))
        if prefilling is not None:
            prefilling.feed(PrefillEvent.UNCLAIMED)

    def changed(self) -> None:
        """Schedules a new credit offer for the end of this event-loop turn."""
        if self._queue is not None and not self._tells and not self._closed:
            self._tells = True
            self.node.call_soon(self._offer)

    def _offer(self) -> None:
        self._tells = False
        if self._queue is None or self._closed:
            return
        for card in {card.name: card for card in self.worker.cards().values()}.values():
            self._queue.offer(card.name, card.compat_hash, self.credits, self.uncomputed)

    @property
    def uncomputed(self) -> int:
        """Claimed prompt tokens that are not computed yet."""
        return sum(one.uncached for one in self._claims.values() if one.waiting)

    @property
    def credits(self) -> int:
        """Number of further items that this worker would take."""
        capabilities = self.engine.capabilities
        if self.paused or self.worker.unready_reason() is not None:
            return 0
        if capabilities is None or not capabilities.transfers:
            return 0
        return self._credits.left(self.waiting, self.uncomputed, capabilities, self._share)

    # ------------------------------------------------------------------ for the claims

    def cached(self, request: GenerateRequest) -> int:
        """Leading tokens of the request in the pool here."""
        return cached_tokens(request, self.worker, self._overlap)

    def has_lost(self, claim: PrefillClaim, request: GenerateRequest) -> bool:
        """True if a KV fetch asks for a sequence of which not even the prompt is cached any more:
        the new worker computes it as fast. False if the caches cannot be compared, because block
        hashes have different secrets."""
        card = self.worker.cards().get(request.model)
        known = card is not None and request.names_id == self.worker.names_id
        if not known or card is None or not isinstance(claim, KvFetchClaim):
            return False
        full = len(request.block_names) // HASH_BYTES * card.block_size
        return self.cached(request) < min(full, len(request.prompt) - card.block_size)

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None] | None:
        """Runs `work` as a task of the node; None if the node is closing."""
        try:
            return self.node.tasks.spawn(work, name)
        except Draining:
            return None

    def tell(self, prefilling: PrefillJob, held: HeldAttempt, error: PdserveError) -> None:
        """Tells the decode worker, in the background, that an attempt has failed."""
        self.spawn(prefilling.say_failed(held, error), "tell of a failure")

    def hold(self, prefilling: PrefillJob) -> None:
        """Renews the job's lease from now on."""
        assert prefilling.held is not None
        held = prefilling.held
        renewals = self._renewals.get(prefilling.decode)
        if renewals is None:
            renewals = self._renewals[prefilling.decode] = _Renewals()
            self._later(prefilling.decode, renewals)
        renewals.held[held.request, held.attempt] = prefilling

    def ended(self, prefilling: PrefillJob, outcome: ClaimOutcome) -> None:
        """Removes a job that has ended."""
        del self._claims[id(prefilling.claim)]
        if not self._claims:
            self._idle.set()
        self.tally.claim(outcome)
        renewals, held = self._renewals.get(prefilling.decode), prefilling.held
        if renewals is None or held is None:
            return
        renewals.held.pop((held.request, held.attempt), None)
        if not renewals.held:
            del self._renewals[prefilling.decode]
            if renewals.timer is not None:
                renewals.timer.cancel()

    # ------------------------------------------------------------------ leases

    def _later(self, decode: NodeLife, renewals: _Renewals) -> None:
        renewals.timer = self.node.timers.call_later(
            RENEW_INTERVAL, lambda: self._beat(decode, renewals)
        )

    def _beat(self, decode: NodeLife, renewals: _Renewals) -> None:
        self._later(decode, renewals)
        if not renewals.asks:
            renewals.asks = True
            self.spawn(self._renew(decode, renewals), "renew leases")

    async def _renew(self, decode: NodeLife, renewals: _Renewals) -> None:
        known = [one for one in renewals.held.values() if one.held is not None]
        held = tuple(one.held for one in known if one.held is not None)
        renewal = RenewLeases(held, tuple(one.progress for one in known))
        try:
            sent = self.node.now()
            answer = await self.node.ref(*decode).ask(RENEW, renewal, timeout=_RENEW_TIMEOUT)
        except PdserveError as error:
            _log.debug("leases at %s were not renewed: %s", decode.node, error.message)
            return
        finally:
            renewals.asks = False
        self._renewed(renewals, held, answer, sent)

    def _renewed(
        self,
        renewals: _Renewals,
        asked: tuple[HeldAttempt, ...],
        answer: LeasesRenewed,
        sent: Seconds,
    ) -> None:
        over = {(held.request, held.attempt) for held in answer.over}
        for key in ((held.request, held.attempt) for held in asked):
            prefilling = renewals.held.get(key)
            if prefilling is None:
                continue  # it has ended meanwhile
            if key in over:
                prefilling.feed(PrefillEvent.OVER)
            else:
                prefilling.renewed(sent)

    # ------------------------------------------------------------------ from decode workers

    @answers(WITHDRAW)
    def _withdrawn(self, words: WithdrawAttempt, call: IncomingCall) -> AttemptAck:
        life = call.life
        renewals = self._renewals.get(life)
        found = None if renewals is None else renewals.held.get((words.request, words.attempt))
        if found is None:
            asks = (one for one in self._claims.values() if one.decode == life)
            return AttemptAck(any([one.withdraw(words.request, words.attempt) for one in asks]))
        found.feed(PrefillEvent.OVER)
        return AttemptAck()

    # ------------------------------------------------------------------ from a worker's successors

    @answers(HAND_OVER)
    def _hand_over(self, words: KvFetch, call: IncomingCall) -> KvFetchReply:
        refused = self._refusal(words)
        if not refused:
            self._given += 1
            ours = NodeLife(self.node.id, self.node.epoch)
            self._take(KvFetchClaim(words, self._given, call.life, ours))
        return KvFetchReply(refused)

    def _refusal(self, words: KvFetch) -> str:
        """The reason, in one word, why the KV is not handed over; empty if it is. A draining worker
        does not refuse."""
        capabilities, item = self.engine.capabilities, words.item
        if self._closed or words.epoch != self.node.epoch:
            return "source_gone"
        if capabilities is None or not capabilities.transfers:
            return "source_unready"
        card = self.worker.cards().get(item.model)
        if card is None or card.compat_hash != item.compat_hash:
            return "source_misfit"
        moving = sum(isinstance(one.claim, KvFetchClaim) for one in self._claims.values())
        return "source_busy" if moving >= MAX_KV_FETCHES else ""

    # ------------------------------------------------------------------ from membership

    def _on_member(self, event: MemberEvent) -> None:
        if not isinstance(event, MemberGone):
            return
        gone = NodeLife(event.member.node, event.member.epoch)
        fenced = event.reason == "own rejoin"
        for prefilling in tuple(self._claims.values()):
            if fenced:
                prefilling.feed(PrefillEvent.FENCE)
            elif prefilling.decode == gone:
                prefilling.feed(PrefillEvent.DIED)

    # ------------------------------------------------------------------ looking

    def _in(self, state: PrefillState) -> int:
        return sum(one.state is state for one in self._claims.values())

    def numbers(self) -> HandoffStats:
        """KV handoff counters for status."""
        states = Counter(one.state.value for one in self._claims.values())
        return HandoffStats(mode="prefill", ended=dict(self.tally.claims), states=dict(states))

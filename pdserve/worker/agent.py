"""Connects a worker's engine to the cluster: publishes its state and takes its requests.

It publishes:
    card        the model, once the engine can serve it; until then the reason why it cannot
    load        topic, latest value: how busy the engine is
    sequences   topic, log: the bookings that this worker holds
    kv          topic, log: the blocks that the engine can reuse, if the engine reports them
It serves:
    streams     one stream per frontend, see `request_streams`
    handoffs    KV that moves from or to other workers, see `disagg`
    mode        an operator changes it while the worker serves, see `mode`

`WorkerService` below knows nothing of clusters; this file joins the two. `WorkerNode`
owns the agent.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from pdserve.errors import ConfigError, Draining, NotReady
from pdserve.messages.kv_events import KV
from pdserve.messages.node import NodeCard, summarize_card
from pdserve.messages.routing import LOAD, SEQUENCES, WorkerLoad, booking_key
from pdserve.runtime.paced_timer import PacedTimer
from pdserve.runtime.registry import MemberGone
from pdserve.wire.codec import encode
from pdserve.worker.disagg.decode_handler import DecodeHandler
from pdserve.worker.disagg.policy import DisaggPolicy
from pdserve.worker.disagg.prefill_handler import PrefillHandler
from pdserve.worker.disagg.queue.claims import QueueClaimSource
from pdserve.worker.disagg.queue.client import PrefillQueueClient
from pdserve.worker.kv_event_publisher import KvEventPublisher
from pdserve.worker.kv_fetch.push import PUSH_TIMEOUT, KvPusher
from pdserve.worker.kv_fetch.service import KvFetchService
from pdserve.worker.mode.jobs import card_mode, jobs_of
from pdserve.worker.mode.switch import ModeSwitch
from pdserve.worker.rebalance import Rebalance
from pdserve.worker.request_streams import RequestStreams
from pdserve.worker.tiers.drop_orders import DropOrders
from pdserve.worker.transfer_rpc import TransferRpc

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from pdserve.engine.port import Handle, RequestEngine, TokenSink
    from pdserve.errors import PdserveError
    from pdserve.ids import Seconds
    from pdserve.messages.card import ModelCard
    from pdserve.messages.node import ModelSummary
    from pdserve.messages.request import FirstTokenStats, GenerateRequest
    from pdserve.messages.status import HandoffStats
    from pdserve.messages.worker_stream import MigrationHintReason
    from pdserve.observe.degraded import Degradations
    from pdserve.runtime.node import Node
    from pdserve.runtime.registry import MemberEvent
    from pdserve.runtime.topics.service import Topics
    from pdserve.worker.disagg.ports import ClaimSource, PrefillClaim
    from pdserve.worker.mode.jobs import LiveMode
    from pdserve.worker.service import WorkerService

__all__ = ["WorkerAgent"]

_log = logging.getLogger(__name__)

_LOAD_INTERVAL: Final[Seconds] = 0.1
"""Seconds between two looks at the load while there is work; an unchanged load is not sent again.
"""
_IDLE_INTERVAL: Final[Seconds] = 1.0
"""The same without work: prefill credits may change without an event."""


class WorkerAgent:
    """A worker as a member of the cluster. `card` is the node's common card; the agent adds the
    model.
    """

    def __init__(
        self,
        service: WorkerService,
        node: Node,
        topics: Topics,
        card: NodeCard,
        degradations: Degradations | None = None,
    ) -> None:
        self._service = service
        self._degradations = degradations
        self._node = node
        self._sequences = topics.publish_set(SEQUENCES)
        self._load = topics.publish_state(LOAD, encode)
        self._kv = KvEventPublisher()
        service.engine.subscribe_kv(self._kv.apply)
        self._topics = topics
        self._card = card
        self.decode: DecodeHandler | None = None
        """Handles requests whose KV may come from another worker; None if this worker moves no
        KV."""
        self.prefill: PrefillHandler | None = None
        """Handles prefills and KV handoffs for other workers; None if this worker moves no KV."""
        self.kv_fetch: KvFetchService | None = None
        """Fetches blocks from other workers' pools, and serves them; None: this worker takes no
        part in KV transfer."""
        self._pusher: KvPusher | None = None
        self._transfers: TransferRpc | None = None
        self._requests: RequestEngine = service.engine
        self._take_part()
        self._channels = RequestStreams(
            self, on_begin=self._begin, on_start=self._start, on_end=self._end
        )
        config = service.config
        self._rebalance = Rebalance(config.block_size, config.itl_target)
        self._started: set[int] = set()
        """Bookings whose first token has come but has not been published yet."""
        self._flushes = False
        self._told: NodeCard | None = None
        self._told_of: tuple[object, ...] = ()
        """The inputs of the last published card. They are compared ten times a second and rarely
        change.
        """
        self._offers: dict[int, tuple[ModelCard, ModelSummary, dict[bytes, bytes]]] = {}
        """Model summaries by the identity of the model's card, so that its large parts are hashed
        once.
        """
        node.host(self._channels)
        DropOrders(node, service.engine)
        node.on_member(self._on_member)
        self._pace = PacedTimer(node.timers, _LOAD_INTERVAL, self._watch, idle=_IDLE_INTERVAL)
        if self.prefill is not None:
            self.prefill.on_work = self._pace.wake
        self.mode = ModeSwitch(node, service, self, self._degradations)
        self._pace.start()

    def _take_part(self) -> None:
        """Joins KV transfer between workers, whatever the mode: that may change."""
        service, node, config = self._service, self._node, self._service.config
        leading = self._kv.leading
        if config.mode == "aggregated" and config.transfer is None:
            return
        self._transfers = TransferRpc(node, service.engine, service.metrics, self._degradations)
        self.kv_fetch = KvFetchService(node, service.engine.kv_pulls)
        self._pusher = KvPusher(node, service, self.kv_fetch.numbers)
        chooser = DisaggPolicy(
            config.disagg,
            min_tokens=config.disagg_min_tokens,
            max_queue=config.disagg_max_queue,
        )
        self.decode = DecodeHandler(node, service, None, chooser, leading, service.metrics)
        self._requests = self.decode
        self.prefill = PrefillHandler(node, service, None, leading, service.metrics)
        self.use_queues(config.mode, 1, 1.0)

    # ------------------------------------------------------------------ its mode

    def use_queues(self, mode: LiveMode, generation: int, share: float) -> None:
        """Takes the part in prefill queues that a mode has, in place of the former one."""
        assert self.decode is not None
        assert self.prefill is not None
        node, jobs = self._node, jobs_of(mode)
        queue = PrefillQueueClient(node, self._topics) if "decode" in jobs else None
        self.decode.use_queue(queue, generation)

        def claims(
            take: Callable[[PrefillClaim], None], stop: Callable[[PrefillClaim], None]
        ) -> ClaimSource:
            return QueueClaimSource(node, take, stop, generation)

        self.prefill.use_claims(claims if "prompts" in jobs else None, share)

    def pause_queues(self, *, paused: bool) -> None:
        """Puts no prompts into prefill queues and takes none from them, while the mode changes."""
        for part in (self.decode, self.prefill):
            if part is not None:
                part.paused = paused

    @property
    def moves_kv(self) -> bool:
        """True if its engine can move KV to other workers, now."""
        capabilities = self._service.engine.capabilities
        return self.decode is not None and capabilities is not None and bool(capabilities.transfers)

    def ask_to_leave(self) -> None:
        """Asks frontends to move all requests to other workers."""
        self._ask_to_move(None, "drain")

    def left_for(self, mode: LiveMode) -> int:
        """Number of tasks that could not stay in `mode`. Requests may stay where requests are
        taken, once their prompts are here; so may prompts of other workers, once computed: their
        KV is sent in any mode."""
        claims = 0 if self.prefill is None else self.prefill.waiting
        if "requests" in jobs_of(mode):
            return claims + (0 if self.decode is None else self.decode.queued)
        return claims + max(self._channels.requests, int(not self._channels.idle))

    @property
    def _prefills_only(self) -> bool:
        return self._service.mode == "prefill"

    async def drain(self, timeout: Seconds) -> bool:
        """Takes no new requests, asks frontends to move the running ones, and waits until none is
        left.

        At `timeout` the remaining requests end with `Draining`, so that their frontends retry them
        on another worker, and the method returns False. It may be called again.
        """
        until = self._node.now() + timeout
        self._service.drain()
        self.mode.cancel()
        self.tell()
        self._ask_to_move(None, "drain")
        drained = await self._channels.wait_idle(timeout)
        if self.prefill is not None:  # what has moved on may still fetch its KV from here
            drained &= await self.prefill.drain(max(0.0, until - self._node.now()))
        if not drained:
            self._channels.close(_going())
        await self._push(until - self._node.now())
        return drained

    def undo_drain(self) -> None:
        """Takes requests again, after a drain that was cancelled or has ended. Streams that were
        asked to move may still do so."""
        self._service.undo_drain()
        self.tell()
        self._pace.wake()

    async def _push(self, timeout: Seconds) -> None:
        """Offers cached blocks to the workers that stay."""
        if self._pusher is not None and timeout > 0 and self._service.config.kv_fetch != "never":
            await self._pusher.push(min(timeout, PUSH_TIMEOUT))

    @property
    def requests(self) -> int:
        """Number of requests in progress."""
        return self._channels.requests

    @property
    def left(self) -> int:
        """Number of tasks that a drain waits for: requests, and prompts computed for other
        workers."""
        return self._channels.requests + (0 if self.prefill is None else len(self.prefill))

    def _ask_to_move(self, handles: Collection[Handle] | None, reason: MigrationHintReason) -> None:
        asked = self._channels.ask_to_move(handles, reason)
        if asked:
            self._service.metrics.moves_asked.labels(reason).inc(asked)

    def _relieve(self) -> None:
        """Asks frontends to move some running requests to other workers if this worker has too
        many.
        """
        service = self._service
        if service.draining or service.changing:
            return
        now, stats = self._node.now(), service.engine.stats()
        relief = self._rebalance.look(now, stats, self._movable)
        if relief is not None:
            _log.info(
                "%s: asking to move %d of %d running requests to other workers",
                *(relief.reason, len(relief.handles), stats.running),
            )
            self._ask_to_move(relief.handles, relief.reason)

    def _movable(self) -> list[Handle]:
        """Requests that have produced a token and could move, because another worker serves their
        model.
        """
        names = self._service.cards().keys()
        others = (member.card for member in self._node.registry.by_role("worker"))
        usable = (card for card in others if card is not None and not card.going)
        offers = (one for card in usable if card.mode != "prefill" for one in card.models)
        return self._channels.victims() if any(one.name in names for one in offers) else []

    def close(self) -> None:
        """Ends every request and tells frontends that this worker is going away."""
        self._channels.close(_going())
        self.mode.cancel()
        for part in (self.decode, self.prefill):
            if part is not None:
                part.close()

    def handoffs(self) -> HandoffStats | None:
        """KV handoff counters for status; None if this worker takes no part in handoffs."""
        mode = self._service.mode
        if self.prefill is None or self.decode is None:
            return None
        if "prompts" in jobs_of(mode):
            return replace(self.prefill.numbers(), mode=mode)
        numbers = self.decode.numbers()
        idle = mode == "aggregated" and not numbers.ended and not numbers.local
        return None if idle else replace(numbers, mode=mode)

    # ------------------------------------------------------------------ what the channels need

    def submit(self, request: GenerateRequest, sink: TokenSink) -> Handle:
        """Implements `engine.port.RequestEngine.submit`: decides where the prompt is
        prefilled."""
        if self._prefills_only:
            raise NotReady(f"{self._node.id} is a prefill worker: decode workers take requests")
        self._service.check_accepts()
        self._pace.wake()
        return self._requests.submit(request, sink)

    def abort(self, handle: Handle) -> None:
        """Implements `engine.port.RequestEngine.abort`: frees everything the request holds."""
        self._requests.abort(handle)

    def _begin(self, booking: int) -> None:
        """Publishes a booking that begins here. No one waits for this event, so it may be
        batched."""
        self._sequences.put(booking_key(booking))

    def _start(self, booking: int, started: FirstTokenStats) -> None:
        """Publishes a first token. Routers that queue requests wait for this event and for
        the end."""
        # Routers do not trace, and all of them get this.
        brief = replace(started, phases=()) if started.phases else started
        self._sequences.put(booking_key(booking), encode(brief))
        self._started.add(booking)
        self._flush_soon()

    def _end(self, booking: int) -> None:
        if booking in self._started:  # in this very turn: a put and a drop would leave nothing
            self._flush()
        self._sequences.drop(booking_key(booking))
        self._flush_soon()

    def _flush_soon(self) -> None:
        """Flushes at the end of this event-loop turn: one engine step reports many requests at
        once.
        """
        if not self._flushes:
            self._flushes = True
            self._node.call_soon(self._flush_now)

    def _flush_now(self) -> None:
        self._flushes = False
        self._flush()

    def _flush(self) -> None:
        self._started.clear()
        self._sequences.flush()

    # ------------------------------------------------------------------ what it tells

    def wake(self) -> None:
        """Notes that the engine reports something new: it is looked at soon. It is quick."""
        self._pace.wake()
        if self._transfers is not None:
            self._transfers.wake()

    def tell(self) -> None:
        """Publishes the current state after a change."""
        self._tell_card()
        self._tell_load()
        if self.prefill is not None:
            self.prefill.changed()

    def _watch(self) -> bool:
        """Polls the engine, because its counters raise no events. Returns True while there is work,
        or a change to be expected."""
        self._relieve()
        self.tell()
        stats = self._service.engine.stats()
        engine = stats.running or stats.waiting or stats.remote or stats.sending
        return bool(engine or self.left) or self._service.unready_reason() is not None

    def _on_member(self, event: MemberEvent) -> None:
        """Ends the requests of a frontend that has left, even if its connection still
        looks alive."""
        if isinstance(event, MemberGone):
            self._channels.gone(event.member.node, event.member.epoch)

    def _tell_load(self) -> None:
        """Publishes the load after the bookings it includes.

        Routers add their own bookings to a report until one arrives that contains them, so the
        bookings held here have to be published first.
        """
        self._flush()
        self._load.set(self.load())

    def load(self) -> WorkerLoad:
        """The worker's load. Requests held here count even if the engine's last statistics lack
        them.
        """
        engine = self._service.engine
        stats, capabilities = engine.stats(), engine.capabilities
        if self._prefills_only:
            choices, running = stats.running + stats.waiting, stats.running
        else:
            choices = self._channels.choices
            begun = max(0, choices - (0 if self.decode is None else self.decode.unstarted))
            running = min(stats.running, begun)  # what has ended since the engine said so is gone
        return WorkerLoad(
            ready=self._service.unready_reason() is None,
            running=running,
            waiting=max(0, choices - running),
            max_sequences=0 if capabilities is None else capabilities.max_sequences,
            blocks_total=stats.blocks_total,
            blocks_used=stats.blocks_used,
            blocks_cached=stats.blocks_cached,
            uncomputed_tokens=stats.uncomputed_tokens,
            kv_tokens=stats.kv_tokens,
            itl=stats.itl,
            lanes=stats.lanes,
            transfer_token=0.0 if self.decode is None else self.decode.transfer_token(),
        )

    def _publish_kv(self) -> None:
        """Publishes the `kv` topic if the engine reports its blocks, which is known once it has
        loaded.

        Otherwise the card lists no `kv` topic: an empty one would say that nothing is cached.
        """
        tells, published = self._service.tells_kv, KV in self._topics.names
        if tells and not published:
            self._kv.connect(self._topics.publish_log(KV, self._kv).append)
        elif tells is False and published:
            self._kv.connect(None)
            self._topics.withdraw(KV)

    def _tell_card(self) -> None:
        self._publish_kv()
        service = self._service
        reason = service.unready_reason() or ""
        capabilities = service.engine.capabilities
        facts = (
            *(reason, service.draining, capabilities, service.cards(), self._topics.names),
            *(service.mode, self.mode.generation, self.mode.share, bool(service.changing)),
            self._disagg,
        )
        if facts == self._told_of:
            return
        self._told_of = facts
        models: list[ModelSummary] = []
        parts: dict[bytes, bytes] = {}
        if not reason or service.draining or service.leaving:
            for small, large in self._offered():
                models.append(small)
                parts |= large
        card = replace(
            self._card,
            topics=self._topics.names,
            models=tuple(models),
            draining=service.draining,
            reason=reason.partition(":")[0] if reason.startswith("starting") else reason[:_REASON],
            max_sequences=0 if capabilities is None else capabilities.max_sequences,
            transfers=() if capabilities is None else capabilities.transfers,
            kv_block_bytes=0 if capabilities is None else capabilities.block_bytes,
            fetches=() if capabilities is None else capabilities.fetches,
            kv_layers=0 if capabilities is None else capabilities.kv_layers,
            mode=card_mode(service.mode),
            leaving=bool(service.changing),
            mode_generation=self.mode.generation,
            prompt_share=self.mode.share,
            disagg=self._disagg,
        )
        if card == self._told:
            return
        self._told = card
        try:
            self._node.publish_card(card, parts)
        except ConfigError as error:
            _log.error(
                "the model card is too large to publish, so this worker serves no model: %s",
                error.message,
            )
            self._node.publish_card(replace(card, models=(), reason=_TOO_LARGE), {})

    @property
    def _disagg(self) -> str:
        """How it decides where its prompts are computed; empty: it takes no part in transfers."""
        return "" if self.decode is None else self.decode.chooser.mode

    def _offered(self) -> list[tuple[ModelSummary, dict[bytes, bytes]]]:
        """The model summaries for the card, each model once."""
        cards = {id(card): card for card in self._service.cards().values()}
        if cards.keys() != self._offers.keys():
            self._offers = {key: (card, *summarize_card(card)) for key, card in cards.items()}
        return [(small, large) for _, small, large in self._offers.values()]


def _going() -> PdserveError:
    return Draining("the worker is shutting down", retry_after=1.0)


_REASON: Final = 500
"""Characters of the reason in the card; the last message of an engine may be long."""
_TOO_LARGE: Final = "its names, aliases and adapters do not fit a card"

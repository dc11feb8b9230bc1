"""A worker as a member of the cluster: what it tells of itself, and the requests it takes.

    card        the model, once the engine can serve it; the reason while it cannot
    load        topic, latest value: how busy the engine is
    sequences   topic, log: the bookings that are held here
    kv          topic, log: what the engine can reuse; only if the engine tells it
    channels    one stream per frontend, see `channel`
    handoffs    KV that comes from other workers, or goes to them: `handoff`

The service below it knows nothing of clusters; this file only puts the two together. Owned by
whoever starts the role.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from pdserve.errors import ConfigError, Draining, NotReady
from pdserve.messages.channel import CHANNEL
from pdserve.messages.kv import KV
from pdserve.messages.node import NodeCard, offer
from pdserve.messages.routing import LOAD, SEQUENCES, WorkerLoad, booking_key
from pdserve.runtime.registry import Gone
from pdserve.wire.codec import encode
from pdserve.worker.channel import Channels
from pdserve.worker.handoff.choice import Chooser
from pdserve.worker.handoff.decode import Decode
from pdserve.worker.handoff.prefill import Prefill
from pdserve.worker.kv_log import KvLog
from pdserve.worker.paths import TransferPaths
from pdserve.worker.prefill_queue.decode import PrefillQueue
from pdserve.worker.prefill_queue.prefill import Claims
from pdserve.worker.rebalance import Rebalance

if TYPE_CHECKING:
    from collections.abc import Collection

    from pdserve.engine.api import Handle, TokenSink
    from pdserve.errors import PdserveError
    from pdserve.ids import Seconds
    from pdserve.messages.card import ModelCard
    from pdserve.messages.channel import MoveReason
    from pdserve.messages.node import ModelOffer
    from pdserve.messages.request import GenerateRequest, Started
    from pdserve.messages.status import HandoffNumbers
    from pdserve.observe.degraded import Degradations
    from pdserve.runtime.node import Node
    from pdserve.runtime.registry import MemberEvent
    from pdserve.runtime.topics.service import Topics
    from pdserve.worker.service import WorkerService

__all__ = ["WorkerMember"]

_log = logging.getLogger(__name__)

_LOAD_INTERVAL: Final[Seconds] = 0.1
"""Between two looks at the load while requests are held; an unchanged one is not sent."""


class WorkerMember:
    """See above. `card` is what every node says of itself; the model is added here."""

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
        self._kv = KvLog()
        service.subscribe_kv(self._kv.apply)
        self._topics = topics
        self._card = replace(card, mode=service.config.mode)
        self.decode: Decode | None = None
        """Of a worker that takes requests and may fetch their KV."""
        self.prefill: Prefill | None = None
        """Of a worker that may compute or hand over KV for others."""
        self._take_part()
        self._channels = Channels(
            self, on_begin=self._begin, on_start=self._start, on_end=self._end
        )
        config = service.config
        self._rebalance = Rebalance(config.block_size, config.itl_target)
        self._started: set[int] = set()
        """Bookings whose first token has come and was not yet told."""
        self._flushes = False
        self._told: NodeCard | None = None
        self._told_of: tuple[object, ...] = ()
        """What that card was made from: it is looked at ten times a second and hardly changes."""
        self._offers: dict[int, tuple[ModelCard, ModelOffer, dict[bytes, bytes]]] = {}
        """By the card's identity: its large parts are hashed once."""
        node.serve_stream(CHANNEL, self._channels.opened)
        node.on_member(self._on_member)
        self._watch()

    def _take_part(self) -> None:
        """In moving KV between workers: this one's mode says whether there are queues for it."""
        service, node, config = self._service, self._node, self._service.config
        mode, leading = config.mode, self._kv.leading
        if mode == "aggregated" and config.transfer is None:
            return
        TransferPaths(node, service, self._degradations)
        if mode != "prefill":
            chooser = Chooser(
                config.disagg,
                min_tokens=config.disagg_min_tokens,
                max_queue=config.disagg_max_queue,
            )
            queue = PrefillQueue(node, self._topics) if mode == "decode" else None
            self.decode = Decode(node, service, queue, chooser, leading, service.metrics)
        claims = (lambda take, stop: Claims(node, take, stop)) if mode == "prefill" else None
        self.prefill = Prefill(node, service, claims, leading, service.metrics)

    @property
    def _prefills_only(self) -> bool:
        return self._service.config.mode == "prefill"

    async def drain(self, timeout: Seconds) -> bool:
        """Take nothing new, say so, have what runs served elsewhere, and wait until it is gone.
        What is left when `timeout` has come ends with `Draining`, which makes its frontend send it
        on; then False. May be called again."""
        until = self._node.now() + timeout
        self._service.drain()
        self.tell()
        self._ask_to_move(None, "drain")
        drained = await self._channels.wait_idle(timeout)
        if self.prefill is not None:  # what has moved on may still fetch its KV from here
            drained &= await self.prefill.drain(max(0.0, until - self._node.now()))
        if not drained:
            self._channels.close(_going())
        return drained

    @property
    def requests(self) -> int:
        """In progress."""
        return self._channels.requests

    @property
    def left(self) -> int:
        """What a drain waits for: requests, and prompts that are computed for others."""
        return self._channels.requests + (0 if self.prefill is None else len(self.prefill))

    def _ask_to_move(self, handles: Collection[Handle] | None, reason: MoveReason) -> None:
        asked = self._channels.ask_to_move(handles, reason)
        if asked:
            self._service.metrics.moves_asked.labels(reason).inc(asked)

    def _relieve(self) -> None:
        """Have some of what runs served elsewhere, if it is too much."""
        service = self._service
        if service.draining:
            return
        now, stats = self._node.now(), service.statistics()
        relief = self._rebalance.look(now, stats, self._movable)
        if relief is not None:
            _log.info(
                "%s: %d of %d requests had better be served elsewhere",
                *(relief.reason, len(relief.handles), stats.running),
            )
            self._ask_to_move(relief.handles, relief.reason)

    def _movable(self) -> list[Handle]:
        """Requests that have begun, if another worker serves their model."""
        names = self._service.cards().keys()
        others = (member.card for member in self._node.registry.by_role("worker"))
        usable = (card for card in others if card is not None and not card.draining)
        offers = (one for card in usable if card.mode != "prefill" for one in card.models)
        return self._channels.victims() if any(one.name in names for one in offers) else []

    def close(self) -> None:
        """Every request ends; frontends hear that this worker is going away."""
        self._channels.close(_going())
        for part in (self.decode, self.prefill):
            if part is not None:
                part.close()

    def handoffs(self) -> HandoffNumbers | None:
        """For status; None: this worker does everything by itself."""
        mode = self._service.config.mode
        if self.prefill is None or self.decode is None:
            return None if self.prefill is None else self.prefill.numbers()
        numbers = self.decode.numbers()
        idle = mode == "aggregated" and not numbers.ended and not numbers.local
        return None if idle else replace(numbers, mode=mode)

    # ------------------------------------------------------------------ what the channels need

    def submit(self, request: GenerateRequest, sink: TokenSink) -> Handle:
        """See `channel.Engine`."""
        if self.decode is not None:
            return self.decode.submit(request, sink)
        if self._prefills_only:
            raise NotReady(f"{self._node.id} is a prefill worker: decode workers take requests")
        return self._service.submit(request, sink)

    def abort(self, handle: Handle) -> None:
        """See `channel.Engine`."""
        engine = self._service if self.decode is None else self.decode
        engine.abort(handle)

    def _begin(self, booking: int) -> None:
        """Nobody waits for this: it may linger."""
        self._sequences.put(booking_key(booking))

    def _start(self, booking: int, started: Started) -> None:
        """Routers that hold requests wait for this, and for the end."""
        self._sequences.put(booking_key(booking), encode(started))
        self._started.add(booking)
        self._flush_soon()

    def _end(self, booking: int) -> None:
        if booking in self._started:  # in this very turn: a put and a drop would leave nothing
            self._flush()
        self._sequences.drop(booking_key(booking))
        self._flush_soon()

    def _flush_soon(self) -> None:
        """At the end of this turn of the loop: an engine's step tells of many requests at once."""
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

    def tell(self) -> None:
        """Say how things are, now that they have changed."""
        self._tell_card()
        self._tell_load()
        if self.prefill is not None:
            self.prefill.changed()

    def _watch(self) -> None:
        """The engine's numbers have no events of their own."""
        self._node.timers.call_later(_LOAD_INTERVAL, self._watch)
        self._relieve()
        self.tell()

    def _on_member(self, event: MemberEvent) -> None:
        """What a frontend has here ends with it, though its connection may not show it yet."""
        if isinstance(event, Gone):
            self._channels.gone(event.member.node, event.member.epoch)

    def _tell_load(self) -> None:
        """Routers add their own bookings to a report until one follows that contains them: what is
        held here is told first."""
        self._flush()
        self._load.set(self.load())

    def load(self) -> WorkerLoad:
        """How busy it is: what is held here counts whatever the engine's last numbers say."""
        stats, capabilities = self._service.statistics(), self._service.capabilities
        if self._prefills_only:
            choices, running = stats.running + stats.waiting, stats.running
        else:
            choices = self._channels.choices
            begun = choices - (0 if self.decode is None else self.decode.unstarted)
            running = min(stats.running, begun)  # what has ended since the engine said so is gone
        return WorkerLoad(
            ready=self._service.unready_reason() is None,
            running=running,
            waiting=choices - running,
            max_sequences=0 if capabilities is None else capabilities.max_sequences,
            blocks_total=stats.blocks_total,
            blocks_used=stats.blocks_used,
            blocks_cached=stats.blocks_cached,
            uncomputed_tokens=stats.uncomputed_tokens,
            kv_tokens=stats.kv_tokens,
            itl=stats.itl,
        )

    def _publish_kv(self) -> None:
        """Once the engine has loaded it is known whether it tells what it holds. If it does not,
        the topic is missing from the card: an empty one would say that nothing is there."""
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
        capabilities = service.capabilities
        facts = (reason, service.draining, capabilities, service.cards(), self._topics.names)
        if facts == self._told_of:
            return
        self._told_of = facts
        models: list[ModelOffer] = []
        parts: dict[bytes, bytes] = {}
        if not reason or service.draining:
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
        )
        if card == self._told:
            return
        self._told = card
        try:
            self._node.publish_card(card, parts)
        except ConfigError as error:
            _log.error("this worker cannot offer its models: %s", error.message)
            self._node.publish_card(replace(card, models=(), reason=_TOO_LARGE), {})

    def _offered(self) -> list[tuple[ModelOffer, dict[bytes, bytes]]]:
        """Each model once, as it travels."""
        cards = {id(card): card for card in self._service.cards().values()}
        if cards.keys() != self._offers.keys():
            self._offers = {key: (card, *offer(card)) for key, card in cards.items()}
        return [(small, large) for _, small, large in self._offers.values()]


def _going() -> PdserveError:
    return Draining("the worker is going away", retry_after=1.0)


_REASON: Final = 500
"""Characters: an engine's last words may be long."""
_TOO_LARGE: Final = "its names and aliases do not fit a card"

"""Runs the prefill queues on a router's node: streams to workers, and a report.

    serves      PREFILL_QUEUE, one stream per worker: items from decode workers, offers and ends of
                claims from prefill workers
    publishes   `prefill`, the state of every queue

`queue` decides everything. This file turns messages into its calls, reports streams and members
that end, and calls it when time alone changes something. Outgoing messages are collected and sent
at the end of the event loop's turn. A peer that does not read is disconnected at a bound, and
starts over on another stream. Owned by the router's service.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from itertools import count
from typing import TYPE_CHECKING, Final, cast

from msgspec.structs import replace

from pdserve.blocks.hashing import SHORT_HASH_BYTES
from pdserve.errors import Draining, Overloaded, PdserveError, WorkerLost
from pdserve.messages.handoff import (
    PREFILL_QUEUE,
    PREFILL_TOPIC,
    CancelItem,
    ClaimEnded,
    CreditOffer,
    EnqueueItem,
    ItemRefused,
    QueueReport,
    ToQueue,
)
from pdserve.router.prefill_queue.queue import PrefillQueue, PrefillQueueConfig, QueueStreamId
from pdserve.runtime.peers.handlers import accepts
from pdserve.runtime.registry import MemberGone
from pdserve.wire.codec import decoder, encode

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from pdserve.ids import NodeId, Seconds
    from pdserve.messages.handoff import FromQueue, PrefillItem, QueueState
    from pdserve.net.base import IncomingStream
    from pdserve.net.timers import Timer
    from pdserve.runtime.node import Node
    from pdserve.runtime.registry import MemberEvent
    from pdserve.runtime.topics.service import Topics
    from pdserve.wire.parser import Buffer

__all__ = ["PrefillQueueService"]

_log = logging.getLogger(__name__)

_WINDOW: Final = 4 << 20
"""Credit for a worker's messages."""
_MOST_WAITING: Final = 16_384
"""Most messages for a worker that does not read; one more ends its stream."""
_REPORT: Final[Seconds] = 0.05
"""Least time between two reports."""
_MOST_MODELS: Final = 256
"""Most queues; an item of one more model is refused."""

_decode: Callable[[Buffer], ToQueue] = decoder(cast("Any", ToQueue))


class PrefillQueueService:
    """Owns a router's prefill queues, one for each model, their streams to workers, and their
    timer."""

    def __init__(
        self,
        node: Node,
        topics: Topics,
        *,
        overlap: Callable[[Seconds, PrefillItem], Mapping[NodeId, int]],
        claimed: Callable[[Seconds, PrefillItem, QueueStreamId], None],
        config: PrefillQueueConfig | None = None,
    ) -> None:
        """`overlap`: the tokens of an item's prompt that each prefill worker has cached. `claimed`:
        called when a prefill worker claims an item."""
        self.draining = False
        """New items are refused."""
        self._node = node
        self._overlap = overlap
        self._claimed = claimed
        self._config = config or PrefillQueueConfig()
        self._report = topics.publish_state(PREFILL_TOPIC, encode, interval=_REPORT)
        self._queues: dict[str, PrefillQueue] = {}
        self._streams: dict[QueueStreamId, _Stream] = {}
        self._numbers = count(1)
        self._past: Counter[str] = Counter()
        """Counters of queues that are gone, and of what no queue has heard."""
        self._due: dict[_Stream, None] = {}
        """Streams that have something to send."""
        self._settles = False
        self._timer: Timer | None = None
        self._timer_at: Seconds = 0.0
        self._tell_at: Seconds = 0.0
        """No report before that."""
        self._told: Timer | None = None
        """Runs while one is due."""
        node.host(self)
        self._deaf = node.on_member(self._on_member)

    # ------------------------------------------------------------------ looking

    def states(self) -> dict[str, QueueState]:
        """The state of each model's queue."""
        return {model: queue.state() for model, queue in sorted(self._queues.items())}

    def state(self, model: str) -> QueueState | None:
        """The state of one model's queue; None: it has none."""
        queue = self._queues.get(model)
        return None if queue is None else queue.state()

    @property
    def counters(self) -> Counter[str]:
        """Counts of events of all queues since the start, also of queues that are gone."""
        total = Counter(self._past)
        for queue in self._queues.values():
            total.update(queue.counters)
        return total

    @property
    def streams(self) -> int:
        """Number of workers connected."""
        return len(self._streams)

    # ------------------------------------------------------------------ ending

    def drain(self) -> None:
        """Refuse new items; decode workers pass waiting ones to the next owner, and claims go
        on."""
        self.draining = True
        for queue in self._queues.values():
            queue.refuse_all("draining")
        self._settle_soon()

    def undo_drain(self) -> None:
        """Take items again."""
        self.draining = False

    def close(self) -> None:
        """End all streams; their workers turn to other routers. Idempotent."""
        self.draining = True
        self._deaf()
        for stream in tuple(self._streams.values()):
            stream.cut(Draining("this router is draining", retry_after=1.0))
        for timer in (self._timer, self._told):
            if timer is not None:
                timer.cancel()
        self._timer = self._told = None

    # ------------------------------------------------------------------ streams

    @accepts(PREFILL_QUEUE)
    def _opened(self, incoming: IncomingStream, body: Buffer) -> None:
        """A worker's new stream. Raises `Overloaded`."""
        peer = incoming.link.peer
        number = next(self._numbers)
        stream = _Stream(self, incoming, QueueStreamId(peer.node, peer.epoch, number))
        self._streams[stream.peer] = stream
        try:
            incoming.accept(stream, window=_WINDOW)
        except Overloaded:
            self._streams.pop(stream.peer, None)
            raise

    def ended(self, stream: _Stream) -> None:
        """A stream has ended: its items are dropped, its claims go to others."""
        if self._streams.pop(stream.peer, None) is None:
            return
        self._due.pop(stream, None)
        now = self._node.now()
        for queue in self._queues.values():
            queue.peer_gone(now, stream.peer)
        self._settle_soon()

    def take(self, stream: _Stream, message: ToQueue) -> None:
        """Handle a worker's message."""
        now, peer = self._node.now(), stream.peer
        if isinstance(message, EnqueueItem):
            self._enqueue(now, peer, message.item)
        elif isinstance(message, CancelItem):
            for queue in self._queues.values():
                if queue.cancel(peer, message.request, message.round):
                    break
        elif isinstance(message, CreditOffer):
            self._offer(now, peer, message)
        elif isinstance(message, ClaimEnded):
            for queue in self._queues.values():
                if queue.ended(now, peer, message.claim, message.outcome):
                    break
        self._settle_soon()

    def _enqueue(self, now: Seconds, peer: QueueStreamId, item: PrefillItem) -> None:
        queue = None if self.draining else self._queue(item.model)
        if queue is None:
            reason = "draining" if self.draining else "too_many_models"
            self._past[f"refused_{reason}"] += 1
            self._past["enqueued"] += 1
            self._send(peer, ItemRefused(item.request, item.round, reason))
            return
        if len(item.names) % SHORT_HASH_BYTES:
            _log.warning("%s sent block hashes of %d bytes; ignored", peer.node, len(item.names))
            item = replace(item, names=b"")
        queue.enqueue(now, peer, item)

    def _offer(self, now: Seconds, peer: QueueStreamId, offer: CreditOffer) -> None:
        queue = self._queue(offer.model)
        if queue is None:
            return
        queue.offer(now, peer, offer)
        member = self._node.registry.get(peer.node)
        if member is not None and member.card is not None and member.card.draining:
            queue.leaving(now, peer.node, peer.epoch)

    def _queue(self, model: str) -> PrefillQueue | None:
        queue = self._queues.get(model)
        if queue is None and len(self._queues) < _MOST_MODELS:
            queue = self._queues[model] = PrefillQueue(
                model,
                self._send,
                self._numbers,
                overlap=self._overlap,
                claimed=self._claimed,
                config=self._config,
            )
        return queue

    # ------------------------------------------------------------------ what a turn brings

    def _send(self, peer: QueueStreamId, message: FromQueue) -> None:
        stream = self._streams.get(peer)
        if stream is not None:  # else: it has just ended, and with it all that it had
            stream.waiting.append(encode(message))
            self._due[stream] = None
            self._settle_soon()

    def _settle_soon(self) -> None:
        if not self._settles:
            self._settles = True
            self._node.call_soon(self._settle)

    def _settle(self) -> None:
        """At the end of a turn of the event loop: send, report, and set the timer."""
        self._settles = False
        due, self._due = tuple(self._due), {}
        for stream in due:
            stream.flush()
        for model in [model for model, queue in self._queues.items() if queue.idle]:
            self._past.update(self._queues.pop(model).counters)
        self._tell()
        self._arm()

    def _tell(self) -> None:
        """Publish the report, or set a timer if one was just published."""
        now = self._node.now()
        if self._told is not None:
            return
        if now >= self._tell_at:
            self._tell_at = now + _REPORT
            self._report.set(QueueReport(queues=self.states()))
        else:
            self._told = self._node.timers.call_at(self._tell_at, self._tell_late)

    def _tell_late(self) -> None:
        self._told = None
        self._tell()

    def _arm(self) -> None:
        looks = (queue.next_look() for queue in self._queues.values())
        when = min((look for look in looks if look is not None), default=None)
        if when is None or (self._timer is not None and self._timer_at <= when):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = when
        self._timer = self._node.timers.call_at(when, self._look)

    def _look(self) -> None:
        self._timer = None
        now = self._node.now()
        for queue in self._queues.values():
            queue.look(now)
        self._settle_soon()

    # ------------------------------------------------------------------ members

    def _on_member(self, event: MemberEvent) -> None:
        member = event.member
        if member.role != "worker":
            return
        if isinstance(event, MemberGone):  # its connection may stand for long
            error = WorkerLost(f"{member.node} was declared dead, and its work was dropped")
            for stream in tuple(self._streams.values()):
                if stream.peer[:2] == (member.node, member.epoch):
                    stream.cut(error)
        elif member.card is not None:
            for queue in self._queues.values():
                mark = queue.leaving if member.card.draining else queue.staying
                mark(self._node.now(), member.node, member.epoch)
            self._settle_soon()


class _Stream:
    """One worker's stream; implements `net.base.StreamSink`."""

    def __init__(
        self, owner: PrefillQueueService, incoming: IncomingStream, peer: QueueStreamId
    ) -> None:
        self.peer = peer
        self.waiting: deque[bytes] = deque()
        """Messages for the worker."""
        self._owner = owner
        self._incoming = incoming
        self._over = False

    def flush(self) -> None:
        """Send as much as the worker takes."""
        waiting, incoming = self.waiting, self._incoming
        try:
            while waiting and not self._over and incoming.try_send(waiting[0]):
                waiting.popleft()
        except PdserveError:  # the stream has ended: `on_end` is on its way
            return
        if len(waiting) > _MOST_WAITING:
            _log.warning("%s does not read the prefill queue's messages", self.peer.node)
            self.cut(Overloaded("the worker does not read", retry_after=1.0))

    def cut(self, error: PdserveError) -> None:
        """End the stream with an error for the worker."""
        if not self._over:
            self._finish()
            self._incoming.abort(error)

    def _finish(self) -> None:
        self._over = True
        self.waiting.clear()
        self._owner.ended(self)

    def on_data(self, body: Buffer) -> None:
        """Handle a message. Any failure ends the stream at this end too."""
        try:
            self._owner.take(self, _decode(body))
        except PdserveError as error:
            _log.warning("prefill queue, %s: %s", self.peer.node, error)
            self.cut(error)
        except Exception:
            _log.exception("prefill queue, %s", self.peer.node)
            self.cut(Overloaded("the prefill queue has failed", retry_after=1.0))

    def on_end(self, error: BaseException | None) -> None:
        """The worker has left, or is lost."""
        if not self._over:
            self._finish()
        self._incoming.end()

    def on_unblocked(self) -> None:
        self.flush()

"""The decode worker's client of the prefill queues: enqueues prompts, also across router changes.

    enqueue ─┬─ on_owner ── sent ── on_queued ─┬─ opened       an attempt is open: the item is done
             │     ▲                           ├─ cancel       the item is no longer wanted
             │     └── owner or stream lost ───┤
             └─ on_refused ────────────────────┘               once, the end

A model's queue belongs to one router (`queue_owner`). When that router dies, drains or stops being
the owner, or when its stream breaks, all its items are enqueued again under the next round. Before
each sending `on_owner` names the router life whose claims are valid from then on. Waiting is
bounded: without a reachable router, items are refused here, with the reason.

It knows neither engines nor attempts. Owned by the worker's node; `close` it before the node.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from pdserve.ids import NodeLife
from pdserve.messages.handoff import (
    PREFILL_TOPIC,
    CancelItem,
    EnqueueItem,
    ItemQueued,
    ItemRefused,
    QueueReport,
)
from pdserve.runtime.registry import MemberGone
from pdserve.wire.codec import decoder
from pdserve.worker.disagg.queue.connection import QueueConnection
from pdserve.worker.disagg.queue.owner import owner_candidates, queue_owner

if TYPE_CHECKING:
    from pdserve.ids import Bytes, NodeId, Seconds
    from pdserve.messages.handoff import FromQueue, PrefillItem, QueueState
    from pdserve.net.timers import Timer
    from pdserve.runtime.node import Node
    from pdserve.runtime.registry import Member, MemberEvent
    from pdserve.runtime.topics.service import Topics
    from pdserve.worker.disagg.ports import QueueListener

__all__ = ["PrefillQueueClient"]

_log = logging.getLogger(__name__)

_REACH: Final[Seconds] = 2.0
"""Seconds after which an item that could not be sent is refused: prefilling it here is faster."""
_MOST: Final = 4096
"""Maximum number of items; a queue takes as many."""
_NAMES: Final[Bytes] = 64 * 1024
"""Maximum bytes of block hashes in an item; beyond such a long prefix more hashes hardly change the
choice of a worker."""

_decode_report = decoder(QueueReport)


class _Entry:
    """One item, waiting to be sent or in a queue."""

    __slots__ = ("connection", "deadline", "first", "item", "listener", "round", "sent", "timer")

    def __init__(self, item: PrefillItem, listener: QueueListener, now: Seconds) -> None:
        self.item = item
        self.listener = listener
        self.round = item.round
        """The round in which it was or will be sent."""
        self.first = now - item.waited
        self.deadline = None if item.deadline is None else now + item.deadline
        self.connection: QueueConnection | None = None
        """The connection it was or will be sent on."""
        self.sent = False
        """True if it was sent to that router in this round."""
        self.timer: Timer | None = None
        """Runs while the item is not sent."""

    def stop(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class PrefillQueueClient:
    """The client for all queues of one decode worker; implements `ports.PrefillQueuePort`."""

    def __init__(self, node: Node, topics: Topics) -> None:
        self.refused: Counter[str] = Counter()
        """Number of refused items, by reason."""
        self.resubmitted = 0
        """Number of times an item was sent again to a router."""
        self._node = node
        self._entries: dict[int, _Entry] = {}
        self._connections: dict[NodeId, QueueConnection] = {}
        """Connections to routers that have been owners."""
        self._reports: dict[NodeId, QueueReport] = {}
        self._leaving: set[NodeLife] = set()
        """Routers that said that they drain; their cards will say so too."""
        self._known: list[Member] | None = None
        """Routers that may own queues; None if membership has changed since."""
        self._refreshes = False
        self._closed = False
        self._deaf = node.on_member(self._on_member)
        self._subscription = topics.subscribe_state(
            PREFILL_TOPIC, _decode_report, self._on_report, self._on_report_gone
        )

    # ------------------------------------------------------------------ the port

    def __len__(self) -> int:
        """Number of items queued or waiting to be sent."""
        return len(self._entries)

    def state(self, model: str) -> QueueState | None:
        """The state of the model's queue as its owner last reported it; None if there is no owner
        or it knows no prefill worker."""
        found = self._owner(model)
        report = None if found is None else self._reports.get(found.node)
        state = None if report is None else report.queues.get(model)
        return None if state is None or not state.workers else state

    def enqueue(self, item: PrefillItem, listener: QueueListener) -> None:
        """Queues an item; replaces an earlier one of the same request, whose listener gets no
        further calls. `item.round` must be higher than any round that the earlier one was given."""
        old = self._entries.pop(item.request, None)
        if old is not None:
            old.stop()
        entry = _Entry(item, listener, self._node.now())
        if self._closed or len(self._entries) >= _MOST:
            self._tell_refused(entry, "no_router" if self._closed else "too_many")
            return
        self._entries[item.request] = entry
        self._place(entry)
        if old is not None and not (entry.sent and entry.connection is old.connection):
            self._take_back(old)  # else the router puts the one in the place of the other

    def cancel(self, request: int) -> None:
        """Takes the item out of the queue; its listener gets no further calls. No effect on unknown
        items."""
        entry = self._entries.pop(request, None)
        if entry is not None:
            entry.stop()
            self._take_back(entry)

    def opened(self, request: int) -> None:
        """Drops the item because an attempt is open; its listener gets no further calls, even if
        the queue's owner changes."""
        entry = self._entries.pop(request, None)
        if entry is not None:
            entry.stop()

    def close(self) -> None:
        """Refuses every item, and all later ones. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._deaf()
        self._subscription.close()
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()
        for entry in tuple(self._entries.values()):
            self._refuse(entry, "no_router")

    # ------------------------------------------------------------------ where it goes

    def _owner(self, model: str) -> Member | None:
        if self._known is None:
            members = self._node.registry.by_role("router")
            leaving = self._leaving
            self._known = owner_candidates(
                m for m in members if NodeLife(m.node, m.epoch) not in leaving
            )
        return queue_owner(model, self._known)

    def _place(self, entry: _Entry) -> None:
        """Sends the item to the queue's owner, now or when there is a stream; refuses it if there
        is no owner."""
        found = self._owner(entry.item.model)
        if found is None:
            self._refuse(entry, "no_router")
            return
        entry.connection = connection = self._connection(found)
        if connection.open:
            self._send(entry, connection)
        else:
            self._give_time(entry)

    def _connection(self, router: Member) -> QueueConnection:
        connection = self._connections.get(router.node)
        if connection is not None and connection.epoch == router.epoch:
            return connection
        if connection is not None:
            connection.close()
        connection = self._connections[router.node] = QueueConnection(
            self._node, router.node, router.epoch, self
        )
        return connection

    def _give_time(self, entry: _Entry) -> None:
        if entry.timer is None:
            entry.timer = self._node.timers.call_later(
                _REACH, lambda: self._refuse(entry, "router_unreachable")
            )

    def _send(self, entry: _Entry, connection: QueueConnection) -> None:
        """Sends an item. Only items that were here before wait for a router that does not read; new
        ones are refused."""
        entry.stop()
        now, item = self._node.now(), entry.item
        left = None if entry.deadline is None else entry.deadline - now
        if left is not None and left <= 0:
            self._refuse(entry, "deadline")
            return
        if not connection.sendable and entry.round == item.round:
            self._refuse(entry, "congested")
            return
        entry.listener.on_owner(connection.router, connection.epoch, entry.round)
        if self._entries.get(item.request) is not entry:
            return  # the listener has thought better of it
        entry.sent = True
        waited = max(0.0, now - entry.first)
        sending = replace(
            item, round=entry.round, deadline=left, waited=waited, names=item.names[:_NAMES]
        )
        connection.post(EnqueueItem(sending))

    def _move(self, entry: _Entry) -> None:
        """Moves the item to the present owner, under the next round if it may be in a queue
        already."""
        self._take_back(entry)
        if entry.sent:
            entry.sent = False
            entry.round += 1
            self.resubmitted += 1
        self._place(entry)

    def _take_back(self, entry: _Entry) -> None:
        if entry.sent and entry.connection is not None:
            entry.connection.post(CancelItem(entry.item.request, entry.round))

    def _refuse(self, entry: _Entry, reason: str) -> None:
        """Refuses the item, unless it has ended."""
        if self._entries.get(entry.item.request) is entry:
            del self._entries[entry.item.request]
            entry.stop()
            self._tell_refused(entry, reason)

    def _tell_refused(self, entry: _Entry, reason: str) -> None:
        self.refused[reason] += 1
        entry.listener.on_refused(reason)

    def _at(self, connection: QueueConnection) -> list[_Entry]:
        return [entry for entry in self._entries.values() if entry.connection is connection]

    # ------------------------------------------------------------------ what the connection says

    def on_open(self, connection: QueueConnection) -> None:
        for entry in self._at(connection):
            if self._entries.get(entry.item.request) is entry:
                self._send(entry, connection)

    def on_lost(self, connection: QueueConnection) -> None:
        """Schedules all items of the broken stream to be sent again: the router has dropped
        them."""
        for entry in self._at(connection):
            if entry.sent:
                entry.sent = False
                entry.round += 1
                self.resubmitted += 1
            self._give_time(entry)
        self._refresh_soon()

    def on_message(self, connection: QueueConnection, message: FromQueue) -> None:
        if not isinstance(message, ItemQueued | ItemRefused):
            return  # for prefill workers
        entry = self._entries.get(message.request)
        if entry is None or entry.connection is not connection or entry.round != message.round:
            return  # it was on its way when the item moved, or was cancelled
        if isinstance(message, ItemQueued):
            entry.listener.on_queued(connection.router, connection.epoch)
        elif message.reason == "draining":
            entry.sent = False
            entry.round += 1
            self._leaving.add(NodeLife(connection.router, connection.epoch))
            self._known = None
            self._place(entry)
            self._refresh_soon()
        else:
            self._refuse(entry, message.reason)

    def on_room(self, connection: QueueConnection) -> None:
        """Does nothing: no message waits, because an item that could not be sent was refused."""

    # ------------------------------------------------------------------ what changes

    def _on_member(self, event: MemberEvent) -> None:
        member = event.member
        if member.role != "router":
            return
        self._known = None
        if isinstance(event, MemberGone):
            self._leaving.discard(NodeLife(member.node, member.epoch))
            connection = self._connections.get(member.node)
            if connection is not None and connection.epoch == member.epoch:
                del self._connections[member.node]
                connection.close()
        self._refresh_soon()

    def _refresh_soon(self) -> None:
        """Schedules `_refresh` for the end of this event-loop turn: membership events often come
        together."""
        if not self._refreshes and not self._closed:
            self._refreshes = True
            self._node.call_soon(self._refresh)

    def _refresh(self) -> None:
        """Moves every item that is not with its queue's owner."""
        self._refreshes = False
        if self._closed:
            return
        for entry in tuple(self._entries.values()):
            if self._entries.get(entry.item.request) is not entry:
                continue
            found, connection = self._owner(entry.item.model), entry.connection
            if found is None or connection is None:
                self._move(entry)
            elif (connection.router, connection.epoch) != (found.node, found.epoch):
                _log.info(
                    "request %d goes from the queue of %s to that of %s",
                    entry.item.request,
                    connection.router,
                    found.node,
                )
                self._move(entry)

    def _on_report(self, member: Member, report: QueueReport) -> None:
        self._reports[member.node] = report

    def _on_report_gone(self, member: Member) -> None:
        self._reports.pop(member.node, None)

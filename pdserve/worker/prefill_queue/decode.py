"""A decode worker's end of the prefill queue: prompts go in, and stay in while routers come and go.

    enqueue ─┬─ on_owner ── sent ── on_queued ─┬─ opened       an attempt is open: out of our hands
             │     ▲                           ├─ cancel       nobody wants it
             │     └── owner or stream lost ───┤
             └─ on_refused ────────────────────┘               once, the end

A model's queue belongs to one router (`owner`). When that router dies, drains, is no longer the
owner, or the stream to it breaks, whatever is here is handed in again under the next round; before
each sending the listener hears whom a claim must come from from now on. Nothing waits for ever:
without a router, or one that can be reached, items are refused here, with the reason.

It knows neither engines nor attempts. Owned by the worker's node; `close` before the node.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import TYPE_CHECKING, Final, Protocol

from msgspec.structs import replace

from pdserve.messages.handoff import PREFILL, Cancel, Enqueue, Queued, QueueReport, Refused
from pdserve.runtime.registry import Gone
from pdserve.wire.codec import decoder
from pdserve.worker.prefill_queue.cord import Cord
from pdserve.worker.prefill_queue.owner import candidates, owner

if TYPE_CHECKING:
    from pdserve.ids import Bytes, Epoch, NodeId, Seconds
    from pdserve.messages.handoff import FromQueue, PrefillItem, QueueState
    from pdserve.net.timers import Timer
    from pdserve.runtime.node import Node
    from pdserve.runtime.registry import Member, MemberEvent
    from pdserve.runtime.topics.service import Topics

__all__ = ["Listener", "PrefillQueue"]

_log = logging.getLogger(__name__)

_REACH: Final[Seconds] = 2.0
"""An item that could not be sent within this is refused: its prompt is better computed here."""
_MOST: Final = 4096
"""Items in all: as many as a queue takes."""
_NAMES: Final[Bytes] = 64 * 1024
"""Of names in an item: beyond so long a prefix it hardly matters who has how much."""

_decode_report = decoder(QueueReport)


class Listener(Protocol):
    """Who waits for an item. Called from within `enqueue` too; may call `enqueue` and `cancel`."""

    def on_owner(self, owner: NodeId, epoch: Epoch, round: int) -> None:
        """From now on only a claim of this life of this router, for this round, is good. Called
        before each sending."""
        ...

    def on_queued(self, owner: NodeId, epoch: Epoch) -> None:
        """It has the item."""
        ...

    def on_refused(self, reason: str) -> None:
        """Nobody has it; nothing more is heard. One word: `no_router`, `router_unreachable`,
        `congested`, `too_many`, `deadline`, or what the router says (`router.prefill.queue`)."""
        ...


class _Entry:
    """One item, on its way or in a queue."""

    __slots__ = ("cord", "deadline", "first", "item", "listener", "round", "sent", "timer")

    def __init__(self, item: PrefillItem, listener: Listener, now: Seconds) -> None:
        self.item = item
        self.listener = listener
        self.round = item.round
        """Under which it was, or will be, sent."""
        self.first = now - item.waited
        self.deadline = None if item.deadline is None else now + item.deadline
        self.cord: Cord | None = None
        """Where it is, or is to go."""
        self.sent = False
        """That router has been sent it, under this round."""
        self.timer: Timer | None = None
        """Runs while it is not sent."""

    def stop(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class PrefillQueue:
    """See above."""

    def __init__(self, node: Node, topics: Topics) -> None:
        self.refused: Counter[str] = Counter()
        """Items, by reason."""
        self.resubmitted = 0
        """Sendings of an item that some router had been sent before."""
        self._node = node
        self._entries: dict[int, _Entry] = {}
        self._cords: dict[NodeId, Cord] = {}
        """To routers that have been owners."""
        self._reports: dict[NodeId, QueueReport] = {}
        self._leaving: set[tuple[NodeId, Epoch]] = set()
        """Routers that have said that they drain; their cards will say it too."""
        self._known: list[Member] | None = None
        """Who may own queues; None: something has changed since."""
        self._refreshes = False
        self._closed = False
        self._deaf = node.on_member(self._on_member)
        self._subscription = topics.subscribe_state(
            PREFILL, _decode_report, self._on_report, self._on_report_gone
        )

    # ------------------------------------------------------------------ the port

    def __len__(self) -> int:
        """Items in, or on their way to, a queue."""
        return len(self._entries)

    def state(self, model: str) -> QueueState | None:
        """What the owner of a model's queue last said of it; None: there is no owner, or it knows
        of no prefill worker."""
        found = self._owner(model)
        report = None if found is None else self._reports.get(found.node)
        state = None if report is None else report.queues.get(model)
        return None if state is None or not state.workers else state

    def enqueue(self, item: PrefillItem, listener: Listener) -> None:
        """Hand it in, in place of an earlier one of the same request, whose listener hears nothing
        more. `item.round` must be higher than any of which that one has heard."""
        old = self._entries.pop(item.request, None)
        if old is not None:
            old.stop()
        entry = _Entry(item, listener, self._node.now())
        if self._closed or len(self._entries) >= _MOST:
            self._tell_refused(entry, "no_router" if self._closed else "too_many")
            return
        self._entries[item.request] = entry
        self._place(entry)
        if old is not None and not (entry.sent and entry.cord is old.cord):
            self._take_back(old)  # else the router puts the one in the place of the other

    def cancel(self, request: int) -> None:
        """Nobody wants it any more; the listener hears nothing more. Nothing happens if it is not
        here."""
        entry = self._entries.pop(request, None)
        if entry is not None:
            entry.stop()
            self._take_back(entry)

    def opened(self, request: int) -> None:
        """A prefill worker has claimed it and an attempt is open: the queue has no more to do with
        it, whatever becomes of its owner. The listener hears nothing more."""
        entry = self._entries.pop(request, None)
        if entry is not None:
            entry.stop()

    def close(self) -> None:
        """Refuse whatever is here, and everything from now on. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._deaf()
        self._subscription.close()
        for cord in self._cords.values():
            cord.cut()
        self._cords.clear()
        for entry in tuple(self._entries.values()):
            self._refuse(entry, "no_router")

    # ------------------------------------------------------------------ where it goes

    def _owner(self, model: str) -> Member | None:
        if self._known is None:
            members = self._node.registry.by_role("router")
            leaving = self._leaving
            self._known = candidates(m for m in members if (m.node, m.epoch) not in leaving)
        return owner(model, self._known)

    def _place(self, entry: _Entry) -> None:
        """Send it to the owner, or as soon as there is a stream; or refuse it."""
        found = self._owner(entry.item.model)
        if found is None:
            self._refuse(entry, "no_router")
            return
        entry.cord = cord = self._cord(found)
        if cord.open:
            self._send(entry, cord)
        else:
            self._give_time(entry)

    def _cord(self, router: Member) -> Cord:
        cord = self._cords.get(router.node)
        if cord is not None and cord.epoch == router.epoch:
            return cord
        if cord is not None:
            cord.cut()
        cord = self._cords[router.node] = Cord(self._node, router.node, router.epoch, self)
        return cord

    def _give_time(self, entry: _Entry) -> None:
        if entry.timer is None:
            entry.timer = self._node.timers.call_later(
                _REACH, lambda: self._refuse(entry, "router_unreachable")
            )

    def _send(self, entry: _Entry, cord: Cord) -> None:
        """What is here already waits for a router that does not read; what comes anew does not."""
        entry.stop()
        now, item = self._node.now(), entry.item
        left = None if entry.deadline is None else entry.deadline - now
        if left is not None and left <= 0:
            self._refuse(entry, "deadline")
            return
        if not cord.sendable and entry.round == item.round:
            self._refuse(entry, "congested")
            return
        entry.listener.on_owner(cord.router, cord.epoch, entry.round)
        if self._entries.get(item.request) is not entry:
            return  # the listener has thought better of it
        entry.sent = True
        waited = max(0.0, now - entry.first)
        sending = replace(
            item, round=entry.round, deadline=left, waited=waited, names=item.names[:_NAMES]
        )
        cord.post(Enqueue(sending))

    def _move(self, entry: _Entry) -> None:
        """To wherever it belongs now, under the next round if the last one may be in a queue."""
        self._take_back(entry)
        if entry.sent:
            entry.sent = False
            entry.round += 1
            self.resubmitted += 1
        self._place(entry)

    def _take_back(self, entry: _Entry) -> None:
        if entry.sent and entry.cord is not None:
            entry.cord.post(Cancel(entry.item.request, entry.round))

    def _refuse(self, entry: _Entry, reason: str) -> None:
        """The end of it, unless it has ended."""
        if self._entries.get(entry.item.request) is entry:
            del self._entries[entry.item.request]
            entry.stop()
            self._tell_refused(entry, reason)

    def _tell_refused(self, entry: _Entry, reason: str) -> None:
        self.refused[reason] += 1
        entry.listener.on_refused(reason)

    def _at(self, cord: Cord) -> list[_Entry]:
        return [entry for entry in self._entries.values() if entry.cord is cord]

    # ------------------------------------------------------------------ cord.Carries

    def on_open(self, cord: Cord) -> None:
        for entry in self._at(cord):
            if self._entries.get(entry.item.request) is entry:
                self._send(entry, cord)

    def on_lost(self, cord: Cord) -> None:
        """The router has dropped what it had of us: hand it in again once there is a stream."""
        for entry in self._at(cord):
            if entry.sent:
                entry.sent = False
                entry.round += 1
                self.resubmitted += 1
            self._give_time(entry)
        self._refresh_soon()

    def on_message(self, cord: Cord, message: FromQueue) -> None:
        if not isinstance(message, Queued | Refused):
            return  # for prefill workers
        entry = self._entries.get(message.request)
        if entry is None or entry.cord is not cord or entry.round != message.round:
            return  # it was on its way when the item moved, or was cancelled
        if isinstance(message, Queued):
            entry.listener.on_queued(cord.router, cord.epoch)
        elif message.reason == "draining":
            entry.sent = False
            entry.round += 1
            self._leaving.add((cord.router, cord.epoch))
            self._known = None
            self._place(entry)
            self._refresh_soon()
        else:
            self._refuse(entry, message.reason)

    def on_room(self, cord: Cord) -> None:
        """Nothing waits: what could not be sent was refused."""

    # ------------------------------------------------------------------ what changes

    def _on_member(self, event: MemberEvent) -> None:
        member = event.member
        if member.role != "router":
            return
        self._known = None
        if isinstance(event, Gone):
            self._leaving.discard((member.node, member.epoch))
            cord = self._cords.get(member.node)
            if cord is not None and cord.epoch == member.epoch:
                del self._cords[member.node]
                cord.cut()
        self._refresh_soon()

    def _refresh_soon(self) -> None:
        """At the end of this turn: one event seldom comes alone."""
        if not self._refreshes and not self._closed:
            self._refreshes = True
            self._node.call_soon(self._refresh)

    def _refresh(self) -> None:
        """Whatever is with another than its owner moves."""
        self._refreshes = False
        if self._closed:
            return
        for entry in tuple(self._entries.values()):
            if self._entries.get(entry.item.request) is not entry:
                continue
            found, cord = self._owner(entry.item.model), entry.cord
            if found is None or cord is None:
                self._move(entry)
            elif (cord.router, cord.epoch) != (found.node, found.epoch):
                _log.info(
                    "request %d goes from the queue of %s to that of %s",
                    entry.item.request,
                    cord.router,
                    found.node,
                )
                self._move(entry)

    def _on_report(self, member: Member, report: QueueReport) -> None:
        self._reports[member.node] = report

    def _on_report_gone(self, member: Member) -> None:
        self._reports.pop(member.node, None)

"""The router role on a node: questions in, answers out, and what keeps its view true.

    serves      Route, Release
    follows     load, sequences and KV events of workers, bookings of other routers
    publishes   its own bookings

Everything is decided by `desk`; this file turns messages and topics into calls of it. Owned by
whoever starts the role; `close` before the node.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final, TypeVar

from msgspec.structs import replace

from pdserve.messages.kv import KV
from pdserve.messages.routing import (
    BOOKINGS,
    LOAD,
    SEQUENCES,
    Booked,
    Release,
    Route,
    Routed,
    WorkerLoad,
    booking_key,
    booking_of,
)
from pdserve.router.bookings import Life
from pdserve.router.desk import Desk
from pdserve.router.pool import Facts
from pdserve.runtime.methods import RELEASE, ROUTE
from pdserve.runtime.models import catalogue
from pdserve.runtime.registry import Changed, Gone
from pdserve.runtime.topics.sets import SetView
from pdserve.wire.codec import decoder, encode

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from pdserve.ids import NodeId, Seconds
    from pdserve.messages.node import NodeCard
    from pdserve.net.base import Call, Link
    from pdserve.observe.degraded import Degradations
    from pdserve.router.bookings import Booking, End
    from pdserve.router.config import RouterConfig
    from pdserve.router.policies.base import Policy
    from pdserve.runtime.node import Node
    from pdserve.runtime.registry import Member, MemberEvent
    from pdserve.runtime.topics.service import Topics
    from pdserve.wire.parser import Buffer

__all__ = ["RouterService"]

_log = logging.getLogger(__name__)

T = TypeVar("T")

_SETTLE: Final[Seconds] = 0.3
"""A router that has joined hears of workers and their load before frontends ask it."""

_decode_load = decoder(WorkerLoad)
_decode_booked = decoder(Booked)
_decode_release = decoder(Release)


class RouterService:
    """See above. Needs a node; `open` once it has joined."""

    def __init__(
        self,
        config: RouterConfig,
        policy: Policy,
        node: Node,
        topics: Topics,
        card: NodeCard,
        degradations: Degradations,
    ) -> None:
        """`card` is what every node says of itself."""
        self.desk = Desk(config, policy, node.random, self._booking_ended)
        self._config = config
        self._node = node
        self._degradations = degradations
        self._bookings = topics.publish_set(BOOKINGS)
        self._card = replace(card, topics=topics.names)
        self._conflicts: Mapping[NodeId, str] = {}
        self._conflict_words = ""
        self._blind: frozenset[NodeId] = frozenset()
        """Workers whose content is guessed."""
        self.routed = 0
        self.refused = 0
        self.released = 0
        """Answers that frontends have given back: each one once, unless a message was lost."""
        node.serve(ROUTE, self._route)
        node.serve_tell(RELEASE, self._released)
        node.on_member(self._on_member)
        topics.subscribe_state(LOAD, _decode_load, self._on_load, self._on_load_gone)
        topics.subscribe_log(SEQUENCES, self._follow_sequences)
        topics.subscribe_log(BOOKINGS, self._follow_bookings)
        topics.subscribe_log(KV, self.desk.index.target)
        self._sweep()

    def open(self) -> None:
        """The node has joined: be there for frontends, once the view has settled."""
        self._node.timers.call_later(_SETTLE, lambda: self._node.publish_card(self._card, {}))

    def drain(self) -> None:
        """Frontends ask others from now on, if there are any."""
        self._card = replace(self._card, draining=True)
        self._node.publish_card(self._card, {})

    def unready_reason(self) -> str | None:
        """For probes: a router can always answer, if only that there is no worker."""
        return None if self._node.lives else "joining the cluster"

    # ------------------------------------------------------------------ frontends

    def _route(self, question: Route, call: Call) -> Routed:
        peer = call.link.peer
        asker = Life(peer.node, peer.epoch)
        try:
            booking = self.desk.route(self._node.now(), asker, question)
        except Exception:
            self.refused += 1
            raise
        self.routed += 1
        self._bookings.put(booking_key(booking.id), encode(booking.record))
        return Routed(booking.worker.node, booking.worker.epoch, booking.id)

    def _released(self, link: Link, body: Buffer) -> None:
        booking = _decode_release(body).booking
        self.released += 1
        self.desk.bookings.release(booking)

    def _booking_ended(self, booking: Booking, why: End) -> None:
        self._bookings.drop(booking_key(booking.id))

    # ------------------------------------------------------------------ members

    def _on_member(self, event: MemberEvent) -> None:
        member, now = event.member, self._node.now()
        life = Life(member.node, member.epoch)
        if isinstance(event, Gone):
            self.desk.gone(now, life)
            self._judge_index()
        elif member.role == "router":
            self.desk.bookings.peer_up(life)
        if member.role == "worker":
            if not isinstance(event, Changed) or event.before.card is not member.card:
                self._judge_models()
            if not isinstance(event, Gone):
                self._tell_desk(member)

    def _judge_models(self) -> None:
        """A worker that offers another model under a taken name gets no requests."""
        conflicts = catalogue(self._node.registry).conflicts
        changed = {*conflicts, *self._conflicts} if conflicts != self._conflicts else ()
        self._conflicts = conflicts
        for node in changed:
            member = self._node.registry.get(node)
            if member is not None:
                self._tell_desk(member)
        words = "; ".join(f"worker {node}: {why}" for node, why in sorted(conflicts.items()))
        if words != self._conflict_words:
            self._conflict_words = words
            self._degradations.clear("model_conflict")
            if words:
                self._degradations.add("model_conflict", words)

    def _tell_desk(self, member: Member) -> None:
        facts = Facts.of(member)
        if member.node in self._conflicts:
            facts = Facts(facts.worker, ())
        self.desk.worker(self._node.now(), facts)
        self._tell_index(member)

    def _tell_index(self, member: Member) -> None:
        """Once a worker offers a model, it is known whether it tells what it holds."""
        card = member.card
        if card is None:
            return
        events = KV in card.topics if card.models else None
        life = Life(member.node, member.epoch)
        self.desk.index.worker_up(life, events=events, names_id=card.names_id)
        self._judge_index()

    def _judge_index(self) -> None:
        """Say which workers' content is guessed."""
        blind = frozenset(self.desk.index.approximate)
        if blind != self._blind:
            self._blind = blind
            self._degradations.clear("approximate_index")
            if blind:
                self._degradations.add(
                    "approximate_index",
                    f"no KV events from {', '.join(sorted(blind))}: what they hold is guessed from "
                    "what was sent there",
                )

    # ------------------------------------------------------------------ workers and routers

    def _on_load(self, member: Member, load: WorkerLoad) -> None:
        self.desk.load(Life(member.node, member.epoch), load)

    def _on_load_gone(self, member: Member) -> None:
        self.desk.load(Life(member.node, member.epoch), None)

    def _follow_sequences(self, member: Member) -> SetView:
        worker, bookings = Life(member.node, member.epoch), self.desk.bookings

        def changed(puts: Mapping[bytes, bytes], drops: Collection[bytes]) -> None:
            for key in puts:
                bookings.held(worker, booking_of(key))
            for key in drops:
                bookings.let_go(worker, booking_of(key))

        return SetView(changed)

    def _follow_bookings(self, member: Member) -> SetView:
        router, bookings = Life(member.node, member.epoch), self.desk.bookings

        def changed(puts: Mapping[bytes, bytes], drops: Collection[bytes]) -> None:
            for value in puts.values():
                bookings.peer_placed(router, _decode_booked(value))
            for key in drops:
                bookings.peer_ended(router, booking_of(key))

        return SetView(changed)

    def _sweep(self) -> None:
        self._node.timers.call_later(self._config.sweep_interval, self._sweep)
        self.desk.sweep(self._node.now())

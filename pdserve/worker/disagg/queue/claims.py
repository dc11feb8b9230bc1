"""A prefill worker's end of the prefill queues: it says how much more it would take, and is given
claims.

Any router may own its model's queue, so it has a stream to every router and offers all of them the
same credits: what one of them gives counts against what the others are told. Two may give at the
same moment; what exceeds the credits goes back at once, not begun, and is never seen here.

A claim is good until `end`, or `stop`: its router says that nobody wants the item. Once the decode
worker has opened an attempt (`QueueClaim.opened`) that one alone says when to stop, and what
routers say or do no longer matters. A router that dies takes nothing with it: whether the work is
still wanted the decode worker says when it is asked for an attempt.

It knows neither engines nor attempts. Owned by the worker's node; `close` before the node.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pdserve.messages.handoff import ClaimCancelled, ClaimEnded, CreditOffer, ItemClaimed
from pdserve.runtime.registry import MemberGone
from pdserve.worker.disagg.queue.connection import QueueConnection

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.ids import Epoch, NodeId
    from pdserve.messages.handoff import ClaimOutcome, FromQueue, PrefillItem
    from pdserve.runtime.node import Node
    from pdserve.runtime.registry import MemberEvent


__all__ = ["QueueClaim", "QueueClaimSource"]

_log = logging.getLogger(__name__)


class QueueClaim:
    """The right to one item of a queue."""

    __slots__ = ("_claims", "_opened", "connection", "decode", "decode_epoch", "item", "number")

    def __init__(
        self, claims: QueueClaimSource, connection: QueueConnection, told: ItemClaimed
    ) -> None:
        self.number = told.claim
        """Of its router."""
        self.decode = told.decode
        self.decode_epoch = told.decode_epoch
        self.item = told.item
        """Without names; its deadline is what remained when the router sent it."""
        self.connection = connection
        self._claims = claims
        self._opened = False

    def __repr__(self) -> str:
        return f"<claim {self.number} of {self.owner}: {self.item.request} of {self.decode}>"

    @property
    def owner(self) -> NodeId:
        """Whose it is."""
        return self.connection.router

    @property
    def owner_epoch(self) -> Epoch:
        return self.connection.epoch

    def opened(self) -> None:
        """The decode worker has opened an attempt: `stop` is not called any more."""
        self._opened = True

    @property
    def is_open(self) -> bool:
        return self._opened

    def end(self, outcome: ClaimOutcome) -> None:
        """Done with it: see `messages.handoff.Ended`. Idempotent; nothing after `stop`."""
        self._claims.end(self, outcome)


@dataclass(slots=True)
class _Offered:
    """What is left of the last word about a model."""

    item_of: tuple[str, str]
    """Model and compatibility hash."""
    credits: int
    uncomputed: int


@dataclass(slots=True)
class _Router:
    """What one router has been told, and has given."""

    connection: QueueConnection
    received: Counter[str] = field(default_factory=Counter)
    """Claims on its present stream, by model."""
    claims: dict[int, QueueClaim] = field(default_factory=dict)
    """Those that have not ended and were given on its present stream."""
    told: dict[str, CreditOffer] = field(default_factory=dict)
    """On that stream, by model."""
    stale: bool = True
    """It may not have heard the last word."""


class QueueClaimSource:
    """See above."""

    def __init__(
        self, node: Node, take: Callable[[QueueClaim], None], stop: Callable[[QueueClaim], None]
    ) -> None:
        """`take` gets each claim, `stop` those that nobody wants any more: each at most once, not
        after it has ended and not once it is open."""
        self.returned = 0
        """Claims beyond the credits."""
        self._node = node
        self._take = take
        self._stop = stop
        self._offers: dict[str, _Offered] = {}
        """By model."""
        self._routers: dict[NodeId, _Router] = {}
        self._tells = False
        self._closed = False
        self._deaf = node.on_member(self._on_member)

    def __len__(self) -> int:
        """Claims that have not ended, of routers that still know of them."""
        return sum(len(router.claims) for router in self._routers.values())

    # ------------------------------------------------------------------ the port

    def offer(self, model: str, compat_hash: str, credits: int, uncomputed_tokens: int) -> None:
        """Say, whenever it changes, how many more items this worker would take beyond all that
        `take` was given, and how many prompt tokens it has yet to compute. Between two calls both
        follow the claims that come."""
        offered = _Offered((model, compat_hash), max(0, credits), max(0, uncomputed_tokens))
        if offered != self._offers.get(model):
            self._offers[model] = offered
            self._tell_soon()

    def end(self, claim: QueueClaim, outcome: ClaimOutcome) -> None:
        """See `QueueClaim.end`."""
        router = self._routers.get(claim.owner)
        if router is None or router.claims.get(claim.number) is not claim:
            return
        del router.claims[claim.number]
        router.connection.post(ClaimEnded(claim.number, outcome))

    def close(self) -> None:
        """Leave every queue: what is claimed and not open is given to others. Idempotent."""
        self._closed = True
        self._deaf()
        for router in self._routers.values():
            router.connection.close()
        self._routers.clear()

    # ------------------------------------------------------------------ telling

    def _tell_soon(self) -> None:
        """All routers, at the end of this turn: a step of the engine changes much at once."""
        for router in self._routers.values():
            router.stale = True
        if not self._tells and not self._closed:
            self._tells = True
            self._node.call_soon(self._tell)

    def _tell(self) -> None:
        self._tells = False
        for router in tuple(self._routers.values()):
            if router.stale:
                self._tell_one(router)

    def _tell_one(self, router: _Router) -> None:
        """Only to one that reads: for the others the next word will do."""
        if not router.connection.sendable:
            return
        router.stale = False
        for offered in self._offers.values():
            model, compat_hash = offered.item_of
            offer = CreditOffer(
                model=model,
                compat_hash=compat_hash,
                credits=offered.credits,
                uncomputed_tokens=offered.uncomputed,
                claims=router.received[model],
            )
            if router.told.get(model) != offer:
                router.told[model] = offer
                router.connection.post(offer)

    # ------------------------------------------------------------------ what the connection says

    def _router(self, connection: QueueConnection) -> _Router | None:
        router = self._routers.get(connection.router)
        return router if router is not None and router.connection is connection else None

    def on_open(self, connection: QueueConnection) -> None:
        """The router knows nothing of this worker."""
        router = self._router(connection)
        if router is not None:
            router.received.clear()
            router.told.clear()
            self._tell_one(router)

    def on_lost(self, connection: QueueConnection) -> None:
        """It gives our claims to others; whoever asks first for an attempt gets it."""
        router = self._router(connection)
        if router is not None:
            router.claims.clear()
            router.stale = True

    def on_room(self, connection: QueueConnection) -> None:
        router = self._router(connection)
        if router is not None and router.stale:
            self._tell_one(router)

    def on_message(self, connection: QueueConnection, message: FromQueue) -> None:
        router = self._router(connection)
        if router is None:
            return
        if isinstance(message, ItemClaimed):
            self._claimed(router, message)
        elif isinstance(message, ClaimCancelled):
            self._unclaimed(router, message.claim)

    def _claimed(self, router: _Router, message: ItemClaimed) -> None:
        item: PrefillItem = message.item
        router.received[item.model] += 1
        offered = self._offers.get(item.model)
        if offered is None or not offered.credits or offered.item_of[1] != item.compat_hash:
            self.returned += 1
            router.connection.post(ClaimEnded(message.claim, "returned"))
            self._tell_soon()
            return
        offered.credits -= 1
        offered.uncomputed += item.prompt_tokens
        claim = router.claims[message.claim] = QueueClaim(self, router.connection, message)
        self._tell_soon()
        self._take(claim)

    def _unclaimed(self, router: _Router, number: int) -> None:
        claim = router.claims.pop(number, None)
        if claim is None:
            return
        router.connection.post(ClaimEnded(number, "cancelled"))
        if not claim.is_open:
            _log.debug("%r: nobody wants it any more", claim)
            self._stop(claim)

    # ------------------------------------------------------------------ routers

    def _on_member(self, event: MemberEvent) -> None:
        member = event.member
        if member.role != "router":
            return
        router = self._routers.get(member.node)
        if router is not None and (
            isinstance(event, MemberGone) or router.connection.epoch != member.epoch
        ):
            if router.connection.epoch > member.epoch:
                return
            del self._routers[member.node]
            router.connection.close()
            router = None
        if router is None and not isinstance(event, MemberGone) and not self._closed:
            connection = QueueConnection(self._node, member.node, member.epoch, self)
            self._routers[member.node] = _Router(connection)

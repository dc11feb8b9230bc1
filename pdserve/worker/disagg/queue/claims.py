"""The prefill worker's client of the prefill queues: offers credits and receives claims.

Any router may own its model's queue, so the client has a stream to every router and offers the same
credits to all. A claim from one router reduces what the others are offered. Two routers may give
claims at the same moment; claims beyond the credits go back at once and are never seen here.

A claim is valid until `end` or `stop`; its router calls for `stop` when the item is no longer
wanted. Once the decode worker has opened an attempt (`QueueClaim.opened`), only the decode worker
says when to stop. If a router dies its claims stay valid: the decode worker says whether the work
is still wanted when it is asked for an attempt.

It knows neither engines nor attempts. Owned by the worker's node; `close` it before the node.
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
    """The right to one item of a queue. Implements `ports.PrefillClaim`."""

    __slots__ = ("_claims", "_opened", "connection", "decode", "decode_epoch", "item", "number")

    def __init__(
        self, claims: QueueClaimSource, connection: QueueConnection, told: ItemClaimed
    ) -> None:
        self.number = told.claim
        """The router's number for it."""
        self.decode = told.decode
        self.decode_epoch = told.decode_epoch
        self.item = told.item
        """Without block hashes; its deadline is the remaining time when the router sent it."""
        self.connection = connection
        self._claims = claims
        self._opened = False

    def __repr__(self) -> str:
        return f"<claim {self.number} of {self.owner}: {self.item.request} of {self.decode}>"

    @property
    def owner(self) -> NodeId:
        """The router that granted it."""
        return self.connection.router

    @property
    def owner_epoch(self) -> Epoch:
        return self.connection.epoch

    def opened(self) -> None:
        """Records that the decode worker has opened an attempt; `stop` is not called any more."""
        self._opened = True

    @property
    def is_open(self) -> bool:
        return self._opened

    def end(self, outcome: ClaimOutcome) -> None:
        """Reports the outcome to the router, see `messages.handoff.ClaimOutcome`. Idempotent; no
        effect after `stop`."""
        self._claims.end(self, outcome)


@dataclass(slots=True)
class _Offered:
    """The last offer for a model, less the claims that came since."""

    item_of: tuple[str, str]
    """Model and compatibility hash."""
    credits: int
    uncomputed: int


@dataclass(slots=True)
class _Router:
    """What was offered to one router, and what came from it."""

    connection: QueueConnection
    received: Counter[str] = field(default_factory=Counter)
    """Number of claims on the present stream, by model."""
    claims: dict[int, QueueClaim] = field(default_factory=dict)
    """Claims given on the present stream that have not ended."""
    told: dict[str, CreditOffer] = field(default_factory=dict)
    """Last offer on the present stream, by model."""
    stale: bool = True
    """True if the router may not have the newest offer."""


class QueueClaimSource:
    """The client for all queues of one prefill worker."""

    def __init__(
        self,
        node: Node,
        take: Callable[[QueueClaim], None],
        stop: Callable[[QueueClaim], None],
        generation: int = 0,
    ) -> None:
        """`take` gets each claim; `stop` gets each claim that is no longer wanted, at most once and
        not after it has ended or is open. `generation`: the worker's mode generation; claims of
        another one go back."""
        self._generation = generation
        self.returned = 0
        """Number of claims returned because they exceeded the credits, or were stale."""
        self._node = node
        self._take = take
        self._stop = stop
        self._offers: dict[str, _Offered] = {}
        """Offered credits by model."""
        self._routers: dict[NodeId, _Router] = {}
        self._tells = False
        self._closed = False
        self._deaf = node.on_member(self._on_member)

    def __len__(self) -> int:
        """Number of claims that have not ended at routers that still know of them."""
        return sum(len(router.claims) for router in self._routers.values())

    # ------------------------------------------------------------------ the port

    def offer(self, model: str, compat_hash: str, credits: int, uncomputed_tokens: int) -> None:
        """Offers to take `credits` more items; call it whenever the numbers change.
        `uncomputed_tokens`: claimed prompt tokens still to compute. Between two calls both numbers
        are adjusted for the claims that come."""
        offered = _Offered((model, compat_hash), max(0, credits), max(0, uncomputed_tokens))
        if offered != self._offers.get(model):
            self._offers[model] = offered
            self._tell_soon()

    def end(self, claim: QueueClaim, outcome: ClaimOutcome) -> None:
        """Reports the outcome of a claim to its router; no effect if the claim has ended."""
        router = self._routers.get(claim.owner)
        if router is None or router.claims.get(claim.number) is not claim:
            return
        del router.claims[claim.number]
        router.connection.post(ClaimEnded(claim.number, outcome))

    def close(self) -> None:
        """Leaves every queue; routers give claims that are not open to other workers.
        Idempotent."""
        self._closed = True
        self._deaf()
        for router in self._routers.values():
            router.connection.close()
        self._routers.clear()

    # ------------------------------------------------------------------ telling

    def _tell_soon(self) -> None:
        """Schedules new offers to all routers for the end of this event-loop turn: one engine step
        changes many numbers."""
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
        """Sends the newest offer to a router that can receive; a router that cannot gets a later
        one."""
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
                generation=self._generation,
            )
            if router.told.get(model) != offer:
                router.told[model] = offer
                router.connection.post(offer)

    # ------------------------------------------------------------------ what the connection says

    def _router(self, connection: QueueConnection) -> _Router | None:
        router = self._routers.get(connection.router)
        return router if router is not None and router.connection is connection else None

    def on_open(self, connection: QueueConnection) -> None:
        """Sends all offers: the router of a new stream knows nothing of this worker."""
        router = self._router(connection)
        if router is not None:
            router.received.clear()
            router.told.clear()
            self._tell_one(router)

    def on_lost(self, connection: QueueConnection) -> None:
        """Forgets the claims on the broken stream. The router gives them to other workers; the
        first worker that asks for an attempt gets it."""
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
        stale = message.generation not in (0, self._generation)
        if (
            stale
            or offered is None
            or not offered.credits
            or offered.item_of[1] != item.compat_hash
        ):
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
            _log.debug("%r: the item was cancelled", claim)
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

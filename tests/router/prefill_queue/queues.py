"""One prefill queue and what it says, with small names."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Any

from pdserve.ids import NodeId
from pdserve.messages.handoff import (
    ClaimCancelled,
    CreditOffer,
    ItemClaimed,
    ItemQueued,
    ItemRefused,
    PrefillItem,
)
from pdserve.router.prefill_queue.queue import PrefillQueue, PrefillQueueConfig, QueueStreamId

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdserve.messages.handoff import FromQueue

BLOCK = 16


def peer(node: str, stream: int = 1, epoch: int = 1) -> QueueStreamId:
    return QueueStreamId(NodeId(node), epoch, stream)


def item(request: int, tokens: int = 1000, *, round: int = 0, **fields: Any) -> PrefillItem:
    fields = {"block_size": BLOCK, **fields}
    if "excluded" in fields:
        fields["excluded"] = tuple(map(NodeId, fields["excluded"]))
    return PrefillItem(request=request, round=round, model="m", prompt_tokens=tokens, **fields)


class Queue:
    """Peers are named by their nodes; `now` is where the clock stands."""

    def __init__(self, **config: Any) -> None:
        self.now = 0.0
        self.said: list[tuple[QueueStreamId, FromQueue]] = []
        self.overlaps: dict[int, Mapping[NodeId, int]] = {}
        """Leading blocks, by request."""
        self.looked_up = 0
        self.received: dict[QueueStreamId, int] = {}
        self.queue = PrefillQueue(
            "m",
            lambda to, message: self.said.append((to, message)),
            count(1),
            overlap=self._overlap,
            config=PrefillQueueConfig(**config),
        )

    def _overlap(self, now: float, wanted: PrefillItem) -> Mapping[NodeId, int]:
        self.looked_up += 1
        return self.overlaps.get(wanted.request, {})

    def holds(self, request: int, **blocks: int) -> None:
        self.overlaps[request] = {NodeId(node): count for node, count in blocks.items()}

    def enqueue(self, wanted: PrefillItem, by: str = "d") -> None:
        self.queue.enqueue(self.now, peer(by), wanted)

    def offer(
        self, node: str, credits: int, load: int = 0, *, compat: str = "", claims: int | None = None
    ) -> None:
        """`claims`: those that it has heard of; None: all that were sent."""
        to = peer(node)
        heard = sum(1 for p, m in self.said if p == to and isinstance(m, ItemClaimed))
        offer = CreditOffer(
            model="m",
            compat_hash=compat,
            credits=credits,
            uncomputed_tokens=load,
            claims=heard if claims is None else claims,
        )
        self.queue.offer(self.now, to, offer)

    def at(self, now: float) -> None:
        """Time passes; whoever is due is looked after."""
        while (look := self.queue.next_look()) is not None and look <= now:
            self.now = max(self.now, look)
            self.queue.look(self.now)
        self.now = now

    def gone(self, node: str) -> None:
        self.queue.peer_gone(self.now, peer(node))

    @property
    def claims(self) -> list[tuple[str, int]]:
        """(worker, request), in the order in which they were given."""
        return [(to.node, m.item.request) for to, m in self.said if isinstance(m, ItemClaimed)]

    def claim(self, request: int) -> int:
        """The number of the last claim of a request."""
        numbers = [
            m.claim
            for _, m in self.said
            if isinstance(m, ItemClaimed) and m.item.request == request
        ]
        return numbers[-1]

    @property
    def refusals(self) -> list[tuple[int, str]]:
        return [(m.request, m.reason) for _, m in self.said if isinstance(m, ItemRefused)]

    @property
    def queued(self) -> list[int]:
        return [m.request for _, m in self.said if isinstance(m, ItemQueued)]

    @property
    def unclaimed(self) -> list[tuple[str, int]]:
        return [(to.node, m.claim) for to, m in self.said if isinstance(m, ClaimCancelled)]

    def drained(self) -> list[int]:
        """Requests in the order in which one worker gets them, one after the other."""
        start = len(self.claims)
        while len(self.queue):
            self.offer("z", 1)
        return [request for _, request in self.claims[start:]]

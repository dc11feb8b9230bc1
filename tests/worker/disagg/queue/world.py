"""Routers, decode and prefill workers around prefill queues, on one network in virtual time."""

from __future__ import annotations

import logging
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

from pdserve.messages.handoff import PrefillItem
from pdserve.messages.node import NodeCard
from pdserve.observe.degraded import Degradations
from pdserve.observe.metrics import Metrics
from pdserve.router.config import RouterConfig
from pdserve.router.policies.loader import load_policy
from pdserve.router.service import RouterService
from pdserve.runtime.topics.service import Topics
from pdserve.worker.disagg.queue.claims import QueueClaimSource
from pdserve.worker.disagg.queue.client import PrefillQueueClient
from tests.runtime.cluster import cluster

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from pdserve.ids import NodeId
    from pdserve.runtime.node import Node
    from pdserve.worker.disagg.queue.claims import QueueClaim
    from tests.runtime.cluster import Cluster


def item(request: int, *, round: int = 0, model: str = "m", **fields: Any) -> PrefillItem:
    return PrefillItem(
        **{"prompt_tokens": 1000, **fields}, request=request, round=round, model=model
    )


class Router:
    """The whole role."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.topics = Topics(node, node.timers)
        self.service = RouterService(
            RouterConfig(),
            load_policy("round_robin"),
            node,
            self.topics,
            NodeCard(role="router"),
            Degradations(Metrics()),
        )
        self.queues = self.service.prefill

    def check(self) -> None:
        for queue in self.queues._queues.values():
            queue.check()

    def close(self) -> None:
        self.service.close()
        self.topics.close()


class Heard:
    """A listener: what became of one request, and whom a claim must come from."""

    def __init__(self) -> None:
        self.owners: list[tuple[str, int, int]] = []
        self.queued: list[tuple[str, int]] = []
        self.refused: list[str] = []

    def on_owner(self, owner: NodeId, epoch: int, round: int) -> None:
        assert not self.refused
        assert not self.owners or self.owners[-1][2] < round, "a round is used once"
        self.owners.append((owner, epoch, round))

    def on_queued(self, owner: NodeId, epoch: int) -> None:
        assert not self.refused
        assert self.owners[-1][:2] == (owner, epoch)
        self.queued.append((owner, epoch))

    def on_refused(self, reason: str) -> None:
        assert not self.refused, "refused twice"
        self.refused.append(reason)

    @property
    def fence(self) -> tuple[str, int, int]:
        return self.owners[-1]


class Decoder:
    """A decode worker's node that only queues, and fences."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.topics = Topics(node, node.timers)
        self.queue = PrefillQueueClient(node, self.topics)
        self.heard: dict[int, Heard] = {}
        self.opened: dict[int, str] = {}
        """Which worker opened an attempt, by request."""

    def enqueue(self, wanted: PrefillItem) -> Heard:
        heard = self.heard[wanted.request] = Heard()
        self.queue.enqueue(wanted, heard)
        return heard

    def open(self, claim: QueueClaim, worker: str) -> bool:
        """The fence, as a decode worker keeps it."""
        heard = self.heard.get(claim.item.request)
        if heard is None or heard.refused or claim.item.request in self.opened:
            return False
        if heard.fence != (claim.owner, claim.owner_epoch, claim.item.round):
            return False
        self.opened[claim.item.request] = worker
        self.queue.opened(claim.item.request)
        return True

    def close(self) -> None:
        self.queue.close()
        self.topics.close()


class Prefiller:
    """A prefill worker's node that takes claims and does nothing."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.claims = QueueClaimSource(node, self._take, self._stop)
        self.taken: list[QueueClaim] = []
        self.stopped: list[QueueClaim] = []

    def _take(self, claim: QueueClaim) -> None:
        assert claim not in self.taken
        self.taken.append(claim)

    def _stop(self, claim: QueueClaim) -> None:
        assert claim in self.taken
        assert claim not in self.stopped
        assert not claim.is_open
        self.stopped.append(claim)

    @property
    def requests(self) -> list[int]:
        return [claim.item.request for claim in self.taken]

    def offer(self, credits: int, model: str = "m", *, compat: str = "", load: int = 0) -> None:
        self.claims.offer(model, compat, credits, load)

    def close(self) -> None:
        self.claims.close()


class World:
    """See above."""

    def __init__(self, nodes: Cluster) -> None:
        self.nodes = nodes
        self.routers: dict[str, Router] = {}
        self.decoders: dict[str, Decoder] = {}
        self.prefillers: dict[str, Prefiller] = {}

    async def router(self, name: str) -> Router:
        node = await self.nodes.add(name, role="router")
        made = self.routers[name] = Router(node)
        made.service.open()
        return made

    async def decoder(self, name: str) -> Decoder:
        node = await self.nodes.add(name)
        made = self.decoders[name] = Decoder(node)
        return made

    async def prefiller(self, name: str) -> Prefiller:
        node = await self.nodes.add(name)
        made = self.prefillers[name] = Prefiller(node)
        return made

    async def settled(self) -> None:
        """Everybody knows everybody, and the routers' cards."""
        await self.nodes.until(self.nodes.converged)
        await self.nodes.until(
            lambda: all(
                member.card is not None
                for node in self.nodes.nodes.values()
                for member in node.registry.by_role("router")
            )
        )

    def owner(self, model: str = "m") -> Router:
        """As the first decode worker sees it."""
        decoder = next(iter(self.decoders.values()))
        found = decoder.queue._owner(model)
        assert found is not None
        return self.routers[found.node]

    def events(self, event: str) -> int:
        """How often it has happened, over all routers."""
        return sum(router.queues.counters[event] for router in self.routers.values())

    async def crash(self, name: str) -> None:
        """Its process ends without a word."""
        for kind in (self.routers, self.decoders, self.prefillers):
            part = kind.pop(name, None)
            if part is not None:
                self.nodes.world.crash(name)
                self.nodes.world.pause(name)
                part.close()
        await self.nodes.crash(name)

    async def until(self, met: Any, timeout: float = 30.0) -> float:
        return await self.nodes.until(met, timeout)


class Errors(logging.Handler):
    """What a stream's owner catches and logs, a test must hear of."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@contextmanager
def no_errors() -> Iterator[None]:
    """Nothing is logged as an error."""
    handler, logger = Errors(), logging.getLogger("pdserve")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
    assert handler.records == []


@asynccontextmanager
async def world(seed: int = 0) -> AsyncIterator[World]:
    """Afterwards nothing is left."""
    with no_errors():
        async with _world(seed) as made:
            yield made


@asynccontextmanager
async def _world(seed: int) -> AsyncIterator[World]:
    async with cluster(seed) as nodes:
        made = World(nodes)
        try:
            yield made
            for router in made.routers.values():
                router.check()
        finally:
            nodes.world.heal()
            parts: tuple[Decoder | Prefiller | Router, ...] = (
                *made.decoders.values(),
                *made.prefillers.values(),
                *made.routers.values(),
            )
            for part in parts:
                nodes.world.resume(part.node.id)
                part.close()
        assert all(not decoder.queue for decoder in made.decoders.values())
        assert all(not prefiller.claims for prefiller in made.prefillers.values())
        for router in made.routers.values():
            assert router.queues.streams == 0
            assert all(queue.idle for queue in router.queues._queues.values())

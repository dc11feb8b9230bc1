"""Routers among real workers and frontends, whose engines alone are played by hand."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from pdserve.errors import ModelNotFound, NoWorker, ProtocolError
from pdserve.frontend.cluster import ClusterBackend
from pdserve.frontend.config import FrontendConfig
from pdserve.ids import NodeId
from pdserve.messages.node import NodeCard
from pdserve.messages.request import Finish, TokenDelta
from pdserve.messages.routing import Release
from pdserve.observe.degraded import Degradations
from pdserve.observe.metrics import Metrics
from pdserve.router.bookings import End
from pdserve.router.config import RouterConfig
from pdserve.router.policies.load import load_policy
from pdserve.router.service import RouterService
from pdserve.runtime.methods import RELEASE, ROUTE
from pdserve.runtime.topics.service import Topics
from pdserve.wire.codec import Method, encode
from pdserve.worker.member import WorkerMember
from tests.frontend.clusters import Sink, request
from tests.frontend.test_offers import model
from tests.net.world import virtually
from tests.router.support import route
from tests.runtime.cluster import cluster
from tests.worker.test_member import FakeService

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from pdserve.messages.card import ModelCard
    from pdserve.messages.routing import Routed
    from pdserve.runtime.node import Node
    from tests.runtime.cluster import Cluster


class Router:
    def __init__(self, node: Node, config: RouterConfig) -> None:
        self.node = node
        self.topics = Topics(node, node.timers)
        self.degradations = Degradations(Metrics())
        self.service = RouterService(
            config,
            load_policy(config.policy),
            node,
            self.topics,
            NodeCard(role="router"),
            self.degradations,
        )
        self.bookings = self.service.desk.bookings

    def charged(self, worker: str) -> int:
        return self.bookings.load(NodeId(worker)).sequences

    def workers(self, name: str = "tiny") -> list[str]:
        return [w.node for w in self.service.desk.pool.view(self.node.now(), name).sound]


class Worker:
    def __init__(self, node: Node, started: int) -> None:
        self.node = node
        self.service = FakeService()
        self.topics = Topics(node, node.timers)
        service: Any = self.service
        self.member = WorkerMember(
            service, node, self.topics, NodeCard(role="worker", started=started)
        )

    def end(self, handle: int) -> None:
        finish = Finish(reason="stop")
        self.service.sinks[handle].on_delta(
            TokenDelta(handle=handle, choice=0, tokens=[1], finish=finish)
        )


class World:
    def __init__(self, nodes: Cluster) -> None:
        self.nodes = nodes
        self.routers: dict[str, Router] = {}
        self.workers: dict[str, Worker] = {}
        self.frontends: dict[str, ClusterBackend] = {}

    async def router(self, name: str, **config: Any) -> Router:
        node = await self.nodes.add(name, role="router")
        made = self.routers[name] = Router(node, RouterConfig(**config))
        made.service.open()
        return made

    async def worker(self, name: str, card: ModelCard | None = None) -> Worker:
        node = await self.nodes.add(name)
        made = self.workers[name] = Worker(node, started=len(self.workers))
        made.service.ready(card or model())
        return made

    async def frontend(self, name: str) -> ClusterBackend:
        node = await self.nodes.add(name, role="frontend")
        made = self.frontends[name] = ClusterBackend(
            node, FrontendConfig(), Degradations(Metrics())
        )
        return made

    async def settled(self) -> None:
        """Everybody sees everybody."""
        for router in self.routers.values():
            await self.nodes.until(lambda r=router: set(r.workers()) == set(self.workers))  # type: ignore[misc]
        for backend in self.frontends.values():
            await self.nodes.until(lambda b=backend: b.unready_reason() is None)  # type: ignore[misc]
            await self.nodes.until(lambda b=backend: len(b._routers) == len(self.routers))  # type: ignore[misc]

    async def ask(self, frontend: str, router: str, name: str = "tiny") -> Routed:
        link = await self.nodes.nodes[frontend].link(NodeId(router), timeout=1.0)
        return await link.request(ROUTE, route(name), timeout=1.0)


@asynccontextmanager
async def world() -> AsyncIterator[World]:
    """Afterwards no ledger contradicts itself."""
    async with cluster() as nodes:
        made = World(nodes)
        yield made
        for router in made.routers.values():
            router.bookings.check()
            router.topics.close()
        for worker in made.workers.values():
            worker.member.close()
            worker.topics.close()


@virtually
async def test_a_booking_lives_as_long_as_its_request() -> None:
    async with world() as w:
        router, worker, backend = await w.router("r"), await w.worker("a"), await w.frontend("f")
        await w.settled()
        sink = Sink()
        await backend.open(request(), sink)
        assert (len(router.bookings), router.charged("a")) == (1, 1)
        # Once the worker's report contains it, it counts there and not here as well.
        await w.nodes.until(lambda: router.charged("a") == 0)
        view = router.service.desk.pool.view(router.node.now(), "tiny").sound
        assert [one.sequences for one in view] == [1]
        await asyncio.sleep(60.0)  # a live request is never ended by its age
        assert len(router.bookings) == 1
        worker.end(1)
        await w.nodes.until(lambda: len(router.bookings) == 0)
        assert sink.ends == 1
        assert (router.service.routed, router.service.released) == (1, 1)


@virtually
async def test_the_worker_alone_can_end_a_booking() -> None:
    """The frontend's word may be lost."""
    async with world() as w:
        router, worker, backend = await w.router("r"), await w.worker("a"), await w.frontend("f")
        await w.settled()
        router.node.serve_tell(RELEASE, lambda link, body: None)
        await backend.open(request(), Sink())
        await w.nodes.until(lambda: router.charged("a") == 0)
        worker.end(1)
        await w.nodes.until(lambda: len(router.bookings) == 0)
        assert router.bookings.ended == {End.LET_GO: 1}


@virtually
async def test_a_booking_that_never_came_to_its_worker_runs_out() -> None:
    async with world() as w:
        router = await w.router("r", booking_ttl=10.0)
        await w.worker("a")
        await w.frontend("f")
        await w.settled()
        await w.ask("f", "r")
        await asyncio.sleep(9.0)
        assert router.charged("a") == 1
        await asyncio.sleep(3.0)
        assert router.bookings.ended == {End.NEVER_SEEN: 1}


@virtually
async def test_whoever_dies_takes_its_bookings_along() -> None:
    for dead, why in (("a", {End.WORKER_GONE: 2}), ("f", {End.ASKER_GONE: 4})):
        async with world() as w:
            router = await w.router("r")
            await w.worker("a")
            await w.worker("b")
            await w.frontend("f")
            await w.settled()
            for _ in range(4):
                await w.ask("f", "r")
            w.workers.pop(dead, None)
            await w.nodes.crash(dead)
            await asyncio.sleep(2.0)
            assert len(router.bookings) == (2 if dead == "a" else 0)
            assert router.bookings.ended == why


@virtually
async def test_a_release_may_come_twice_or_for_nothing() -> None:
    async with world() as w:
        router = await w.router("r")
        await w.worker("a")
        await w.frontend("f")
        await w.settled()
        routed = await w.ask("f", "r")
        link = await w.nodes.nodes["f"].link(NodeId("r"), timeout=1.0)
        for booking in (routed.booking, routed.booking, 12345):
            link.tell(RELEASE, encode(Release(booking, "finished")))
        await asyncio.sleep(0.1)
        assert router.bookings.ended == {End.RELEASED: 1}
        nonsense = Method(ROUTE.id, "nonsense", Release, Release)
        with pytest.raises(ProtocolError):
            await link.request(nonsense, Release(1, "finished"), timeout=1.0)


@virtually
async def test_routers_see_each_others_decisions() -> None:
    async with world() as w:
        for name in ("r1", "r2"):
            await w.router(name)
        for name in ("a", "b"):
            await w.worker(name)
        await w.frontend("f")
        await w.settled()
        for _ in range(6):
            await w.ask("f", "r1")
            await asyncio.sleep(0.1)
        await w.nodes.until(lambda: w.routers["r2"].charged("a") == 3)
        assert w.routers["r2"].charged("b") == 3
        routed = await w.ask("f", "r2")
        assert (w.routers["r2"].charged(routed.worker), len(w.routers["r2"].bookings)) == (4, 1)
        w.routers.pop("r1").bookings.check()
        await w.nodes.crash("r1")
        await w.nodes.until(
            lambda: w.routers["r2"].charged("a") + w.routers["r2"].charged("b") == 1
        )


@virtually
async def test_a_router_that_joins_late_learns_of_everything() -> None:
    async with world() as w:
        await w.router("r1")
        for name in ("a", "b"):
            await w.worker(name)
        backend = await w.frontend("f")
        await w.settled()
        for _ in range(4):
            await backend.open(request(), Sink())
        late = await w.router("r2")
        await w.settled()
        await asyncio.sleep(1.0)
        view = late.service.desk.pool.view(late.node.now(), "tiny").sound
        assert [one.sequences for one in view] == [2, 2]


@virtually
async def test_a_router_shows_itself_once_it_has_settled() -> None:
    async with world() as w:
        await w.worker("a")
        backend = await w.frontend("f")
        router = await w.router("r")
        await w.nodes.until(lambda: bool(backend._routers))
        assert router.workers() == ["a"]
        assert router.service.unready_reason() is None


@virtually
async def test_a_draining_router_is_left_alone_and_still_answers() -> None:
    async with world() as w:
        await w.router("r")
        await w.worker("a")
        backend = await w.frontend("f")
        await w.settled()
        w.routers["r"].service.drain()
        await w.nodes.until(lambda: not backend._routers)
        assert (await w.ask("f", "r")).worker == "a"


@virtually
async def test_one_that_drains_before_it_has_settled_is_never_asked() -> None:
    async with world() as w:
        router = await w.router("r")
        backend = await w.frontend("f")
        router.service.drain()
        for _ in range(30):
            await asyncio.sleep(0.1)
            assert not backend._routers


@virtually
async def test_workers_that_do_not_tell_what_they_hold_are_named() -> None:
    async with world() as w:
        router = await w.router("r")
        await w.worker("a")
        blind = await w.worker("b")
        blind.service.tells_kv = False
        await w.nodes.until(lambda: "approximate_index" in router.degradations.reasons())
        words = router.degradations.reasons()["approximate_index"]
        assert "from b:" in words
        assert router.service.desk.index.approximate == {NodeId("b")}
        blind.service.tells_kv = True
        await w.nodes.until(lambda: "approximate_index" not in router.degradations.reasons())


@virtually
async def test_workers_of_another_model_under_the_name_get_nothing() -> None:
    async with world() as w:
        router = await w.router("r")
        await w.worker("b")
        await w.frontend("f")
        await w.settled()
        other = await w.worker("a", model(tokenizer_json=b"another", aliases=("mine",)))
        await w.nodes.until(lambda: "model_conflict" in router.degradations.reasons())
        assert router.workers() == ["b"]
        with pytest.raises(ModelNotFound):
            await w.ask("f", "r", "mine")
        other.service.ready(model())
        await w.nodes.until(lambda: router.workers() == ["a", "b"])
        assert "model_conflict" not in router.degradations.reasons()
        other.service.ready(model(tokenizer_json=b"another"))
        await w.nodes.until(lambda: router.workers() == ["b"])
        w.workers.pop("b")
        await w.nodes.crash("b")  # the name is free
        await w.nodes.until(lambda: router.workers() == ["a"])


@virtually
async def test_a_worker_whose_engine_restarts_gets_nothing_meanwhile() -> None:
    async with world() as w:
        await w.router("r")
        worker, backend = await w.worker("a"), await w.frontend("f")
        await w.settled()
        worker.service.reason = "the engine is restarting: it died"
        await asyncio.sleep(0.5)
        with pytest.raises(NoWorker) as caught:
            await backend.open(request(), Sink())
        assert caught.value.retry_after is not None
        worker.service.reason = None
        await w.settled()
        await backend.open(request(), Sink())


@virtually
async def test_a_router_held_for_dead_begins_with_an_empty_ledger() -> None:
    async with world() as w:
        router = await w.router("r")
        await w.worker("a")
        await w.worker("b")
        backend = await w.frontend("f")
        await w.settled()
        sink = Sink()
        await backend.open(request(), sink)
        w.nodes.world.pause("r")
        await w.nodes.until(lambda: not backend._routers, 30.0)
        w.nodes.world.resume("r")
        await w.nodes.until(lambda: router.node.lives == 2, 30.0)
        assert len(router.bookings) == 0
        await backend.open(request(), Sink())
        assert sink.errors == []
        await w.settled()
        await w.nodes.until(lambda: sorted(_sequences(router)) == [1, 1])


def _sequences(router: Router) -> list[int]:
    view = router.service.desk.pool.view(router.node.now(), "tiny").sound
    return [one.sequences for one in view]

"""Routers among real workers and frontends, whose engines alone are played by hand."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from pdserve.errors import Draining, ModelNotFound, NoWorker, PdserveError, ProtocolError
from pdserve.frontend.config import FrontendConfig
from pdserve.frontend.dispatch.cluster_client import ClusterClient
from pdserve.ids import NodeId
from pdserve.messages.engine import EngineStats
from pdserve.messages.kv_events import BlockStored
from pdserve.messages.node import NodeCard
from pdserve.messages.request import Finish, FirstTokenStats, TokenDelta
from pdserve.messages.routing import ReleaseBooking
from pdserve.observe.degraded import Degradations
from pdserve.observe.metrics import Metrics
from pdserve.perf_model.latency_model import LatencyModel
from pdserve.router.bookings import BookingEnd
from pdserve.router.config import RouterConfig
from pdserve.router.policies.loader import load_policy
from pdserve.router.service import RouterService
from pdserve.router.worker_table import WorkerEligibility
from pdserve.runtime.rpc_methods import EXPLAIN, RELEASE, ROUTE
from pdserve.runtime.topics.service import Topics
from pdserve.wire.codec import Method, encode
from pdserve.worker.agent import WorkerAgent
from tests.frontend.dispatch.test_model_discovery import model
from tests.frontend.fake_cluster import Sink, request
from tests.net.world import virtually
from tests.router.support import route
from tests.runtime.cluster import cluster
from tests.worker.test_agent import FakeService

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from pdserve.messages.card import ModelCard
    from pdserve.messages.handoff import WorkerMode
    from pdserve.messages.routing import RouteDecision, RouteRequest
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
        self.bookings = self.service.core.bookings

    def charged(self, worker: str) -> int:
        return self.bookings.load(NodeId(worker)).sequences

    def workers(self, name: str = "tiny") -> list[str]:
        return [w.node for w in self.service.core.pool.view(self.node.now(), name).sound]


class Worker:
    def __init__(self, node: Node, started: int, mode: WorkerMode = "aggregated") -> None:
        self.node = node
        self.service = FakeService()
        self.topics = Topics(node, node.timers)
        service: Any = self.service
        card = NodeCard(role="worker", started=started)
        self.member = WorkerAgent(service, node, self.topics, card)
        # Routers know a worker's mode by its card; how it takes part is tested elsewhere.
        self.service.mode = mode

    def end(self, handle: int) -> None:
        finish = Finish(reason="stop")
        self.service.engine.sinks[handle].on_delta(
            TokenDelta(handle=handle, choice=0, tokens=[1], finish=finish)
        )


class World:
    def __init__(self, nodes: Cluster) -> None:
        self.nodes = nodes
        self.routers: dict[str, Router] = {}
        self.workers: dict[str, Worker] = {}
        self.frontends: dict[str, ClusterClient] = {}

    async def router(self, name: str, **config: Any) -> Router:
        node = await self.nodes.add(name, role="router")
        made = self.routers[name] = Router(node, RouterConfig(**config))
        made.service.open()
        return made

    async def worker(
        self, name: str, card: ModelCard | None = None, mode: WorkerMode = "aggregated"
    ) -> Worker:
        node = await self.nodes.add(name)
        made = self.workers[name] = Worker(node, len(self.workers), mode)
        made.service.ready(card or model())
        return made

    async def frontend(self, name: str) -> ClusterClient:
        node = await self.nodes.add(name, role="frontend")
        made = self.frontends[name] = ClusterClient(node, FrontendConfig(), Degradations(Metrics()))
        return made

    async def settled(self) -> None:
        """Everybody sees everybody."""
        for router in self.routers.values():
            await self.nodes.until(lambda r=router: set(r.workers()) == set(self.workers))  # type: ignore[misc]
        for backend in self.frontends.values():
            await self.nodes.until(lambda b=backend: b.unready_reason() is None)  # type: ignore[misc]
            await self.nodes.until(lambda b=backend: len(b.routers.order) == len(self.routers))  # type: ignore[misc]

    async def ask(self, frontend: str, router: str, name: str = "tiny") -> RouteDecision:
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
        view = router.service.core.pool.view(router.node.now(), "tiny").sound
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
        router.node.actors.notices[RELEASE.id] = lambda peer, body: None
        await backend.open(request(), Sink())
        await w.nodes.until(lambda: router.charged("a") == 0)
        worker.end(1)
        await w.nodes.until(lambda: len(router.bookings) == 0)
        assert router.bookings.ended == {BookingEnd.LET_GO: 1}


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
        assert router.bookings.ended == {BookingEnd.NEVER_SEEN: 1}


@virtually
async def test_whoever_dies_takes_its_bookings_along() -> None:
    for dead, why in (("a", {BookingEnd.WORKER_GONE: 2}), ("f", {BookingEnd.FRONTEND_GONE: 4})):
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
            link.tell(RELEASE.id, encode(ReleaseBooking(booking, "finished")))
        await asyncio.sleep(0.1)
        assert router.bookings.ended == {BookingEnd.RELEASED: 1}
        nonsense = Method(ROUTE.id, "nonsense", ReleaseBooking, ReleaseBooking)
        with pytest.raises(ProtocolError):
            await link.request(nonsense, ReleaseBooking(1, "finished"), timeout=1.0)


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
        view = late.service.core.pool.view(late.node.now(), "tiny").sound
        assert [one.sequences for one in view] == [2, 2]


@virtually
async def test_a_router_shows_itself_once_it_has_settled() -> None:
    async with world() as w:
        await w.worker("a")
        backend = await w.frontend("f")
        router = await w.router("r")
        await w.nodes.until(lambda: bool(backend.routers.order))
        assert router.workers() == ["a"]
        assert router.service.unready_reason() is None


@virtually
async def test_a_router_is_ready_once_it_knows_each_workers_card_or_has_waited_for_it() -> None:
    async with world() as w:
        await w.nodes.add("bare", role="worker")
        backend = await w.frontend("f")
        router = await w.router("r")
        await w.nodes.until(lambda: bool(router.node.lives))
        assert "which workers" in str(router.service.unready_reason())
        await asyncio.sleep(2.0)
        assert not backend.routers.order
        within = await w.nodes.until(lambda: bool(backend.routers.order))
        assert within < 2.0
        assert router.service.unready_reason() is None


@virtually
async def test_a_draining_router_is_left_alone_and_still_answers() -> None:
    async with world() as w:
        await w.router("r")
        await w.worker("a")
        backend = await w.frontend("f")
        await w.settled()
        w.routers["r"].service.drain()
        await w.nodes.until(lambda: not backend.routers.order)
        assert (await w.ask("f", "r")).worker == "a"


@virtually
async def test_a_router_whose_drain_is_undone_is_asked_again_and_holds_requests() -> None:
    async with world() as w:
        for name in ("r", "s"):
            await w.router(name)
        await w.worker("a")
        backend = await w.frontend("f")
        await w.settled()
        service = w.routers["r"].service
        service.drain()
        await w.nodes.until(lambda: len(backend.routers.order) == 1)
        assert service.prefill.draining
        service.undo_drain()
        await w.nodes.until(lambda: len(backend.routers.order) == 2)
        assert (service.prefill.draining, service.core.draining) == (False, False)
        assert service.unready_reason() is None


@virtually
async def test_one_that_drains_before_it_has_settled_is_never_asked() -> None:
    async with world() as w:
        router = await w.router("r")
        backend = await w.frontend("f")
        router.service.drain()
        for _ in range(30):
            await asyncio.sleep(0.1)
            assert not backend.routers.order


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
        assert router.service.core.index.approximate == {NodeId("b")}
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
        await w.nodes.until(lambda: not backend.routers.order, 30.0)
        w.nodes.world.resume("r")
        await w.nodes.until(lambda: router.node.lives == 2, 30.0)
        assert len(router.bookings) == 0
        await backend.open(request(), Sink())
        assert sink.errors == []
        await w.settled()
        await w.nodes.until(lambda: sorted(_sequences(router)) == [1, 1])


def _sequences(router: Router) -> list[int]:
    view = router.service.core.pool.view(router.node.now(), "tiny").sound
    return [one.sequences for one in view]


# ------------------------------------------------------------------------ who waits


def _large(*excluded: str, **wants: Any) -> RouteRequest:
    """One of these closes a worker by what is predicted without any experience."""
    return replace(route("tiny", *excluded, prompt_tokens=2000), **wants)


async def _asks(w: World, request: RouteRequest, router: str = "r") -> asyncio.Task[RouteDecision]:
    link = await w.nodes.nodes["f"].link(NodeId(router), timeout=1.0)
    asking = asyncio.ensure_future(link.request(ROUTE, request, timeout=60.0))
    await asyncio.sleep(0.05)
    return asking


def _start(worker: Worker, handle: int) -> None:
    started = FirstTokenStats(0, 0.0, 0.1, 0.1)
    worker.service.engine.sinks[handle].on_delta(
        TokenDelta(handle=handle, choice=0, tokens=[1], started=started)
    )


@virtually
async def test_who_waits_goes_with_the_first_token_of_another() -> None:
    async with world() as w:
        router, worker, backend = await w.router("r"), await w.worker("a"), await w.frontend("f")
        await w.settled()
        await backend.open(request(prompt=[7] * 2000), Sink())
        asking = await _asks(w, _large())
        assert not asking.done()
        assert router.service.core.held == 1
        asked = router.node.now()
        _start(worker, 1)
        routed = await asking
        assert router.node.now() - asked < 0.01  # told at once, not with the next report
        assert routed.worker == "a"
        assert routed.held > 0.04
        router.service.core.check()


@virtually
async def test_who_waits_goes_at_the_predicted_moment_if_nothing_is_heard() -> None:
    async with world() as w:
        router, _, _ = await w.router("r"), await w.worker("a"), await w.frontend("f")
        await w.settled()
        await (await _asks(w, _large()))
        asking = await _asks(w, _large())
        assert not asking.done()
        assert (await asyncio.wait_for(asking, 1.0)).worker == "a"
        assert router.service.core.next_look(0.0) is None


@virtually
async def test_who_waits_in_a_router_that_fails_inside_is_answered() -> None:
    """By an error that sends its frontend to another router."""
    async with world() as w:
        router, _, _ = await w.router("r"), await w.worker("a"), await w.frontend("f")
        await w.settled()
        await (await _asks(w, _large()))
        asking = await _asks(w, _large())

        def look(now: float) -> None:
            raise KeyError("sk-secret")

        router.service.core.look = look  # type: ignore[method-assign]
        router.service._look()
        with pytest.raises(PdserveError, match="internal error"):
            await asking
        assert router.service.core.held == 0


@virtually
async def test_who_turns_away_while_it_waits_leaves_nothing_behind() -> None:
    async with world() as w:
        router, _, _ = await w.router("r"), await w.worker("a"), await w.frontend("f")
        await w.settled()
        await (await _asks(w, _large()))
        asking = await _asks(w, _large())
        asking.cancel()
        await asyncio.sleep(0.05)
        assert router.service.core.numbers.withdrawn == 1
        assert (router.service.core.held, len(router.bookings)) == (0, 1)


@virtually
async def test_who_turns_away_while_the_answer_is_under_way_gives_it_back() -> None:
    """Not only when the booking's time has run out."""
    async with world() as w:
        router, _, backend = await w.router("r"), await w.worker("a"), await w.frontend("f")
        await w.settled()
        for delay in range(12):
            opening = asyncio.ensure_future(backend.open(request(), Sink()))
            await asyncio.sleep(delay * 0.0005)
            opening.cancel()
            with suppress(asyncio.CancelledError):
                (await opening).cancel()
        await asyncio.sleep(1.0)
        assert len(router.bookings) == 0
        assert router.bookings.ended[BookingEnd.NEVER_SEEN] == 0


@virtually
async def test_a_router_that_leaves_sends_those_who_wait_to_another() -> None:
    async with world() as w:
        for name in ("r1", "r2"):
            await w.router(name)
        worker, backend = await w.worker("a"), await w.frontend("f")
        await w.settled()
        await (await _asks(w, _large(prompt_tokens=6000), "r1"))
        sink = Sink()
        opening = asyncio.ensure_future(backend.open(request(prompt=[7] * 2000), sink))
        await asyncio.sleep(0.05)
        holder = next(r for r in w.routers.values() if r.service.core.held)
        other = next(r for r in w.routers.values() if r is not holder)
        holder.service.drain()
        await asyncio.wait_for(opening, 2.0)
        assert holder.service.core.held == 0
        assert len(other.bookings) >= 1
        assert worker.service.engine.sinks


@virtually
async def test_the_last_router_goes_on_while_it_drains() -> None:
    async with world() as w:
        router, _, _ = await w.router("r"), await w.worker("a"), await w.frontend("f")
        await w.settled()
        await (await _asks(w, _large()))
        asking = await _asks(w, _large())
        router.service.drain()
        assert (await asyncio.wait_for(asking, 2.0)).worker == "a"
        last = await _asks(w, _large())
        router.service.close()
        with pytest.raises(Draining):
            await last


@virtually
async def test_a_router_says_what_it_would_do() -> None:
    async with world() as w:
        router, _, _ = await w.router("r"), await w.worker("a"), await w.frontend("f")
        await w.settled()
        link = await w.nodes.nodes["f"].link(NodeId("r"), timeout=1.0)
        told = await link.request(EXPLAIN, _large(), timeout=1.0)
        assert (told.worker, told.policy) == ("a", "ttft")
        assert told.candidates[0].terms["cost"] > 0
        assert len(router.bookings) == 0


# ------------------------------------------------------------------------ prefill workers


@virtually
async def test_a_prefill_worker_gets_no_requests_but_its_blocks_are_known() -> None:
    async with world() as w:
        router = await w.router("r")
        worker = await w.worker("p", mode="prefill")
        await w.frontend("f")
        known = router.service.core.pool.models
        await w.nodes.until(lambda: known() == {"tiny": {WorkerEligibility.PREFILL: 1}})
        with pytest.raises(NoWorker, match="only prefill workers"):
            await w.ask("f", "r")
        link = await w.nodes.nodes["f"].link(NodeId("r"), timeout=1.0)
        told = await link.request(EXPLAIN, route("tiny"), timeout=1.0)
        assert (told.candidates, told.worker) == ((), None)
        assert "only prefill workers" in told.refusal
        backend = w.frontends["f"]
        await w.nodes.until(lambda: "prefill workers" in str(backend.unready_reason()))
        worker.service.engine.say(BlockStored([b"x" * 16], b"y" * 16))
        index = router.service.core.index
        await w.nodes.until(lambda: index.known_blocks(NodeId("p")) == 1)
        await w.worker("d", mode="decode")
        await w.nodes.until(lambda: router.workers() == ["d"])
        assert (await w.ask("f", "r")).worker == "d"
        await w.nodes.until(lambda: backend.members.workers("tiny") == (NodeId("d"),))


@virtually
async def test_blocks_that_a_full_index_refused_are_known_soon_after_there_is_room() -> None:
    """The log of the worker that has them rests."""
    async with world() as w:
        router = await w.router("r", index_max_blocks=2)
        index = router.service.core.index
        for name in ("a", "b"):
            worker = await w.worker(name)
            hashes = [name.encode() * 16, name.upper().encode() * 16]
            worker.service.engine.say(BlockStored(hashes, b"y" * 16))
        await w.nodes.until(lambda: len(router.workers()) == 2 and index.full)
        (left,) = [name for name in ("a", "b") if index.known_blocks(NodeId(name)) < 2]
        await asyncio.sleep(40.0)
        gone = w.workers.pop("b" if left == "a" else "a")
        await w.nodes.crash(gone.node.id)
        await w.nodes.until(lambda: router.node.registry.get(gone.node.id) is None)
        begun = router.node.now()
        await w.nodes.until(lambda: index.known_blocks(NodeId(left)) == 2)
        assert router.node.now() < begun + 3.0
        assert not index.full


# ------------------------------------------------------------------------ several routers


@virtually
async def test_a_booking_is_known_elsewhere_at_once() -> None:
    async with world() as w:
        for name in ("r1", "r2"):
            await w.router(name)
        await w.worker("a")
        await w.frontend("f")
        await w.settled()
        await w.ask("f", "r1")
        await asyncio.sleep(0.008)  # on the way; a topic's own time to gather more is longer
        assert w.routers["r2"].charged("a") == 1
        assert w.routers["r2"].bookings.prefills(NodeId("a")).requests == 1


@virtually
async def test_a_restarted_router_knows_what_runs_within_a_second() -> None:
    """Nobody tells it of bookings: it asks the workers."""
    async with world() as w:
        await w.router("r1")
        worker, backend = await w.worker("a"), await w.frontend("f")
        await w.settled()
        for _ in range(3):
            await backend.open(request(), Sink())
        _start(worker, 1)
        worker.service.engine.reported = EngineStats(running=3, uncomputed_tokens=5000)
        await asyncio.sleep(0.5)
        w.routers.pop("r1")
        await w.nodes.crash("r1")
        late = await w.router("r2")
        await asyncio.sleep(1.0)
        (view,) = late.service.core.pool.view(late.node.now(), "tiny").sound
        assert (view.sequences, view.prefills, view.decodes) == (3, 2, 1)
        assert view.prefill_tokens == 5000
        assert view.work == pytest.approx(LatencyModel().prefill(5000))
        for handle in (2, 3):
            _start(worker, handle)
        worker.service.engine.reported = EngineStats(running=3)
        await asyncio.sleep(0.3)
        (view,) = late.service.core.pool.view(late.node.now(), "tiny").sound
        assert (view.prefills, view.decodes, view.work) == (0, 3, 0.0)
        late.service.core.check()


@virtually
async def test_only_a_busy_router_can_fall_silent() -> None:
    async with world() as w:
        for name in ("r1", "r2"):
            await w.router(name)
        await w.worker("a")
        await w.frontend("f")
        await w.settled()
        seen = w.routers["r2"].bookings
        await asyncio.sleep(3.0)
        assert seen.silent_peers == []
        await w.ask("f", "r1")
        await asyncio.sleep(2.0)
        assert seen.silent_peers == []
        w.nodes.world.pause("r1")
        await asyncio.sleep(0.6)
        assert seen.silent_peers == ["r1"]
        w.nodes.world.resume("r1")
        await asyncio.sleep(0.5)
        assert seen.silent_peers == []


@virtually
async def test_who_waits_in_a_long_queue_goes_to_a_worker_that_has_joined() -> None:
    async with world() as w:
        router = await w.router("r", hold_work=0.0)
        first = await w.worker("a")
        backend = await w.frontend("f")
        await w.settled()
        opened = [await backend.open(request(f"q{n}", prompt=[7] * 4000), Sink()) for n in range(6)]
        first.service.engine.reported = EngineStats(running=2)
        second = await w.worker("b")
        await w.nodes.until(lambda: len(second.service.engine.sinks) == 2)
        await asyncio.sleep(2.0)  # nobody goes to and fro
        core = router.service.core
        assert (
            core.numbers.moves_asked
            == len(second.service.engine.sinks)
            == len(first.service.engine.aborted)
        )
        assert set(first.service.engine.aborted) <= {3, 4, 5, 6}, "of those that had not begun"
        assert router.service.numbers().moves_asked == core.numbers.moves_asked
        for one in opened:
            one.cancel()
        await asyncio.sleep(0.5)
        core.check()


@virtually
async def test_a_router_that_is_to_leave_requests_alone_does() -> None:
    async with world() as w:
        await w.router("r", hold_work=0.0, rebalance=False)
        await w.worker("a")
        backend = await w.frontend("f")
        await w.settled()
        opened = [await backend.open(request(f"q{n}", prompt=[7] * 4000), Sink()) for n in range(6)]
        second = await w.worker("b")
        await asyncio.sleep(5.0)
        assert not second.service.engine.sinks
        for one in opened:
            one.cancel()
        await asyncio.sleep(0.1)

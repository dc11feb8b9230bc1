from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from pdserve.errors import (
    ConfigError,
    DeadlineExceeded,
    Draining,
    EngineDied,
    InvalidRequest,
    ModelNotFound,
    NoRouter,
    NotReady,
    NoWorker,
    Overloaded,
    PdserveError,
    ProtocolError,
    Unavailable,
    WorkerLost,
)
from pdserve.frontend.routing_hints import RoutingHints
from pdserve.ids import NodeId
from pdserve.messages.node import NodeCard, summarize_card
from pdserve.messages.routing import RoutingPreview
from pdserve.runtime.node import Node
from pdserve.runtime.registry import MemberGone
from pdserve.testing import virtual_time
from tests.frontend.dispatch.test_model_discovery import model
from tests.frontend.fake_cluster import Sink, request, world
from tests.net.world import virtually

if TYPE_CHECKING:
    from pdserve.frontend.placement import Placement
    from tests.frontend.fake_cluster import World


async def refused(w: World, kind: type[PdserveError]) -> PdserveError:
    """A request fails so; every refusal that a retry may help says when."""
    with pytest.raises(kind) as caught:
        await w.backend.open(request(), Sink())
    error = caught.value
    assert not error.retryable or error.retry_after is not None or error.http_status == 503
    return error


# ---------------------------------------------------------------------- the ordinary way


@virtually
async def test_a_request_travels_to_a_worker_and_its_tokens_back() -> None:
    async with world() as w:
        router, worker = await w.router("r"), await w.worker("a")
        await w.ready()
        sink = Sink()
        await w.backend.open(request(), sink)
        assert (worker.bookings, router.open) == ([1], {1: "a"})
        worker.say(5)
        worker.say(6, end=True)
        await w.nodes.until(lambda: sink.ends == 1)
        assert (sink.tokens, w.backend.requests) == ([5, 6], 0)
        await w.nodes.until(lambda: router.releases == ["finished"])
        assert worker.bookings == []


@virtually
async def test_readiness_says_what_is_missing() -> None:
    async with world() as w:
        assert w.backend.unready_reason() == "there is no worker in the cluster"
        worker = await w.worker("a", serves=False)
        worker.node.publish_card(NodeCard(reason="the engine restarts"), {})
        await w.nodes.until(lambda: w.backend.unready_reason() == "the engine restarts")
        worker.serve()
        words = "there is no router in the cluster"
        await w.nodes.until(lambda: w.backend.unready_reason() == words)
        await w.router("r")
        await w.ready()


@virtually
async def test_a_model_without_workers_is_refused_at_once() -> None:
    async with world() as w:
        await w.worker("a")
        await w.nodes.until(lambda: bool(w.backend.cards()))
        card = w.backend.cards()["tiny"]
        assert w.backend.refusal(card) is None
        await w.nodes.crash("a")
        await w.nodes.until(lambda: w.backend.refusal(card) is not None)
        error = w.backend.refusal(card)
        assert isinstance(error, NoWorker)
        assert error.retry_after is not None


@virtually
async def test_who_is_not_in_the_cluster_does_not_say_that_nobody_serves() -> None:
    async with world() as w:
        await w.worker("a")
        await w.nodes.until(lambda: bool(w.backend.cards()))
        card = w.backend.cards()["tiny"]
        await w.nodes.crash("a")
        await w.nodes.until(lambda: w.backend.refusal(card) is not None)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Node, "joined", property(lambda node: False))
            error = w.backend.refusal(card)
        assert isinstance(error, NotReady)
        assert error.retry_after is not None


# ---------------------------------------------------------------------- routers


@virtually
async def test_without_a_router_a_request_waits_for_one() -> None:
    async with world(router_wait=5.0) as w:
        worker = await w.worker("a")
        await w.nodes.until(lambda: bool(w.backend.cards()))
        opening = asyncio.ensure_future(w.backend.open(request(deadline=10.0), Sink()))
        await asyncio.sleep(2.0)
        assert not opening.done()
        await w.router("r")
        sequence = await opening
        assert len(worker.names) == 1
        (left,) = worker.deadlines
        assert left is not None
        assert left < 8.0, "what was spent waiting is not given again"
        sequence.cancel()


@virtually
async def test_with_no_router_for_long_it_is_refused() -> None:
    async with world(router_wait=5.0) as w:
        await w.worker("a")
        await w.nodes.until(lambda: bool(w.backend.cards()))
        before = w.nodes.loop.time()
        error = await refused(w, NoRouter)
        assert error.retry_after is not None
        assert 5.0 <= w.nodes.loop.time() - before < 5.5


@virtually
async def test_no_router_is_waited_for_beyond_the_request_s_own_deadline() -> None:
    async with world(router_wait=5.0) as w:
        await w.worker("a")
        await w.nodes.until(lambda: bool(w.backend.cards()))
        before = w.nodes.loop.time()
        with pytest.raises(DeadlineExceeded, match="waited for a router"):
            await w.backend.open(request(deadline=1.0), Sink())
        assert 0.99 <= w.nodes.loop.time() - before < 1.5


@virtually
async def test_a_router_that_dies_while_it_is_asked_is_replaced_by_another() -> None:
    async with world() as w:
        for name in ("r1", "r2"):
            router = await w.router(name)
        worker = await w.worker("a")
        await w.ready()
        first = w.backend.routers.order[0]
        w.routers[first].holds = True
        opening = asyncio.ensure_future(w.backend.open(request(), Sink()))
        await asyncio.sleep(0.1)
        assert len(w.routers[first].questions) == 1
        await w.nodes.crash(first)
        before = w.nodes.loop.time()
        sequence = await opening
        assert w.nodes.loop.time() - before < 0.5
        assert len(worker.names) == 1
        router = w.routers[w.backend.routers.order[0]]
        sequence.cancel()
        await w.nodes.until(lambda: router.releases == ["cancelled"])


@virtually
async def test_a_router_may_hold_a_request_as_long_as_it_has_time() -> None:
    async with world(router_wait=5.0) as w:
        router, worker = await w.router("r"), await w.worker("a")
        await w.ready()
        router.holds = True
        opening = asyncio.ensure_future(w.backend.open(request(deadline=100.0), Sink()))
        late = asyncio.ensure_future(w.backend.open(request("late", deadline=20.0), Sink()))
        await asyncio.sleep(30.0)
        assert isinstance(late.exception(), DeadlineExceeded)
        await w.nodes.until(lambda: router.dropped == ["late"])
        assert not opening.done()
        router.answer()
        sequence = await opening
        (left,) = worker.deadlines
        assert left is not None
        assert 65.0 < left < 71.0
        assert len(router.questions) == 2
        sequence.cancel()


@virtually
async def test_a_router_that_stands_still_is_left_for_another() -> None:
    async with world() as w:
        for name in ("r1", "r2"):
            await w.router(name)
        worker = await w.worker("a")
        await w.ready()
        first, second = (w.routers[name] for name in w.backend.routers.order)
        first.holds = True
        opening = asyncio.ensure_future(w.backend.open(request(deadline=100.0), Sink()))
        await asyncio.sleep(1.0)
        before = w.nodes.loop.time()
        w.nodes.world.pause(first.node.id)
        sequence = await opening
        assert w.nodes.loop.time() - before < 4.0
        assert (len(second.questions), len(worker.names)) == (1, 1)
        assert second.questions[0].waited > 1.0
        sequence.cancel()
        w.nodes.world.resume(first.node.id)
        await w.nodes.until(lambda: first.dropped == ["r"], 30.0)
        assert w.backend.routers._asking.get(first.node.id, {}) == {}


@virtually
async def test_doubts_may_come_one_after_the_other() -> None:
    async with world() as w:
        for name in ("r1", "r2"):
            await w.router(name)
        await w.worker("a")
        await w.ready()
        first = w.routers[w.backend.routers.order[0]]
        first.holds = True
        opening = asyncio.ensure_future(w.backend.open(request(deadline=100.0), Sink()))
        await w.nodes.until(lambda: first.questions != [])
        member = w.node.registry.get(first.node.id)
        assert member is not None
        doubtful = replace(member, suspect=True)
        w.backend.routers._leave_doubtful([doubtful])
        await asyncio.sleep(0)  # the question is being given up
        w.backend.routers._leave_doubtful([doubtful])
        sequence = await opening
        sequence.cancel()


@virtually
async def test_the_only_router_is_waited_for_while_it_is_in_doubt() -> None:
    """Nobody else could be asked; its death is another matter."""
    async with world(router_wait=3.0) as w:
        router = await w.router("r")
        await w.worker("a")
        await w.ready()
        router.holds = True
        opening = asyncio.ensure_future(w.backend.open(request(), Sink()))
        await asyncio.sleep(30.0)  # being held does not count as waiting for a router
        w.nodes.world.pause("r")
        before = w.nodes.loop.time()
        with pytest.raises(NoRouter):
            await opening
        assert 3.0 < w.nodes.loop.time() - before < 30.0


@virtually
async def test_dialling_a_router_in_vain_is_waiting_for_one() -> None:
    async with world(router_wait=5.0) as w:
        await w.router("r")
        await w.worker("a")
        await w.ready()

        async def vain(node: NodeId, timeout: float) -> None:
            await asyncio.sleep(timeout)
            raise DeadlineExceeded("nobody answers")

        before = w.nodes.loop.time()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(w.node, "link", vain)
            with pytest.raises(NoRouter):
                await w.backend.open(request(), Sink())
        assert w.nodes.loop.time() - before < 5.0 + 3.0 + 1.0


@virtually
async def test_a_router_that_cannot_be_reached_is_not_asked_for_a_while() -> None:
    async with world(router_wait=5.0) as w:
        router = await w.router("r")
        await w.worker("a")
        await w.ready()
        router.refusal = Draining("the router goes away")
        before = w.nodes.loop.time()
        await refused(w, NoRouter)
        assert w.nodes.loop.time() - before < 6.0
        assert 3 <= len(router.questions) <= 6
        await asyncio.sleep(10.0)
        assert w.backend.routers._routers._silent == {}


@pytest.mark.parametrize(
    "error", [KeyError("w9"), ConfigError("the policy failed"), Unavailable("x")]
)
def test_a_router_that_fails_inside_is_left_for_another(error) -> None:
    virtual_time.run(leave_a_failing_router(error))


async def leave_a_failing_router(error: Exception) -> None:
    async with world() as w:
        for name in ("r1", "r2"):
            await w.router(name)
        await w.worker("a")
        await w.ready()
        broken, sound = (w.routers[name] for name in w.backend.routers.order)
        broken.refusal = error
        for _ in range(3):
            sequence = await w.backend.open(request(), Sink())
            sequence.cancel()
        assert (len(broken.questions), len(sound.questions)) == (1, 3), "it is asked last"
        assert broken.node.id in w.degradations.reasons()["router_failing"]
        assert w.backend.metrics.router_failures.labels("failed").value == 1

        broken.refusal = None
        await asyncio.sleep(1.5)
        (await w.backend.open(request(), Sink())).cancel()
        assert len(broken.questions) == 2, "after a while it is tried again"
        assert "router_failing" not in w.degradations.reasons()


@virtually
async def test_when_every_router_fails_inside_the_client_hears_no_details() -> None:
    async with world() as w:
        for name in ("r1", "r2"):
            (await w.router(name)).refusal = KeyError("sk-secret")
        await w.worker("a")
        await w.ready()
        error = await refused(w, NoRouter)
        assert "sk-secret" not in str(error)
        assert "logs" in str(error)
        assert [len(router.questions) for router in w.routers.values()] == [1, 1]
        with pytest.raises(NoRouter):
            await w.backend.explain(request())


@virtually
async def test_one_router_that_fails_on_one_request_serves_the_others() -> None:
    async with world() as w:
        router, worker = await w.router("r"), await w.worker("a")
        await w.ready()
        router.refusal = KeyError("w9")
        await refused(w, NoRouter)
        router.refusal = None
        (await w.backend.open(request(), Sink())).cancel()
        assert len(worker.names) == 1


@virtually
async def test_a_router_that_speaks_nonsense_is_like_one_that_is_silent() -> None:
    async with world() as w:
        for name in ("r1", "r2"):
            await w.router(name)
        worker = await w.worker("a")
        await w.ready()
        w.routers[w.backend.routers.order[0]].refusal = ProtocolError("what is that?")
        sequence = await w.backend.open(request(), Sink())
        assert len(worker.names) == 1
        sequence.cancel()


@virtually
async def test_a_router_that_does_not_know_the_model_yet_is_asked_again() -> None:
    """It has joined after the worker, which this frontend has long known: no case of 404."""
    async with world() as w:
        router, worker = await w.router("r"), await w.worker("a")
        await w.ready()
        router.refusal = ModelNotFound("never heard of it")
        opening = asyncio.ensure_future(w.backend.open(request(), Sink()))
        await asyncio.sleep(0.3)
        assert not opening.done()
        router.refusal = None
        sequence = await opening
        assert len(worker.names) == 1
        sequence.cancel()


@virtually
async def test_another_router_may_know_the_model_already() -> None:
    async with world() as w:
        for name in ("r1", "r2"):
            await w.router(name)
        await w.worker("a")
        await w.ready()
        w.routers[w.backend.routers.order[0]].refusal = ModelNotFound("never heard of it")
        before = w.nodes.loop.time()
        sequence = await w.backend.open(request(), Sink())
        assert w.nodes.loop.time() - before < 0.01
        sequence.cancel()


@virtually
async def test_a_router_that_never_learns_of_the_model_is_no_404() -> None:
    async with world() as w:
        router = await w.router("r")
        await w.worker("a")
        await w.ready()
        router.refusal = ModelNotFound("never heard of it")
        before = w.nodes.loop.time()
        assert (await refused(w, NoWorker)).retry_after is not None
        assert w.nodes.loop.time() - before < 3.0
        assert len(router.questions) < 100


@virtually
async def test_what_a_router_decides_reaches_the_client() -> None:
    async with world() as w:
        router = await w.router("r")
        await w.worker("a")
        await w.ready()
        for error in (
            NotReady("loading", retry_after=4.0),
            Overloaded("full", retry_after=4.0),
        ):
            router.refusal = error
            found = await refused(w, type(error))
            assert (found.message, found.retry_after) == (error.message, 4.0)


@virtually
async def test_another_router_may_know_a_ready_worker() -> None:
    """The first one is cut off from the workers: what it says is no news to this frontend."""
    async with world() as w:
        for name in ("r1", "r2"):
            await w.router(name)
        worker = await w.worker("a")
        await w.ready()
        first = w.routers[w.backend.routers.order[0]]
        first.refusal = NotReady("no worker is ready", retry_after=4.0)
        before = w.nodes.loop.time()
        (await w.backend.open(request(), Sink())).cancel()
        assert w.nodes.loop.time() - before < 0.01
        asked = first.questions[-1]
        worker.node.publish_card(NodeCard(reason="the engine restarts"), {})
        await w.nodes.until(lambda: not w.backend.routers._is_served(asked))
        assert (await refused(w, NotReady)).message == "no worker is ready"
        assert w.nodes.loop.time() - before < 1.0


@virtually
async def test_the_time_at_a_router_that_knows_no_worker_is_no_wait_for_the_next() -> None:
    async with world() as w:
        for name in ("r1", "r2"):
            await w.router(name)
        await w.worker("a")
        await w.ready()
        first = w.routers[w.backend.routers.order[0]]
        first.holds = True
        opening = asyncio.ensure_future(w.backend.open(request(deadline=30.0), Sink()))
        await asyncio.sleep(10.0)
        ((_, call),) = first.held
        call.fail(NotReady("no worker is ready"))
        (await opening).cancel()


@virtually
async def test_of_a_full_worker_and_a_router_that_knows_none_the_client_hears_the_worker() -> None:
    async with world() as w:
        router, worker = await w.router("r"), await w.worker("a")
        await w.ready()
        sink = Sink()
        await w.backend.open(request(), sink)
        router.refusal = NotReady("no worker is ready")
        worker.refuse(Overloaded("32 requests are waiting"))
        await w.nodes.until(lambda: bool(sink.errors))
        assert [str(error) for error in sink.errors] == ["32 requests are waiting"]


@virtually
async def test_a_router_that_begins_anew_is_asked_again_unless_it_is_right() -> None:
    async with world() as w:
        router, worker = await w.router("r"), await w.worker("a")
        await w.ready()
        router.refusal = NoWorker("the last one has left", retry_after=4.0)
        opening = asyncio.ensure_future(w.backend.open(request(), Sink()))
        await asyncio.sleep(0.3)
        router.refusal = None
        (await opening).cancel()
        router.refusal = NoWorker("all are shutting down", retry_after=4.0)
        asked = router.questions[-1]
        worker.serve(draining=True)
        await w.nodes.until(lambda: not w.backend.routers._is_served(asked))
        before = w.nodes.loop.time()
        assert (await refused(w, NoWorker)).message == "all are shutting down"
        assert w.nodes.loop.time() - before < 0.01


@virtually
async def test_a_draining_router_is_not_asked() -> None:
    async with world() as w:
        for name in ("r1", "r2"):
            await w.router(name)
        await w.worker("a")
        await w.ready()
        first, second = w.backend.routers.order
        w.routers[first].node.publish_card(NodeCard(role="router", draining=True), {})
        await w.nodes.until(lambda: w.backend.routers.order == (second,))


@virtually
async def test_the_router_in_the_same_process_is_asked_first() -> None:
    async with world() as w:
        for name in ("r1", "r2", "r3"):
            await w.router(name)
        await w.worker("a")
        await w.ready()
        last = w.backend.routers.order[-1]
        w.backend.routers._own_router = last
        w.backend.routers._order_routers()
        assert w.backend.routers.order[0] == last
        w.routers[last].node.publish_card(NodeCard(role="router", draining=True), {})
        await w.nodes.until(lambda: len(w.backend.routers.order) == 2)
        assert last not in w.backend.routers.order


@virtually
async def test_a_router_in_doubt_is_asked_last() -> None:
    async with world() as w:
        for name in ("r1", "r2"):
            await w.router(name)
        await w.worker("a")
        await w.ready()
        first, second = w.backend.routers.order
        w.nodes.world.partition("f", first)
        await w.nodes.until(lambda: w.backend.routers.order == (second, first), 60.0)


# ---------------------------------------------------------------------- workers


@virtually
async def test_a_worker_that_refused_long_ago_is_asked_again() -> None:
    """The router has held the question for long, and has nobody else."""
    async with world() as w:
        router, worker = await w.router("r"), await w.worker("a")
        await w.ready()
        worker.refusal, router.holds = NotReady("restarting"), True
        opening = asyncio.ensure_future(w.backend.open(request(), Sink()))
        await w.nodes.until(lambda: bool(router.held), 10.0)
        router.answer()
        await w.nodes.until(lambda: bool(router.held), 10.0)
        worker.refusal = None
        await asyncio.sleep(3.0)
        call = router.held.pop()[1]
        call.fail(NoWorker("nobody is left"))
        await w.nodes.until(lambda: bool(router.held), 10.0)
        router.answer()
        sequence = await opening
        assert [q.excluded for q in router.questions] == [(), ("a",), ()]
        sequence.cancel()


@virtually
async def test_a_worker_that_refuses_is_excluded() -> None:
    for error in (Draining("going"), Overloaded("full"), EngineDied("gone"), NotReady("loading")):
        async with world() as w:
            router = await w.router("r")
            first, second = await w.worker("a"), await w.worker("b")
            await w.ready()
            first.refusal = error
            sequence = await w.backend.open(request(), Sink())
            assert [len(q.excluded) for q in router.questions] == [0, 1]
            assert [q.attempt for q in router.questions] == [0, 1]
            assert (w.backend.rerouted, len(second.names)) == (1, 1)
            assert list(router.open.values()) == ["b"]
            sequence.cancel()
            await asyncio.sleep(0.01)
            assert router.releases == ["failed", "cancelled"]


@virtually
async def test_what_no_worker_can_cure_is_not_tried_elsewhere() -> None:
    async with world() as w:
        router = await w.router("r")
        first = await w.worker("a")
        await w.worker("b")
        await w.ready()
        first.refusal = InvalidRequest("nonsense")
        await refused(w, InvalidRequest)
        assert len(router.questions) == 1
        await w.nodes.until(lambda: router.releases == ["failed"])


@virtually
async def test_what_one_request_is_refused_for_is_held_against_no_worker() -> None:
    async with world() as w:
        router = await w.router("r")
        worker = await w.worker("a")
        await w.ready()
        for error in (InvalidRequest("nonsense"), Overloaded("full", retry_after=9.0)):
            worker.refusal = error
            for _ in range(8):
                await refused(w, type(error))
        worker.refusal = None
        sink = Sink()
        await w.backend.open(request(), sink)
        assert router.questions[-1].excluded == ()
        await w.nodes.until(lambda: len(worker.requests) == 1)


@virtually
async def test_when_all_have_refused_the_client_hears_the_last_one() -> None:
    async with world() as w:
        router = await w.router("r")
        for name in "abcde":
            worker = await w.worker(name)
            worker.refusal = Overloaded(f"{name} is full", retry_after=9.0)
        await w.ready()
        error = await refused(w, Overloaded)
        assert (error.message, error.retry_after) == ("d is full", 9.0)
        assert len(router.questions) == 4
        await w.nodes.until(lambda: router.releases == ["failed"] * 4)


@virtually
async def test_a_worker_that_cannot_be_reached_is_the_operators_concern() -> None:
    async with world() as w:
        router = await w.router("r")
        await w.worker("a")
        await w.ready()
        router.workers = [("nobody", 1)]
        error = await refused(w, NoWorker)
        assert "nobody" not in error.message
        await w.nodes.until(lambda: router.releases == ["unreached"])


@virtually
async def test_without_migration_a_worker_that_dies_takes_its_requests_with_it_at_once() -> None:
    async with world(migration=False) as w:
        router = await w.router("r")
        await w.worker("a")
        await w.worker("b")
        await w.ready()
        sinks = [Sink() for _ in range(3)]
        for sink in sinks:
            await w.backend.open(request(), sink)
        w.workers["a"].say(5)
        await asyncio.sleep(0.01)
        await w.nodes.crash("a")
        await asyncio.sleep(0.2)
        assert [[type(e) for e in sink.errors] for sink in sinks] == [[WorkerLost]] * 3
        assert [sink.tokens for sink in sinks] == [[5]] * 3
        assert router.releases == ["failed"] * 3


@virtually
async def test_news_of_a_workers_leave_may_overtake_its_last_tokens() -> None:
    async with world(migration=False) as w:
        await w.router("r")
        worker = await w.worker("a")
        await w.ready()
        sink, stuck = Sink(), Sink()
        await w.backend.open(request(), sink)
        await w.backend.open(request(), stuck)
        worker.running.popitem()  # of which nothing more is heard
        member = w.backend._node.registry.get(NodeId("a"))
        assert member is not None
        w.backend._on_member(MemberGone(member, "left"))
        worker.say(5, end=True)
        await w.nodes.until(lambda: sink.ends == 1)
        assert (sink.tokens, sink.errors) == ([5], [])
        await w.nodes.until(lambda: bool(stuck.errors), 3.0)
        assert isinstance(stuck.errors[0], WorkerLost)


@virtually
async def test_a_worker_that_dies_before_it_answers_is_replaced() -> None:
    async with world() as w:
        router = await w.router("r")
        first, second = await w.worker("a"), await w.worker("b")
        await w.ready()
        w.nodes.world.pause("a")
        opening = asyncio.ensure_future(w.backend.open(request(), Sink()))
        await asyncio.sleep(1.0)
        assert not opening.done()
        w.nodes.world.resume("a")
        w.nodes.world.crash("a")
        sequence = await opening
        assert (first.names, len(second.names)) == ([], 1)
        sequence.cancel()
        await w.nodes.until(lambda: router.releases == ["failed", "cancelled"])


@virtually
async def test_a_worker_that_stands_still_is_replaced_and_told_to_forget() -> None:
    async with world() as w:
        await w.router("r")
        first, second = await w.worker("a"), await w.worker("b")
        await w.ready()
        w.nodes.world.pause("a")
        before = w.nodes.loop.time()
        sequence = await w.backend.open(request(), Sink())
        assert w.nodes.loop.time() - before < 6.0
        assert len(second.names) == 1
        w.nodes.world.resume("a")
        await w.nodes.until(lambda: not first.channels.requests)
        sequence.cancel()


@virtually
async def test_another_life_of_a_worker_is_no_failure_of_it() -> None:
    """The router has not heard of it yet: it is asked again, and the worker not excluded."""
    async with world() as w:
        router, worker = await w.router("r"), await w.worker("a")
        await w.ready()
        router.workers = [("a", worker.node.epoch - 1)]
        opening = asyncio.ensure_future(w.backend.open(request(), Sink()))
        await asyncio.sleep(1.0)
        router.workers = [("a", worker.node.epoch)]
        sequence = await opening
        unreached = len(router.questions) - 1
        assert 10 < unreached <= 20
        assert not any(q.excluded for q in router.questions)
        sequence.cancel()
        await w.nodes.until(lambda: router.releases == ["unreached"] * unreached + ["cancelled"])


@virtually
async def test_a_router_that_never_learns_of_another_life_is_given_up() -> None:
    async with world() as w:
        router, worker = await w.router("r"), await w.worker("a")
        await w.ready()
        router.workers = [("a", worker.node.epoch - 1)]
        before = w.nodes.loop.time()
        with pytest.raises(NoWorker):
            await w.backend.open(request(), Sink())
        assert 2.0 <= w.nodes.loop.time() - before < 3.0


@virtually
async def test_a_link_to_an_earlier_life_is_given_up() -> None:
    """The router knows that the worker lives again; the old connection is only not yet dead."""
    async with world() as w:
        router, worker = await w.router("r"), await w.worker("a")
        await w.ready()
        link = w.node.link_nowait(NodeId("a"))
        assert link is not None
        router.workers = [("a", worker.node.epoch + 1)]
        opening = asyncio.ensure_future(w.backend.open(request(), Sink()))
        await asyncio.sleep(0.02)
        assert link.down is not None
        router.workers = [("a", worker.node.epoch)]
        (await opening).cancel()


@virtually
async def test_a_frontend_held_for_dead_loses_its_requests_and_serves_again() -> None:
    async with world(migration=False) as w:
        await w.router("r")
        worker = await w.worker("a")
        await w.worker("b", serves=False)
        w.workers.pop("b")
        await w.ready()
        sink = Sink()
        await w.backend.open(request(), sink)
        w.nodes.world.pause("f")
        await w.nodes.until(lambda: worker.node.registry.get(NodeId("f")) is None, 30.0)
        assert worker.channels.requests == 0
        w.nodes.world.resume("f")
        await w.nodes.until(lambda: w.node.lives == 2, 30.0)
        assert [type(error) for error in sink.errors] == [WorkerLost]
        await w.nodes.until(lambda: w.backend.unready_reason() is None)
        (await w.backend.open(request(), Sink())).cancel()


@virtually
async def test_a_worker_held_for_dead_serves_again_in_its_next_life() -> None:
    async with world(migration=False) as w:
        router, worker = await w.router("r"), await w.worker("a")
        await w.worker("b", serves=False)
        w.workers.pop("b")
        await w.ready()
        sink = Sink()
        await w.backend.open(request(), sink)
        first = worker.node.epoch
        w.nodes.world.pause("a")
        await w.nodes.until(lambda: bool(sink.errors), 30.0)
        assert isinstance(sink.errors[0], WorkerLost)
        w.nodes.world.resume("a")
        await w.nodes.until(lambda: worker.node.epoch > first, 30.0)
        assert worker.channels.requests == 0
        router.workers = [("a", worker.node.epoch)]
        await w.ready()
        (await w.backend.open(request(), Sink())).cancel()
        assert len(worker.names) == 2


# ---------------------------------------------------------------------- cancellation


@virtually
async def test_cancelled_at_any_moment_nothing_is_left() -> None:
    """One run per turn of the loop between the question and the answer."""
    for turns in range(60):
        async with world() as w:
            router, worker = await w.router("r"), await w.worker("a")
            await w.ready()
            sink = Sink()
            opening = asyncio.ensure_future(w.backend.open(request(), sink))
            for _ in range(turns):
                await asyncio.sleep(0)
            done = opening.done()
            if done:
                (await opening).cancel()
            else:
                opening.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await opening
            await asyncio.sleep(0.1)
            worker.say(5, end=True)
            await asyncio.sleep(0.1)
            assert (sink.tokens, sink.errors) == ([], [])
            assert worker.channels.requests == 0
            # A question that was cancelled on its way may have been answered all the same.
            assert router.open == {}
    assert done, "the loop has more turns than were tried"


@virtually
async def test_cancelled_while_a_router_or_a_link_is_waited_for() -> None:
    async with world() as w:
        await w.worker("a")
        await w.nodes.until(lambda: bool(w.backend.cards()))
        waiting = asyncio.ensure_future(w.backend.open(request(), Sink()))
        await asyncio.sleep(0.1)
        router = await w.router("r")
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await w.ready()
        link = w.node.link_nowait(NodeId("a"))
        assert link is not None
        w.nodes.world.partition("f", "a")
        link.abort()
        dialling = asyncio.ensure_future(w.backend.open(request(), Sink()))
        await asyncio.sleep(0.1)
        dialling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await dialling
        await w.nodes.until(lambda: router.releases == ["unreached"])
        w.nodes.world.heal()


@virtually
async def test_closing_ends_what_runs() -> None:
    async with world() as w:
        await w.router("r")
        await w.worker("a")
        await w.ready()
        sink = Sink()
        await w.backend.open(request(), sink)
        w.backend.close(Draining("shutting down"))
        assert [type(error) for error in sink.errors] == [Draining]


@virtually
async def test_closing_ends_what_no_worker_has_accepted_once() -> None:
    """A worker that stands still has been asked: who opens gets the error, and nobody else."""
    async with world() as w:
        await w.router("r")
        await w.worker("a")
        await w.ready()
        (await w.backend.open(request(), Sink())).cancel()
        w.nodes.world.pause("a")
        sink = Sink()
        opening = asyncio.ensure_future(w.backend.open(request(), sink))
        await w.nodes.until(lambda: bool(w.backend.routers.booked))
        w.backend.close(Draining("shutting down"))
        with pytest.raises(Draining):
            await opening
        assert sink.errors == []


@virtually
async def test_cancelled_while_it_is_held_the_router_hears_at_once() -> None:
    async with world() as w:
        router = await w.router("r")
        await w.worker("a")
        await w.ready()
        router.holds = True
        opening = asyncio.ensure_future(w.backend.open(request(), Sink()))
        await asyncio.sleep(1.0)
        opening.cancel()
        await asyncio.sleep(0.01)
        assert opening.cancelled()
        assert router.dropped == ["r"]


@virtually
async def test_an_answer_that_crosses_the_cancellation_is_given_back() -> None:
    async with world() as w:
        router = await w.router("r")
        await w.worker("a")
        await w.ready()
        router.holds = True
        w.nodes.world.set_conditions("r", "f", delay_min=0.05, delay_max=0.05)
        opening = asyncio.ensure_future(w.backend.open(request(), Sink()))
        await asyncio.sleep(0.5)
        router.answer()
        await asyncio.sleep(0.01)
        assert router.open == {1: "a"}
        opening.cancel()
        await asyncio.sleep(0.5)
        assert opening.cancelled()
        assert (router.open, router.releases) == ({}, ["unreached"])


# ---------------------------------------------------------------------- accepted, then refused


@virtually
async def test_a_worker_that_has_no_room_after_all_is_replaced() -> None:
    async with world() as w:
        router = await w.router("r")
        first, second = await w.worker("a"), await w.worker("b")
        await w.ready()
        sink = Sink()
        placed: list[Placement] = []
        stream = await w.backend.open(request(), sink, on_placed=placed.append)
        first.refuse(Overloaded("the queue is full", retry_after=9.0))
        await w.nodes.until(lambda: bool(second.running))
        assert w.backend.rerouted == 1
        assert [p.worker for p in placed] == ["a", "b"]
        assert [q.excluded for q in router.questions] == [(), ("a",)]
        second.say(5)
        second.say(6, end=True)
        await w.nodes.until(lambda: sink.ends == 1)
        assert (sink.tokens, sink.errors) == ([5, 6], [])
        await w.nodes.until(lambda: router.releases == ["failed", "finished"])
        stream.cancel()


@virtually
async def test_after_a_token_a_refusal_is_final() -> None:
    async with world() as w:
        router = await w.router("r")
        first = await w.worker("a")
        await w.worker("b")
        await w.ready()
        sink = Sink()
        await w.backend.open(request(), sink)
        first.say(5)
        first.refuse(Overloaded("the queue is full", retry_after=9.0))
        await w.nodes.until(lambda: bool(sink.errors))
        assert [error.message for error in sink.errors] == ["the queue is full"]
        assert len(router.questions) == 1


@virtually
async def test_when_no_worker_has_room_after_all_the_client_hears_the_last_one() -> None:
    async with world() as w:
        await w.router("r")
        for name in "ab":
            await w.worker(name)
        await w.ready()
        sink = Sink()
        await w.backend.open(request(), sink)
        for name in "ab":
            worker = w.workers[name]
            await w.nodes.until(lambda worker=worker: bool(worker.running))  # type: ignore[misc]
            worker.refuse(Overloaded(f"{name} is full", retry_after=9.0))
        await w.nodes.until(lambda: bool(sink.errors))
        assert [(e.message, e.retry_after) for e in sink.errors] == [("b is full", 9.0)]


@virtually
async def test_cancelled_at_any_moment_of_the_second_way_nothing_is_left() -> None:
    reached = False
    for turns in range(60):
        async with world() as w:
            router = await w.router("r")
            first, second = await w.worker("a"), await w.worker("b")
            await w.ready()
            sink = Sink()
            stream = await w.backend.open(request(), sink)
            first.refuse(Overloaded("the queue is full"))
            for _ in range(turns):
                await asyncio.sleep(0)
            reached = bool(second.running) and not w.backend._searching
            stream.cancel()
            second.say(5, end=True)
            await asyncio.sleep(0.1)
            assert (sink.tokens, sink.errors) == ([], [])
            assert router.open == {}
            assert w.backend._searching == {}
    assert reached, "the way has more turns than were tried"


@virtually
async def test_closing_ends_what_is_on_its_second_way() -> None:
    async with world() as w:
        router = await w.router("r")
        first = await w.worker("a")
        await w.worker("b")
        await w.ready()
        sink = Sink()
        await w.backend.open(request(), sink)
        router.holds = True
        first.refuse(Overloaded("the queue is full"))
        await w.nodes.until(lambda: bool(router.held))
        assert w.backend.requests == 1
        w.backend.close(Draining("shutting down"))
        assert [type(error) for error in sink.errors] == [Draining]
        await w.nodes.until(lambda: router.dropped == ["r"])


# ---------------------------------------------------------------------- what a router is told


@virtually
async def test_a_router_hears_what_the_client_wishes() -> None:
    async with world() as w:
        router = await w.router("r")
        for name in "ab":
            await w.worker(name)
        await w.ready()
        hints = RoutingHints(
            session_id="s",
            tenant="t",
            weight=2.0,
            allowed=(NodeId("a"), NodeId("b")),
            denied=(NodeId("a"),),
            slo_ttft=0.5,
            waited=0.25,
        )
        wanted = request(block_names=bytes(range(32)), names_id=b"12345678", deadline=60.0)
        placed: list[Placement] = []
        router.policy = {"policy": "ttft", "overlap_blocks": 2, "predicted_ttft": 0.5, "held": 0.1}
        stream = await w.backend.open(wanted, Sink(), hints, placed.append)
        (question,) = router.questions
        assert (question.session_id, question.tenant, question.weight) == ("s", "t", 2.0)
        assert (question.allowed, question.excluded) == (("a", "b"), ("a",))
        assert question.slo_ttft == 0.5
        assert question.deadline == pytest.approx(60.0, abs=0.1)
        assert question.waited == pytest.approx(0.25, abs=0.1)
        assert question.names == bytes((*range(8), *range(16, 24)))
        assert (question.names_id, question.block_size) == (b"12345678", model().block_size)
        (placement,) = placed
        assert (placement.worker, placement.router, placement.policy) == ("b", "r", "ttft")
        assert placement.overlap_tokens == 2 * model().block_size
        assert placement.predicted_ttft == pytest.approx(0.75, abs=0.1)
        assert (placement.held, placement.attempts) == (0.1, 1)
        stream.cancel()


@virtually
async def test_a_wish_that_nobody_fits_is_answered_at_once() -> None:
    async with world() as w:
        await w.router("r")
        await w.worker("a")
        await w.ready()
        before = w.nodes.loop.time()
        with pytest.raises(NoWorker, match="nobody is left"):
            await w.backend.open(request(), Sink(), RoutingHints(allowed=(NodeId("z"),)))
        assert w.nodes.loop.time() - before < 0.1


@virtually
async def test_a_router_explains_without_counting_anything() -> None:
    async with world() as w:
        for name in ("r1", "r2"):
            router = await w.router(name)
            router.explained = RoutingPreview(policy="ttft", worker=NodeId("a"))
        worker = await w.worker("a")
        await w.ready()
        assert await w.backend.explain(request()) == (
            w.backend.routers.order[0],
            router.explained,
        )
        silent = w.routers[w.backend.routers.order[0]]
        silent.explained = None
        name, _ = await w.backend.explain(request())
        assert name == w.backend.routers.order[1]
        assert worker.names == []
        assert all(r.open == {} for r in w.routers.values())


# ---------------------------------------------------------------------- links that are replaced


@virtually
async def test_streams_go_on_where_they_are_when_a_link_is_replaced() -> None:
    """As when two nodes dial each other at once: the one of the smaller id has precedence."""
    for name in ("a", "w"):
        async with world() as w:
            await w.router("r")
            worker = await w.worker(name)
            await w.ready()
            replaced = 0
            for number in range(3):
                old, new = Sink(), Sink()
                await w.backend.open(request(), old)
                before = w.node.link_nowait(NodeId(name))
                await w.node.endpoint.dial(f"{name}:7000")
                await worker.node.endpoint.dial("f:7000")
                replaced += w.node.link_nowait(NodeId(name)) is not before
                await w.backend.open(request(), new)
                await asyncio.sleep(60.0)  # requests take their time
                worker.say(number, end=True)
                await asyncio.sleep(0.1)
                assert old.ends == new.ends == 1
                assert old.tokens == new.tokens == [number]
                assert not w.backend.workers.retired
            assert replaced


@virtually
async def test_a_link_that_the_peer_gives_up_is_replaced_for_what_is_new() -> None:
    async with world() as w:
        await w.router("r")
        worker = await w.worker("a")
        await w.ready()
        old, new = Sink(), Sink()
        await w.backend.open(request(), old)
        back = worker.node.link_nowait(NodeId("f"))
        assert back is not None
        back.close("not needed here")
        await asyncio.sleep(0.01)
        before = w.nodes.loop.time()
        await w.backend.open(request(), new)
        assert w.nodes.loop.time() - before < 0.1
        assert w.backend.rerouted == 0
        worker.say(5, end=True)
        await w.nodes.until(lambda: old.ends == new.ends == 1)


@virtually
async def test_a_router_behind_a_link_that_is_given_up_is_reached_by_another() -> None:
    async with world() as w:
        router = await w.router("r")
        await w.worker("a")
        await w.ready()
        back = router.node.link_nowait(NodeId("f"))
        assert back is not None
        back.close("not needed here")
        await asyncio.sleep(0)
        before = w.nodes.loop.time()
        sequence = await w.backend.open(request(), Sink())
        assert w.nodes.loop.time() - before < 0.1
        sequence.cancel()


# ---------------------------------------------------------------------- models


@virtually
async def test_conflicting_models_are_a_degradation_while_they_last() -> None:
    async with world() as w:
        await w.worker("a")
        other = await w.worker("b", serves=False)
        await w.nodes.until(lambda: bool(w.backend.cards()))
        small, parts = summarize_card(model(tokenizer_json=b"another"))
        other.node.publish_card(NodeCard(role="worker", started=2, models=(small,)), parts)
        await w.nodes.until(lambda: "model_conflict" in w.degradations.reasons())
        assert w.backend.members.workers("tiny") == ("a",)
        await w.nodes.crash("b")
        await w.nodes.until(lambda: "model_conflict" not in w.degradations.reasons())

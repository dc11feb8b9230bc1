"""Requests that move while their worker still has them: a backend among played nodes."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from pdserve.errors import Draining, EngineDied, InvalidRequest, Overloaded
from pdserve.frontend.routing_hints import NO_HINTS, RoutingHints
from pdserve.messages.routing import RouterMigrationHint
from pdserve.messages.tiers import KvSource
from pdserve.runtime.rpc_methods import MOVE
from pdserve.testing import virtual_time
from pdserve.wire.codec import encode
from tests.frontend.dispatch.test_dispatched_request import begun, ended, gaps, outcomes
from tests.frontend.fake_cluster import Sink, request, world
from tests.net.world import virtually

if TYPE_CHECKING:
    from pdserve.errors import PdserveError
    from pdserve.frontend.dispatch.dispatched_request import DispatchedRequest
    from pdserve.messages.worker_stream import MigrationHintReason
    from tests.frontend.fake_cluster import Router, Worker, World

LONG = [7] * 200
"""A prompt that is worth a pre-copy."""


class Scene:
    """A request that streams from `a`, and `b` beside it."""

    def __init__(self, w: World, router: Router, first: Worker, second: Worker) -> None:
        self.w = w
        self.router = router
        self.first = first
        self.second = second
        self.sink = Sink()
        self.stream: DispatchedRequest

    @classmethod
    async def make(cls, w: World, *tokens: int, prompt: list[int] = LONG, **fields: Any) -> Scene:
        made = cls(w, await w.router("r"), await w.worker("a"), await w.worker("b"))
        await w.ready()
        hints = fields.pop("hints", NO_HINTS)
        made.stream = await w.backend.open(request(prompt=prompt, **fields), made.sink, hints)
        if tokens:
            made.first.say(*tokens)
            await w.nodes.until(lambda: made.sink.tokens == list(tokens))
        return made

    async def ask(self, reason: MigrationHintReason) -> None:
        """The worker asks that it be served elsewhere."""
        assert self.first.channels.ask_to_move(None, reason) == 1
        await asyncio.sleep(0.02)

    async def warmed(self) -> None:
        """The other one has the warm-up in hand, and computes it."""
        await begun(self.w, self.second)

    async def finish(self, worker: Worker, *tokens: int) -> None:
        worker.say(*tokens, end=True)
        await self.w.nodes.until(partial(ended, self.sink))


@virtually
async def test_a_stream_goes_on_while_the_next_worker_is_warmed_up() -> None:
    async with world() as w:
        scene = await Scene.make(w, 5, 6)
        await scene.ask("kv")
        await scene.warmed()
        question = scene.router.questions[-1]
        assert (question.hold, question.excluded) == (False, ("a",))
        (warm,) = scene.second.requests
        assert (warm.prompt.tolist(), warm.output, warm.n) == (LONG, [[5, 6]], 1)
        assert (warm.sampling.max_tokens, warm.sampling.ignore_eos) == (3, True)
        assert scene.second.bookings == [], "it counts for nobody"
        scene.first.say(7)
        scene.second.say(99, end=True)  # nobody's token
        await w.nodes.until(lambda: len(scene.second.requests) == 2)
        wanted = scene.second.requests[1]
        assert wanted.output == [[5, 6, 7]]
        assert scene.first.aborted == [1]
        scene.first.say(98)
        await scene.finish(scene.second, 8)
        assert (scene.sink.tokens, scene.sink.errors) == ([5, 6, 7, 8], [])
        assert outcomes(w) == {("kv", "completed"): 1}
        assert gaps(w) == 1
        await w.nodes.until(lambda: scene.router.releases == ["cancelled", "finished"])


@virtually
async def test_the_kv_is_fetched_from_the_worker_that_has_it_if_both_can() -> None:
    for theirs in ((), ("tcp",), ("rdma",)):
        async with world() as w:
            scene = await Scene.make(w, 5)
            scene.router.policy = {"kv_sources": (KvSource("x", 1, 6),)}
            scene.first.serve(transfers=("shm", "tcp"))
            scene.second.serve(transfers=theirs)
            await asyncio.sleep(1.0)
            await scene.ask("itl")
            await scene.warmed()
            (warm,) = scene.second.requests
            fetched = ("a", scene.first.node.epoch)
            assert (warm.source, warm.source_epoch) == (fetched if theirs == ("tcp",) else ("", 0))
            assert [one.node for one in warm.kv_sources] == ([] if theirs == ("tcp",) else ["x"])
            scene.stream.cancel()
            await asyncio.sleep(0.1)
            assert scene.second.running == {}


@virtually
async def test_short_ones_and_those_that_only_wait_are_not_warmed_up() -> None:
    reason: MigrationHintReason
    for reason, prompt, tokens in (("kv", [7] * 8, (5,)), ("queue", LONG, ()), ("drain", LONG, ())):
        async with world() as w:
            scene = await Scene.make(w, *tokens, prompt=prompt)
            await scene.ask(reason)
            await begun(w, scene.second)
            (wanted,) = scene.second.requests
            assert wanted.source == ""
            assert scene.second.bookings != []
            assert scene.first.running == {}
            await scene.finish(scene.second, 6)
            assert scene.sink.tokens == [*tokens, 6]
            assert outcomes(w) == {(reason, "completed"): 1}


@virtually
async def test_every_choice_that_goes_on_is_warmed_up() -> None:
    async with world() as w:
        scene = await Scene.make(w, 5, n=3)
        scene.first.say(6, choice=1, end=True)
        scene.first.say(7, choice=2)
        await w.nodes.until(lambda: len(scene.sink.tokens) == 3)
        await scene.ask("kv")
        for output in ([5], [7]):
            await scene.warmed()
            assert scene.second.requests[-1].output == [output]
            scene.second.say(99, end=True)
        await begun(w, scene.second)
        wanted = scene.second.requests[-1]
        assert (wanted.output, wanted.ended) == ([[5], [6], [7]], (1,))
        for choice in (0, 2):
            scene.second.say(8, choice=choice, end=True)
        await w.nodes.until(lambda: scene.sink.ends == 3)


@pytest.mark.parametrize("error", [None, EngineDied("no"), Overloaded("no")])
def test_a_warm_up_may_fail(error: PdserveError | None) -> None:
    """None: it takes too long."""

    @virtually
    async def run() -> None:
        async with world() as w:
            scene = await Scene.make(w, 5)
            await scene.ask("drain")
            await scene.warmed()
            before = w.nodes.loop.time()
            if error is not None:
                scene.second.refuse(error)
            await w.nodes.until(lambda: len(scene.second.requests) == 2)
            assert w.nodes.loop.time() - before < (6.0 if error is None else 0.1)
            assert scene.second.aborted == ([1] if error is None else [])
            await scene.finish(scene.second, 6)
            assert scene.sink.tokens == [5, 6]

    run()


# ---------------------------------------------------------------------- staying


@virtually
async def test_it_stays_where_nobody_else_has_room() -> None:
    async with world() as w:
        scene = await Scene.make(w, 5)
        scene.router.refusal = Overloaded("all are busy")
        await scene.ask("kv")
        await asyncio.sleep(5.0)
        assert len(scene.router.questions) == 2
        assert outcomes(w) == {("kv", "stayed"): 1}
        await scene.ask("itl")  # it may be asked again
        assert len(scene.router.questions) == 3
        await scene.finish(scene.first, 6)
        assert scene.sink.tokens == [5, 6]


@virtually
async def test_a_router_that_holds_the_question_all_the_same_is_not_waited_for() -> None:
    """As one of the release before does."""
    async with world() as w:
        scene = await Scene.make(w, 5)
        scene.router.holds = True
        await scene.ask("kv")
        await w.nodes.until(lambda: outcomes(w) == {("kv", "stayed"): 1}, 5.0)
        assert scene.router.dropped == ["r"]
        await scene.finish(scene.first, 6)


@virtually
async def test_who_has_to_go_is_asked_for_until_somebody_has_room() -> None:
    async with world() as w:
        scene = await Scene.make(w, 5)
        scene.router.workers.pop()
        await scene.ask("drain")
        assert scene.router.questions[-1].hold
        await asyncio.sleep(20.0)
        assert len(scene.router.questions) < 50
        assert outcomes(w) == {}
        scene.router.workers.append(("b", scene.second.node.epoch))
        await scene.warmed()
        scene.second.say(99, end=True)
        await w.nodes.until(lambda: len(scene.second.requests) == 2)
        await scene.finish(scene.second, 6)
        assert scene.sink.tokens == [5, 6]


@virtually
async def test_who_has_to_go_may_go_before_anybody_has_room() -> None:
    async with world() as w:
        scene = await Scene.make(w, 5)
        scene.router.workers.pop()
        await scene.ask("drain")
        await asyncio.sleep(3.0)
        scene.first.refusal = Draining("it is going away")
        scene.first.refuse(Draining("the time is over"))
        await asyncio.sleep(3.0)
        scene.router.workers.append(("b", scene.second.node.epoch))
        await begun(w, scene.second)
        await scene.finish(scene.second, 6)
        assert scene.sink.tokens == [5, 6]
        assert outcomes(w) == {("drain", "completed"): 1}


@virtually
async def test_a_worker_that_goes_while_it_is_only_overloaded_is_left() -> None:
    async with world() as w:
        scene = await Scene.make(w, 5)
        scene.router.holds = True
        await scene.ask("kv")
        await scene.ask("drain")
        await asyncio.sleep(3.0)
        scene.router.holds = False
        scene.router.answer()
        await scene.warmed()
        scene.second.say(99, end=True)
        await w.nodes.until(lambda: len(scene.second.requests) == 2)
        await scene.finish(scene.second, 6)
        assert outcomes(w) == {("drain", "completed"): 1}


@virtually
async def test_restlessness_has_a_bound() -> None:
    async with world() as w:
        scene = await Scene.make(w, 5, prompt=[7])
        here, there = scene.first, scene.second
        for _ in range(3):
            here.channels.ask_to_move(None, "itl")
            await begun(w, there)
            assert here.running == {}
            there.say(6)
            await asyncio.sleep(3.0)
            here, there = there, here
        here.channels.ask_to_move(None, "itl")
        await asyncio.sleep(3.0)
        assert there.running == {}
        here.channels.ask_to_move(None, "drain")
        await begun(w, there)
        await scene.finish(there, 7)
        assert scene.sink.tokens == [5, 6, 6, 6, 7]


# ---------------------------------------------------------------------- waiting in a queue


@virtually
async def test_a_router_may_say_that_another_would_begin_sooner() -> None:
    async with world() as w:
        scene = await Scene.make(w)
        ((booking, _),) = scene.router.open.items()
        link = scene.router.node.link_nowait(w.node.id)
        assert link is not None
        link.tell(MOVE.id, encode(RouterMigrationHint(booking + 77)))  # of long ago
        link.tell(MOVE.id, encode(RouterMigrationHint(booking)))
        await begun(w, scene.second)
        assert scene.router.questions[-1].excluded == ("a",)
        await scene.finish(scene.second, 6)
        assert outcomes(w) == {("queue", "completed"): 1}


@virtually
async def test_what_has_begun_meanwhile_does_not_wait_any_more() -> None:
    async with world() as w:
        scene = await Scene.make(w)
        scene.router.holds = True
        await scene.ask("queue")
        scene.first.say(5)
        await asyncio.sleep(0.02)
        scene.router.answer()
        await w.nodes.until(lambda: outcomes(w) == {("queue", "stayed"): 1})
        await scene.ask("queue")
        assert len(scene.router.questions) == 2
        assert scene.router.releases == ["unreached"]
        await scene.finish(scene.first, 6)
        assert scene.sink.tokens == [5, 6]


@virtually
async def test_nobody_is_left_who_has_not_said_that_it_took_the_request() -> None:
    """Else it would be placed by whoever still waits for that word, and by the move."""
    async with world() as w:
        scene = Scene(w, await w.router("r"), await w.worker("a"), await w.worker("b"))
        await w.ready()
        submit = scene.first.submit

        def silently(wanted: Any, sink: Any) -> int:
            for channel in scene.first.channels._open:
                channel.due = True  # nothing leaves
            return submit(wanted, sink)

        scene.first.submit = silently  # type: ignore[assignment, method-assign]
        opening = asyncio.ensure_future(w.backend.open(request(), scene.sink))
        await begun(w, scene.first)
        link = scene.router.node.link_nowait(w.node.id)
        assert link is not None
        link.tell(MOVE.id, encode(RouterMigrationHint(next(iter(scene.router.open)))))
        await asyncio.sleep(1.0)
        scene.second.say(5)
        await asyncio.sleep(9.0)
        await opening
        if not scene.sink.tokens:
            scene.second.say(5)
        await scene.finish(scene.second, 6)
        assert scene.sink.tokens == [5, 6]
        assert len(scene.second.requests) == 1
        assert scene.first.running == {}


@virtually
async def test_a_worker_may_ask_in_the_breath_in_which_it_takes_a_request() -> None:
    async with world() as w:
        scene = Scene(w, await w.router("r"), await w.worker("a"), await w.worker("b"))
        await w.ready()
        submit = scene.first.submit

        def regretting(wanted: Any, sink: Any) -> int:
            asyncio.get_running_loop().call_soon(scene.first.channels.ask_to_move, None, "drain")
            return submit(wanted, sink)

        scene.first.submit = regretting  # type: ignore[assignment, method-assign]
        scene.stream = await w.backend.open(request(), scene.sink)
        await begun(w, scene.second)
        assert scene.first.running == {}
        await scene.finish(scene.second, 5)
        assert scene.sink.tokens == [5]
        assert outcomes(w) == {("drain", "completed"): 1}


@virtually
async def test_a_limit_for_the_first_token_is_no_reason_to_stay() -> None:
    """Routers would find that it cannot be kept any more."""
    async with world() as w:
        hints = RoutingHints(slo_ttft=0.5)
        scene = await Scene.make(w, 5, prompt=[7], hints=hints)
        assert scene.router.questions[0].slo_ttft == 0.5
        await asyncio.sleep(1.0)
        await scene.ask("drain")
        await begun(w, scene.second)
        assert scene.router.questions[-1].slo_ttft is None
        await scene.finish(scene.second, 6)


# ---------------------------------------------------------------------- while it moves


@virtually
async def test_the_other_worker_may_fail_to_take_it() -> None:
    async with world() as w:
        scene = await Scene.make(w, 5, prompt=[7])
        third = await w.worker("c")
        await w.ready()
        scene.second.refusal = Overloaded("full")
        await scene.ask("kv")
        await begun(w, third)
        assert third.requests[0].output == [[5]]
        await scene.finish(third, 6)
        assert scene.sink.tokens == [5, 6]
        assert outcomes(w) == {("kv", "completed"): 1}


@virtually
async def test_a_worker_that_cannot_be_reached_is_not_left_for() -> None:
    async with world() as w:
        scene = await Scene.make(w, 5, prompt=[7])
        scene.router.workers[1] = ("nobody", 1)
        await scene.ask("kv")
        await w.nodes.until(lambda: outcomes(w) == {("kv", "stayed"): 1})
        assert scene.first.aborted == []
        await scene.finish(scene.first, 6)


@virtually
async def test_its_worker_may_die_while_another_is_warmed_up() -> None:
    for held in (False, True):
        async with world() as w:
            scene = await Scene.make(w, 5)
            scene.router.holds = held
            await scene.ask("drain")
            if not held:
                await scene.warmed()
            scene.router.holds = False
            await w.nodes.crash("a")
            await w.nodes.until(lambda s=scene: bool(s.second.bookings))  # type: ignore[misc]
            assert scene.second.requests[-1].output == [[5]]
            assert len(scene.second.running) == 1, "the warm-up has been ended"
            await scene.finish(scene.second, 6)
            assert scene.sink.tokens == [5, 6]
            assert outcomes(w) == {("worker_lost", "completed"): 1}
            assert not w.backend._searching


@virtually
async def test_it_may_end_while_another_worker_is_looked_for_or_warmed_up() -> None:
    for held in (False, True):
        async with world() as w:
            scene = await Scene.make(w, 5)
            scene.router.holds = held
            await scene.ask("drain")
            if not held:
                await scene.warmed()
            await scene.finish(scene.first, 6)
            await asyncio.sleep(0.1)
            assert scene.second.running == {}
            assert not w.backend._searching
            assert scene.router.open == {}
            assert outcomes(w) == {}


@virtually
async def test_cancelled_at_any_moment_of_a_move_nothing_is_left() -> None:
    for lost in (False, True):
        states = set()
        for turns in range(0, 160, 2):
            async with world() as w:
                scene = await Scene.make(w, 5, prompt=[7] if lost else LONG)
                if lost:
                    scene.first.refuse(EngineDied("it died"))
                else:
                    scene.first.channels.ask_to_move(None, "kv")
                for _ in range(turns):
                    await asyncio.sleep(0)
                    if scene.second.running and not scene.second.bookings:
                        scene.second.say(99, end=True)  # the warm-up
                states.add((bool(scene.second.requests), bool(scene.second.bookings)))
                scene.stream.cancel()
                before = list(scene.sink.tokens)
                await asyncio.sleep(0.1)
                for worker in (scene.first, scene.second):
                    worker.say(6, end=True)
                await asyncio.sleep(0.1)
                assert (scene.sink.tokens, scene.sink.errors) == (before, [])
                assert scene.router.open == {}
                assert not w.backend._searching
                assert not w.backend.routers.booked
                assert w.backend.requests == 0
        assert (False, False) in states
        assert (True, True) in states, "the way has more turns than were tried"


@virtually
async def test_closing_ends_what_moves() -> None:
    async with world() as w:
        scene = await Scene.make(w, 5)
        await scene.ask("drain")
        await scene.warmed()
        w.backend.close(Draining("shutting down"))
        assert [type(error) for error in scene.sink.errors] == [Draining]
        await asyncio.sleep(0.1)
        assert scene.second.running == scene.first.running == {}
        assert not w.backend._searching


@pytest.mark.parametrize("reason", ["kv", "itl", "queue", "drain"])
def test_a_router_that_fails_inside_ends_no_stream(reason) -> None:
    """Another worker is looked for while the stream goes on where it is."""
    virtual_time.run(move_with_a_failing_router(reason))


async def move_with_a_failing_router(reason: MigrationHintReason) -> None:
    async with world() as w:
        scene = await Scene.make(w, *(() if reason == "queue" else (5,)))
        scene.router.refusal = KeyError("w9")
        await scene.ask(reason)
        await w.nodes.until(lambda: len(scene.router.questions) == 2)
        await asyncio.sleep(0.1)
        assert (scene.sink.errors, scene.first.aborted) == ([], [])
        await scene.finish(scene.first, 6)


@pytest.mark.parametrize("error", [KeyError("w9"), InvalidRequest("too long for me")])
def test_a_worker_that_refuses_what_moves_ends_no_stream(error) -> None:
    virtual_time.run(move_to_a_worker_that_refuses(error))


async def move_to_a_worker_that_refuses(error: Exception) -> None:
    async with world() as w:
        scene = await Scene.make(w, 5, prompt=[7] * 8)
        scene.second.refusal = error
        await scene.ask("kv")
        await w.nodes.until(lambda: len(scene.first.requests) == 2)  # it has come back
        await scene.finish(scene.first, 6)
        assert (scene.sink.tokens, scene.sink.errors) == ([5, 6], [])


def test_a_bug_in_a_move_ends_no_stream(monkeypatch) -> None:
    async def fails(*args: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("pdserve.frontend.dispatch.dispatched_request.migrate_live", fails)
    virtual_time.run(move_by_a_bug())


async def move_by_a_bug() -> None:
    async with world() as w:
        scene = await Scene.make(w, 5)
        await scene.ask("kv")
        assert (scene.sink.errors, scene.first.aborted) == ([], [])
        assert outcomes(w) == {("kv", "stayed"): 1}
        await scene.finish(scene.first, 6)

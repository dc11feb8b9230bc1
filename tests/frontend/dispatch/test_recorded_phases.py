"""What is recorded of requests on their way through the cluster."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

import pytest

from pdserve.errors import Draining, InvalidRequest, NoWorker, Overloaded
from pdserve.messages.request import Finish, FirstTokenStats, TokenDelta
from pdserve.tracing.phases import RequestPhases
from pdserve.tracing.tree import TraceRoot, build_trace
from tests.frontend.dispatch.test_dispatched_request import begun, ended
from tests.frontend.fake_cluster import Sink, request, world
from tests.net.world import virtually
from tests.support.trace_checks import defects

if TYPE_CHECKING:
    from pdserve.tracing.phases import PromptPhases
    from tests.frontend.fake_cluster import World


def record(w: World) -> tuple[RequestPhases, PromptPhases]:
    """The record of a request that arrives now."""
    now = w.nodes.loop.time
    phases = RequestPhases(now(), now)
    prompt = phases.add_prompt()
    assert prompt is not None
    return phases, prompt


def sound(w: World, phases: RequestPhases) -> None:
    """A trace can be made of it, and keeps the rules."""
    root = TraceRoot(
        trace_id=b"t" * 16, root_id=1, end=w.nodes.loop.time(), request_id="r", name="n"
    )
    assert list(defects(build_trace(phases, root, ()))) == []


def attempts(prompt: PromptPhases) -> list[tuple[int, str, str, str]]:
    return [(a.number, a.worker, a.why, a.how) for a in prompt.attempts]


@virtually
async def test_a_usual_request() -> None:
    async with world() as w:
        router, first = await w.router("r"), await w.worker("a")
        router.policy = {"policy": "p", "held": 0.5}
        await w.ready()
        sink = Sink()
        phases, prompt = record(w)
        await w.backend.open(request(), sink, phases=prompt)
        await asyncio.sleep(1.0)
        first.say(5, started=FirstTokenStats(0, 0.25, 0.5, 0.5))
        first.say(6, end=True)
        await w.nodes.until(partial(ended, sink))
        (route,), (attempt,) = prompt.routes, prompt.attempts
        assert (route.router, route.why, route.error) == ("r", "first", "")
        assert route.decision is not None
        assert (route.decision.policy, route.decision.held) == ("p", 0.5)
        assert attempts(prompt) == [(1, "a", "first", "finished")]
        assert route.end <= attempt.start <= attempt.sent <= attempt.accepted < attempt.first
        assert attempt.first <= attempt.end
        assert attempt.started == FirstTokenStats(0, 0.25, 0.5, 0.5)
        assert attempt.finish is not None
        assert prompt.over
        sound(w, phases)


@virtually
async def test_a_lost_worker_closes_its_attempt_and_the_next_one_says_why() -> None:
    async with world() as w:
        await w.router("r")
        first, second = await w.worker("a"), await w.worker("b")
        await w.ready()
        sink = Sink()
        phases, prompt = record(w)
        await w.backend.open(request(), sink, phases=prompt)
        first.say(5)
        await w.nodes.until(lambda: sink.tokens == [5])
        await w.nodes.crash("a")
        await begun(w, second)
        lost = prompt.attempts[0]
        assert (lost.how, lost.error[:11]) == ("worker_lost", "WorkerLost:")
        await asyncio.sleep(1.0)
        second.say(6, end=True)
        await w.nodes.until(partial(ended, sink))
        assert attempts(prompt) == [
            (1, "a", "first", "worker_lost"),
            (2, "b", "worker_lost", "finished"),
        ]
        (move,) = prompt.moves
        assert (move.source, move.target, move.reason) == ("a", "b", "worker_lost")
        assert move.outcome == "completed"
        assert move.end - move.start >= 1.0
        assert [route.why for route in prompt.routes] == ["first", "worker_lost"]
        assert prompt.attempts[1].tokens_before == 1
        sound(w, phases)


@virtually
async def test_a_live_move_ends_one_attempt_as_the_next_begins() -> None:
    async with world() as w:
        await w.router("r")
        first, second = await w.worker("a"), await w.worker("b")
        await w.ready()
        sink = Sink()
        phases, prompt = record(w)
        await w.backend.open(request(), sink, phases=prompt)
        first.say(5)
        await w.nodes.until(lambda: sink.tokens == [5])
        first.channels.ask_to_move(None, "kv")
        await begun(w, second)
        second.say(6, end=True)
        await w.nodes.until(partial(ended, sink))
        assert attempts(prompt) == [(1, "a", "first", "moved"), (2, "b", "kv", "finished")]
        (move,) = prompt.moves
        assert (move.reason, move.source, move.target) == ("kv", "a", "b")
        sound(w, phases)


@virtually
async def test_a_worker_that_refuses_has_had_an_attempt() -> None:
    async with world() as w:
        await w.router("r")
        first, second = await w.worker("a"), await w.worker("b")
        first.refusal = Overloaded("full")
        await w.ready()
        sink = Sink()
        phases, prompt = record(w)
        await w.backend.open(request(), sink, phases=prompt)
        second.say(5, end=True)
        await w.nodes.until(partial(ended, sink))
        assert attempts(prompt) == [(1, "a", "first", "refused"), (2, "b", "refused", "finished")]
        assert prompt.attempts[0].error == "Overloaded: full"
        assert prompt.moves == []
        sound(w, phases)


@virtually
async def test_a_client_that_leaves_ends_its_attempt() -> None:
    async with world() as w:
        await w.router("r")
        first = await w.worker("a")
        await w.ready()
        phases, prompt = record(w)
        stream = await w.backend.open(request(), Sink(), phases=prompt)
        first.say(5)
        await asyncio.sleep(1.0)
        stream.cancel()
        assert attempts(prompt) == [(1, "a", "first", "cancelled")]
        assert prompt.attempts[0].first
        sound(w, phases)


@virtually
async def test_routers_that_find_nobody_are_recorded() -> None:
    async with world() as w:
        router = await w.router("r")
        await w.worker("a")
        await w.ready()
        router.refusal = InvalidRequest("no")
        phases, prompt = record(w)
        with pytest.raises(InvalidRequest):
            await w.backend.open(request(), Sink(), phases=prompt)
        (route,) = prompt.routes
        assert (route.error, route.decision) == ("InvalidRequest: no", None)
        assert prompt.attempts == []
        sound(w, phases)


@virtually
async def test_a_request_that_ends_between_two_workers_has_no_open_attempt() -> None:
    async with world(worker_wait=2.0) as w:
        await w.router("r")
        first = await w.worker("a")
        await w.ready()
        sink = Sink()
        phases, prompt = record(w)
        await w.backend.open(request(), sink, phases=prompt)
        first.say(5)
        await w.nodes.until(lambda: sink.tokens == [5])
        await w.nodes.crash("a")
        await w.nodes.until(partial(ended, sink), 60.0)
        assert isinstance(sink.errors[0], NoWorker)
        # This router does not notice that the worker is gone, and names it once more.
        assert attempts(prompt) == [
            (1, "a", "first", "worker_lost"),
            (2, "a", "worker_lost", "unreachable"),
        ]
        (move,) = prompt.moves
        assert (move.outcome, move.target) == ("no_worker", "")
        assert prompt.routes_left_out + len(prompt.routes) > 1
        sound(w, phases)


@virtually
async def test_without_migration_the_end_is_known_all_the_same() -> None:
    async with world(migration=False) as w:
        await w.router("r")
        first = await w.worker("a")
        await w.ready()
        sink = Sink()
        phases, prompt = record(w)
        stream = await w.backend.open(request(), sink, phases=prompt)
        first.say(5)
        first.say(6, end=True)
        await w.nodes.until(partial(ended, sink))
        stream.cancel()
        assert attempts(prompt) == [(1, "a", "first", "finished")]
        sound(w, phases)


@virtually
async def test_the_end_of_the_process_closes_all() -> None:
    async with world() as w:
        await w.router("r")
        first = await w.worker("a")
        await w.ready()
        sink = Sink()
        phases, prompt = record(w)
        await w.backend.open(request(), sink, phases=prompt)
        first.say(5)
        await w.nodes.until(lambda: sink.tokens == [5])
        w.backend.close(Draining("over"))
        assert attempts(prompt) == [(1, "a", "first", "failed")]
        assert prompt.attempts[0].error == "Draining: over"
        sound(w, phases)


def test_a_delta_after_the_end_is_not_recorded() -> None:
    """The sink may still get one in the turn in which a request was cancelled."""
    phases = RequestPhases(0.0, lambda: 1.0)
    prompt = phases.add_prompt()
    assert prompt is not None
    prompt.close(None, "cancelled")
    delta = TokenDelta(1, 0, [1], Finish(reason="stop"))
    assert delta.finish is not None
    prompt.finished(delta.finish)
    assert prompt.attempts == []

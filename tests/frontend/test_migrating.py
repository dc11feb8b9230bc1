"""Requests whose worker is lost go on at another one: a frontend's backend among played nodes."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

from pdserve.errors import (
    Draining,
    EngineDied,
    EngineError,
    EngineStalled,
    InvalidRequest,
    NotReady,
    Overloaded,
    StepFailed,
)
from tests.frontend.clusters import Sink, request, world
from tests.net.world import virtually

if TYPE_CHECKING:
    from pdserve.frontend.placement import Placement
    from tests.frontend.clusters import Worker, World


def outcomes(w: World) -> dict[tuple[str, ...], float]:
    """Migrations by reason and outcome."""
    return {labels: counter.value for labels, counter in w.backend.metrics.migrations}


async def begun(w: World, worker: Worker) -> None:
    await w.nodes.until(lambda: bool(worker.running), 60.0)


def ended(sink: Sink) -> bool:
    return bool(sink.ends or sink.errors)


# ---------------------------------------------------------------------- lost and found


@virtually
async def test_a_stream_goes_on_at_another_worker_when_its_own_dies() -> None:
    async with world() as w:
        router, first, second = await w.router("r"), await w.worker("a"), await w.worker("b")
        await w.ready()
        sink = Sink()
        placed: list[Placement] = []
        await w.backend.open(request(deadline=60.0), sink, on_placed=placed.append)
        first.say(5)
        first.say(6, 7)
        await w.nodes.until(lambda: sink.tokens == [5, 6, 7])
        await asyncio.sleep(2.0)
        before = w.nodes.loop.time()
        await w.nodes.crash("a")
        await begun(w, second)
        assert w.nodes.loop.time() - before < 0.2
        (wanted,) = second.requests
        assert (wanted.prompt, wanted.output, wanted.ended) == ([7, 8, 9], [[5, 6, 7]], ())
        assert wanted.sampling == request().sampling
        assert wanted.deadline is not None
        assert wanted.deadline < 58.5
        question = router.questions[-1]
        assert (question.attempt, question.excluded) == (1, ("a",))
        assert (question.prompt_tokens, question.max_tokens) == (6, 5)
        second.say(8, end=True)
        await w.nodes.until(partial(ended, sink))
        assert (sink.tokens, sink.errors) == ([5, 6, 7, 8], [])
        assert [p.migrations for p in placed] == [0, 1]
        assert outcomes(w) == {("worker_lost", "completed"): 1}
        await w.nodes.until(lambda: router.releases == ["failed", "finished"])


@virtually
async def test_what_an_engine_fails_at_is_tried_elsewhere() -> None:
    for error, reason in (
        (EngineDied("it died"), "engine_died"),
        (EngineStalled("it stood still"), "engine_stalled"),
        (StepFailed("a step failed"), "step_failed"),
        (Draining("going away"), "drain"),
        (NotReady("restarting"), "not_ready"),
    ):
        async with world() as w:
            await w.router("r")
            first, second = await w.worker("a"), await w.worker("b")
            await w.ready()
            sink = Sink()
            await w.backend.open(request(), sink)
            first.say(5)
            first.refuse(error)
            await begun(w, second)
            second.say(6, end=True)
            await w.nodes.until(partial(ended, sink))
            assert (sink.tokens, sink.errors) == ([5, 6], [])
            assert outcomes(w) == {(reason, "completed"): 1}


@virtually
async def test_what_is_the_requests_own_fault_is_not_tried_elsewhere() -> None:
    for error in (EngineError("no"), InvalidRequest("no"), Overloaded("after a token")):
        async with world() as w:
            await w.router("r")
            first, second = await w.worker("a"), await w.worker("b")
            await w.ready()
            sink = Sink()
            await w.backend.open(request(), sink)
            first.say(5)
            first.refuse(error)
            await w.nodes.until(partial(ended, sink))
            assert type(sink.errors[0]) is type(error)
            assert (second.requests, outcomes(w)) == ([], {})

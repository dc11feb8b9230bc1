"""Requests whose worker is lost go on at another one: a frontend's backend among played nodes."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

import pytest

from pdserve.errors import (
    DeadlineExceeded,
    Draining,
    EngineDied,
    EngineError,
    EngineStalled,
    InvalidRequest,
    NotReady,
    NoWorker,
    Overloaded,
    Poisoned,
    StepFailed,
)
from pdserve.messages.request import (
    Finish,
    FirstTokenStats,
    SamplingParams,
    TokenDelta,
    TokenLogprob,
)
from pdserve.messages.tiers import KvSource
from tests.frontend.fake_cluster import Sink, request, world
from tests.net.world import virtually
from tests.support.garbage import uncollected

if TYPE_CHECKING:
    from pdserve.engine.port import TokenSink
    from pdserve.frontend.placement import Placement
    from pdserve.messages.request import GenerateRequest
    from tests.frontend.fake_cluster import Worker, World


def outcomes(w: World) -> dict[tuple[str, ...], float]:
    """Migrations by reason and outcome."""
    return {labels[1:]: counter.value for labels, counter in w.backend.metrics.migrations}


def gaps(w: World) -> int:
    """Streams that were interrupted."""
    return sum(histogram.count for _, histogram in w.backend.metrics.migration_gap)


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
        stream = await w.backend.open(request(deadline=60.0), sink, on_placed=placed.append)
        first.say(5)
        first.say(6, 7)
        await w.nodes.until(lambda: sink.tokens == [5, 6, 7])
        await asyncio.sleep(2.0)
        before = w.nodes.loop.time()
        await w.nodes.crash("a")
        await begun(w, second)
        assert w.nodes.loop.time() - before < 0.2
        (wanted,) = second.requests
        assert (wanted.prompt.tolist(), wanted.output, wanted.ended) == ([7, 8, 9], [[5, 6, 7]], ())
        assert wanted.sampling == request().sampling
        assert wanted.deadline is not None
        assert wanted.deadline < 58.5
        question = router.questions[-1]
        assert (question.attempt, question.excluded) == (1, ("a",))
        assert (question.prompt_tokens, question.max_tokens) == (6, 5)
        second.say(8, end=True)
        assert stream.moved == 0.0
        await w.nodes.until(partial(ended, sink))
        assert 0.0 < stream.moved < 0.3
        assert (sink.tokens, sink.errors) == ([5, 6, 7, 8], [])
        assert [p.migrations for p in placed] == [0, 1]
        assert outcomes(w) == {("worker_lost", "completed"): 1}
        await w.nodes.until(lambda: router.releases == ["failed", "finished"])


@virtually
async def test_each_worker_is_told_the_sources_of_its_own_decision() -> None:
    async with world() as w:
        router, first, second = await w.router("r"), await w.worker("a"), await w.worker("b")
        await w.ready()
        before, after = KvSource("x", 1, 9, 4), KvSource("y", 3, 5)
        router.policy = {"kv_sources": (before,)}
        sink = Sink()
        await w.backend.open(request(), sink)
        assert first.requests[0].kv_sources == (before,)
        first.say(5)
        router.policy = {"kv_sources": (after,)}
        first.refuse(EngineDied("it died"))
        await begun(w, second)
        assert second.requests[0].kv_sources == (after,)
        router.policy = {}
        second.refuse(EngineDied("it died, too"))
        await w.nodes.until(lambda: len(first.requests) == 2)
        assert first.requests[1].kv_sources == ()


@virtually
async def test_what_an_older_worker_would_ignore_never_goes_there() -> None:
    """It has come after the request was planned, when everybody could do what it asks for."""
    async with world() as w:
        await w.router("r")
        first = await w.worker("a", features=("grammar", "bans"))
        await w.ready()
        sampling = SamplingParams(max_tokens=8, grammar='start: "a"')
        sink, free = Sink(), Sink()
        await w.backend.open(request(sampling=sampling, deadline=60.0), sink)
        await w.backend.open(request("free", deadline=60.0), free)
        first.say(5)
        await w.nodes.until(lambda: sink.tokens == [5])
        older = await w.worker("b", features=("bans",))
        await asyncio.sleep(2.0)
        await w.nodes.crash("a")
        await begun(w, older)
        await asyncio.sleep(5.0)
        assert [r.request_id for r in older.requests] == ["free"]
        assert sink.errors == []
        able = await w.worker("c", features=("grammar", "bans"))
        await begun(w, able)
        assert [r.request_id for r in able.requests] == ["r"]


@virtually
async def test_a_vector_begins_anew_at_another_worker() -> None:
    async with world() as w:
        await w.router("r")
        first, second = await w.worker("a"), await w.worker("b")
        await w.ready()
        sink = Sink()
        asked = request(pooling="mean", sampling=SamplingParams(max_tokens=1))
        await w.backend.open(asked, sink)
        await begun(w, first)
        await w.nodes.crash("a")
        await begun(w, second)
        assert second.requests == [asked]
        (engine,) = second.running.values()
        finish = Finish(reason="stop", embedding=b"1234")
        engine.on_delta(TokenDelta(1, 0, [], finish, started=FirstTokenStats(0, 0.0, 0.1, 0.1)))
        await w.nodes.until(partial(ended, sink))
        assert (sink.tokens, sink.errors) == ([], [])
        assert [delta.finish for delta in sink.deltas] == [finish]
        assert outcomes(w) == {("worker_lost", "completed"): 1}


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


@virtually
async def test_before_its_first_token_a_request_is_simply_placed_again() -> None:
    async with world() as w:
        router, first, second = await w.router("r"), await w.worker("a"), await w.worker("b")
        await w.ready()
        sink = Sink()
        wanted = request(n=2, sampling=SamplingParams(max_tokens=8, prompt_logprobs=1))
        await w.backend.open(wanted, sink)
        await w.nodes.crash("a")
        await begun(w, second)
        assert second.requests == first.requests == [wanted]
        assert router.questions[-1].n == 2
        for choice in (0, 1):
            second.say(5, choice=choice, end=True)
        await w.nodes.until(lambda: sink.ends == 2)
        assert gaps(w) == 0, "no stream was interrupted"


@virtually
async def test_choices_that_have_ended_are_not_asked_for_again() -> None:
    async with world() as w:
        router, first, second = await w.router("r"), await w.worker("a"), await w.worker("b")
        await w.ready()
        sink = Sink()
        stream = await w.backend.open(request(n=4), sink)
        first.say(5, choice=0)
        first.say(6, 7, choice=1, end=True)
        first.say(8, 9, choice=2)
        await w.nodes.until(lambda: len(sink.tokens) == 5)
        stream.end_choice(2)  # by a stop string, say
        await w.nodes.crash("a")
        await begun(w, second)
        (wanted,) = second.requests
        assert wanted.output == [[5], [6, 7], [8, 9], []]
        assert wanted.ended == (1, 2)
        question = router.questions[-1]
        assert (question.n, question.prompt_tokens, question.max_tokens) == (2, 4, 8)
        second.say(5, choice=0, end=True)
        second.say(5, choice=3, end=True)
        await w.nodes.until(lambda: sink.ends == 3)
        assert w.backend.requests == 0
        assert second.channels.requests == 0
        assert sink.by_choice == {0: [5, 5], 1: [6, 7], 2: [8, 9], 3: [5]}


@virtually
async def test_logprobs_of_the_prompt_are_told_once() -> None:
    told = [TokenLogprob(8, -1.0, 1, [])]
    async with world() as w:
        await w.router("r")
        first, second, third = [await w.worker(name) for name in "abc"]
        await w.ready()
        sink = Sink()
        sampling = SamplingParams(max_tokens=8, prompt_logprobs=0)
        await w.backend.open(request(n=2, sampling=sampling), sink)
        first.say(5, choice=0, prompt_logprobs=told)
        await w.nodes.until(lambda: sink.tokens == [5])
        await w.nodes.crash("a")
        await begun(w, second)
        assert second.requests[0].sampling.prompt_logprobs == 0, "one choice lacks them"
        second.say(6, choice=0, prompt_logprobs=told)
        second.say(7, choice=1, prompt_logprobs=told)
        await w.nodes.until(lambda: len(sink.tokens) == 3)
        await w.nodes.crash("b")
        await begun(w, third)
        assert third.requests[0].sampling.prompt_logprobs is None
        assert [delta.prompt_logprobs for delta in sink.deltas] == [told, None, told]
        for choice in (0, 1):
            third.say(5, choice=choice, end=True)
        await w.nodes.until(lambda: sink.ends == 2)


# ---------------------------------------------------------------------- nobody there


@virtually
async def test_a_request_waits_for_a_worker_to_come() -> None:
    async with world(worker_wait=30.0) as w:
        router = await w.router("r")
        first = await w.worker("a")
        await w.ready()
        sink = Sink()
        await w.backend.open(request(), sink)
        first.say(5)
        await w.nodes.until(lambda: sink.tokens == [5])
        await w.nodes.crash("a")
        await asyncio.sleep(20.0)
        assert sink.errors == []
        assert len(router.questions) < 50
        second = await w.worker("b")
        await begun(w, second)
        second.say(6, end=True)
        await w.nodes.until(partial(ended, sink))
        assert sink.tokens == [5, 6]


@virtually
async def test_a_worker_that_begins_another_life_is_another_worker() -> None:
    async with world() as w:
        router, first = await w.router("r"), await w.worker("a")
        await w.ready()
        sink = Sink()
        await w.backend.open(request(), sink)
        first.say(5)
        await w.nodes.until(lambda: sink.tokens == [5])
        await w.nodes.crash("a")
        w.workers.clear()
        router.workers.clear()
        second = await w.worker("a")
        assert second.node.epoch > first.node.epoch
        await begun(w, second)
        second.say(6, end=True)
        await w.nodes.until(partial(ended, sink))
        assert sink.tokens == [5, 6]


@virtually
async def test_an_engine_that_restarts_goes_on_itself_if_it_is_the_only_one() -> None:
    async with world() as w:
        router, worker = await w.router("r"), await w.worker("a")
        await w.ready()
        sink = Sink()
        await w.backend.open(request(), sink)
        worker.say(5)
        await w.nodes.until(lambda: sink.tokens == [5])
        worker.refusal = NotReady("the engine restarts")
        worker.refuse(EngineDied("it died"))
        await asyncio.sleep(5.0)
        assert not ended(sink)
        assert len(router.questions) < 20
        worker.refusal = None
        await begun(w, worker)
        worker.say(6, end=True)
        await w.nodes.until(partial(ended, sink))
        assert sink.tokens == [5, 6]


@virtually
async def test_a_link_that_breaks_is_no_end_of_a_stream_on_the_only_worker() -> None:
    async with world() as w:
        await w.router("r")
        worker = await w.worker("a")
        await w.ready()
        sink = Sink()
        await w.backend.open(request(), sink)
        worker.say(5)
        await w.nodes.until(lambda: sink.tokens == [5])
        link = w.node.link_nowait(worker.node.id)
        assert link is not None
        link.abort("pulled")
        await w.nodes.until(lambda: len(worker.requests) == 2)
        assert worker.aborted == [1]
        worker.say(6, end=True)
        await w.nodes.until(partial(ended, sink))
        assert sink.tokens == [5, 6]


@virtually
async def test_the_wait_for_a_worker_ends_with_a_reason() -> None:
    for limit, deadline, kind in ((5.0, 60.0, NoWorker), (60.0, 5.0, DeadlineExceeded)):
        async with world(worker_wait=limit) as w:
            await w.router("r")
            first = await w.worker("a")
            await w.ready()
            sink = Sink()
            await w.backend.open(request(deadline=deadline), sink)
            first.say(5)
            await w.nodes.until(partial(bool, sink.deltas))
            await w.nodes.crash("a")
            before = w.nodes.loop.time()
            await w.nodes.until(partial(ended, sink))
            assert w.nodes.loop.time() - before < 5.5
            (error,) = sink.errors
            assert type(error) is kind
            if kind is NoWorker:
                assert "worker a is lost" in error.message
                assert "'tiny' within 5 s" in error.message
            outcome = "no_worker" if kind is NoWorker else "failed"
            assert outcomes(w) == {("worker_lost", outcome): 1}


@virtually
async def test_who_found_no_room_is_told_so_although_the_full_worker_is_left_out() -> None:
    async with world(worker_wait=5.0) as w:
        await w.router("r")
        worker = await w.worker("a")
        await w.ready()
        sink = Sink()
        await w.backend.open(request(), sink)
        worker.say(5)
        await w.nodes.until(lambda: sink.tokens == [5])
        worker.refusal = Overloaded("40 requests are in flight")
        worker.refuse(EngineDied("it died"))
        await w.nodes.until(partial(ended, sink))
        (error,) = sink.errors
        assert type(error) is NoWorker
        assert "40 requests are in flight" in error.message


@virtually
async def test_a_full_cluster_is_asked_again_for_what_it_has_had() -> None:
    async with world() as w:
        router = await w.router("r")
        first, second = await w.worker("a"), await w.worker("b")
        await w.ready()
        sink = Sink()
        await w.backend.open(request(), sink)
        first.say(5)
        await w.nodes.until(lambda: sink.tokens == [5])
        router.refusal = Overloaded("the queue is full", retry_after=9.0)
        await w.nodes.crash("a")
        await asyncio.sleep(5.0)
        assert not ended(sink)
        router.refusal = None
        second.refusal = Overloaded("mine, too", retry_after=9.0)
        await asyncio.sleep(5.0)
        assert not ended(sink)
        assert len(router.questions) < 30
        second.refusal = None
        await begun(w, second)
        second.refuse(Overloaded("after all"))
        await begun(w, second)
        second.say(6, end=True)
        await w.nodes.until(partial(ended, sink))
        assert sink.tokens == [5, 6]


@virtually
async def test_what_a_worker_says_of_choices_that_do_not_exist_ends_the_request() -> None:
    """Which would hang till its deadline otherwise."""
    async with world() as w:
        await w.router("r")
        worker = await w.worker("a")
        await w.ready()
        sink = Sink()
        await w.backend.open(request(), sink)
        worker.say(5, choice=7)
        await w.nodes.until(partial(ended, sink))
        assert type(sink.errors[0]) is EngineError
        await w.nodes.until(lambda: not worker.running)


# ---------------------------------------------------------------------- poison


@virtually
async def test_what_kills_workers_is_given_to_no_other() -> None:
    async with world() as w:
        router = await w.router("r")
        workers = [await w.worker(name) for name in "abcd"]
        await w.ready()
        sink = Sink()
        await w.backend.open(request(), sink)
        for worker, error in zip(
            workers, (EngineDied("1"), StepFailed("2"), EngineStalled("3")), strict=False
        ):
            await begun(w, worker)
            worker.refuse(error)
        await w.nodes.until(partial(ended, sink))
        (end,) = sink.errors
        assert type(end) is Poisoned
        assert "3 workers" in end.message
        assert "a, b, c" in end.message
        assert not end.retryable
        assert workers[3].requests == []
        assert sum(count.value for _, count in w.backend.metrics.poisoned_requests) == 1
        assert outcomes(w) == {("engine_stalled", "poison"): 1}
        await w.nodes.until(lambda: router.releases == ["failed"] * 3)


@virtually
async def test_a_token_shows_that_it_is_not_the_request() -> None:
    async with world() as w:
        await w.router("r")
        workers = [await w.worker(name) for name in "abcde"]
        await w.ready()
        sink = Sink()
        await w.backend.open(request(), sink)
        for number, worker in enumerate(workers[:-1]):
            await begun(w, worker)
            if number == 1:
                worker.say(5)
            worker.refuse(EngineDied("it died"))
        await begun(w, workers[-1])
        workers[-1].say(6, end=True)
        await w.nodes.until(partial(ended, sink))
        assert sink.tokens == [5, 6]


@virtually
async def test_nodes_that_die_count_and_those_that_leave_or_refuse_do_not() -> None:
    async with world(poison_after=2) as w:
        await w.router("r")
        a, b, c, d, e, _ = [await w.worker(name) for name in "abcdeg"]
        await w.ready()
        sink = Sink()
        await w.backend.open(request(), sink)
        a.refuse(Draining("going"))
        await begun(w, b)
        b.refuse(Overloaded("full"))
        await begun(w, c)
        link = w.node.link_nowait(c.node.id)
        assert link is not None
        link.abort("pulled")
        await begun(w, d)
        await w.nodes.crash("d")
        await begun(w, e)
        before = w.nodes.loop.time()
        await w.nodes.crash("e")
        await w.nodes.until(partial(ended, sink))
        (error,) = sink.errors
        assert type(error) is Poisoned
        assert "2 workers" in error.message
        assert "d, e" in error.message
        assert w.nodes.loop.time() - before < 6.0
        assert w.workers["g"].requests == [], "it waited until it was known"


@virtually
async def test_with_no_limit_it_is_always_given_to_another() -> None:
    async with world(poison_after=0) as w:
        await w.router("r")
        workers = [await w.worker(name) for name in "abcdeg"]
        await w.ready()
        sink = Sink()
        await w.backend.open(request(), sink)
        for worker in workers[:-1]:
            await begun(w, worker)
            worker.refuse(EngineDied("it died"))
        await begun(w, workers[-1])
        workers[-1].say(6, end=True)
        await w.nodes.until(partial(ended, sink))
        assert sink.tokens == [6]


@virtually
async def test_innocents_do_not_end_with_what_kills_their_workers() -> None:
    """One worker whose engine dies of `p` and comes back; six others are always there with it."""
    async with world() as w:
        await w.router("r")
        worker = await w.worker("a")
        await w.ready()
        loop = w.nodes.loop
        submit = worker.submit

        def die() -> None:
            if any(worker.names[handle - 1] == "p" for handle in worker.running):
                worker.refuse(EngineDied("it died"))

        def finish(handle: int) -> None:
            sink = worker.running.pop(handle, None)
            if sink is not None:
                sink.on_delta(TokenDelta(handle, 0, [5], Finish(reason="stop")))

        def play(wanted: GenerateRequest, sink: TokenSink) -> int:
            handle = submit(wanted, sink)
            if wanted.request_id == "p":
                loop.call_later(0.1, die)
            else:
                loop.call_later(0.3, finish, handle)
            return handle

        worker.submit = play  # type: ignore[assignment, method-assign]
        sinks = {name: Sink() for name in ("p", *"abcdef")}
        for name, sink in sinks.items():
            await w.backend.open(request(name), sink)
        await w.nodes.until(lambda: all(map(ended, sinks.values())), 120.0)
        (error,) = sinks.pop("p").errors
        assert type(error) is Poisoned
        assert [sink.tokens for sink in sinks.values()] == [[5]] * 6
        assert worker.names.count("p") == 3, "that it was not alone at first is no excuse"
        assert not w.backend.trials


@virtually
async def test_who_is_tried_alone_stays_there_unless_its_worker_goes() -> None:
    async with world(poison_after=2) as w:
        await w.router("r")
        first, second = await w.worker("a"), await w.worker("b")
        await w.ready()
        sink = Sink()
        await w.backend.open(request(), sink)
        first.refuse(EngineDied("it died"))
        await begun(w, second)
        second.channels.ask_to_move(None, "queue")
        await asyncio.sleep(4.0)
        assert second.running
        second.channels.ask_to_move(None, "drain")
        await begun(w, first)
        assert first.requests[-1].suspect
        assert not w.backend.trials
        first.refuse(EngineDied("it died"))
        await asyncio.sleep(4.0)
        assert not ended(sink), "nobody knows who else was there"
        for worker in (first, second):
            worker.refuse(EngineDied("it died"))
        await w.nodes.until(partial(ended, sink))
        assert type(sink.errors[0]) is Poisoned


@virtually
async def test_who_waits_to_be_tried_alone_can_turn_away() -> None:
    async with world(poison_after=2) as w:
        router, worker = await w.router("r"), await w.worker("a")
        await w.ready()
        sinks = [Sink() for _ in range(4)]
        streams = [await w.backend.open(request(str(n)), sink) for n, sink in enumerate(sinks)]
        worker.refuse(EngineDied("it died"))
        await w.nodes.until(lambda: len(worker.running) == 1)
        await asyncio.sleep(1.0)
        assert len(worker.running) == 1
        assert worker.requests[-1].suspect
        first, second, *_ = streams
        second.cancel()  # in its turn or not
        first.cancel()
        await w.nodes.until(lambda: len(worker.running) == 1 and worker.names[-1] in "23")
        worker.refuse(Draining("going away"))
        await w.nodes.until(lambda: len(worker.running) == 1)
        worker.say(5, started=FirstTokenStats(0, 0.0, 0.0, 0.0))
        await w.nodes.until(lambda: len(worker.running) == 2)
        worker.say(6, end=True)
        await w.nodes.until(lambda: all(map(ended, sinks[2:])))
        assert [len(sink.errors) for sink in sinks] == [0] * 4
        assert not w.backend.trials
        await w.nodes.until(lambda: not router.open)


# ---------------------------------------------------------------------- memory


def begun_to_answer(sink: Sink) -> bool:
    return bool(sink.tokens)


OF_A_REQUEST = {"DispatchedRequest", "Assignment", "RemoteSequence", "ReceivedTokens"}


@pytest.mark.parametrize("end", ["finished", "cancelled", "failed", "moved"])
@virtually
async def test_a_request_that_is_over_leaves_no_cycle(end: str) -> None:
    async with world() as w:
        await w.router("r")
        first = await w.worker("a")
        second = await w.worker("b") if end == "moved" else first
        await w.ready()
        with uncollected() as found:
            sink = Sink()
            stream = await w.backend.open(request(), sink)
            first.say(5)
            await w.nodes.until(partial(begun_to_answer, sink))
            if end == "moved":
                first.refuse(EngineDied("it died"))
                await begun(w, second)
            if end == "failed":
                first.refuse(EngineError("a defect"))
            elif end != "cancelled":
                second.say(6, end=True)
            if end != "cancelled":
                await w.nodes.until(partial(ended, sink))
            # The frontend cancels every request at its end.
            stream.cancel()
            await asyncio.sleep(1.0)
            del stream, sink
        assert not OF_A_REQUEST & found.keys(), found

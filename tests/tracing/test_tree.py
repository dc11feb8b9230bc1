"""Phases become spans: placed, nested and bounded."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest

from pdserve.ids import NodeId
from pdserve.messages.request import MAX_WORKER_PHASES, Finish, FirstTokenStats, WorkerPhase
from pdserve.messages.routing import RouteDecision
from pdserve.messages.tiers import CachedSource, KvSource
from pdserve.tracing.context import TraceContext
from pdserve.tracing.export.delivery import QUEUE_SPANS
from pdserve.tracing.phases import (
    MOST,
    AttemptPhase,
    MovePhase,
    PromptPhases,
    RequestPhases,
    RoutePhase,
)
from pdserve.tracing.tree import MAX_ATTRIBUTE, MOST_SPANS, TraceRoot, build_trace
from tests.support.trace_checks import children, defects, named

if TYPE_CHECKING:
    from pdserve.messages.trace import Trace

ROOT = TraceRoot(
    trace_id=b"t" * 16,
    root_id=41,
    began=1_700_000_000_000_000_000,
    end=110.0,
    request_id="r",
    model="m",
    name="POST /v1/chat/completions",
    attributes={"http.route": "/v1/chat/completions"},
)


def never() -> float:
    raise AssertionError("the tree is made without a clock")


def request() -> RequestPhases:
    phases = RequestPhases(100.0, never)
    phases.body_read, phases.planning, phases.planned = 100.5, 100.5, 101.0
    phases.first_token, phases.prompt_tokens = 105.0, 12
    return phases


def prompt(phases: RequestPhases) -> PromptPhases:
    made = phases.add_prompt()
    assert made is not None
    return made


def attempt(**changes: Any) -> AttemptPhase:
    fields: dict[str, Any] = {
        "number": 1,
        "worker": "w",
        "epoch": 7,
        "why": "first",
        "start": 102.0,
        "sent": 102.5,
        "accepted": 102.75,
        "first": 105.0,
        "end": 109.0,
        "how": "finished",
        "started": FirstTokenStats(4, 0.5, 1.0, 0.9),
        "finish": Finish(reason="stop", prompt_tokens=12, completion_tokens=5),
    }
    return AttemptPhase(**(fields | changes))


def build(phases: RequestPhases, root: TraceRoot = ROOT) -> Trace:
    trace = build_trace(phases, root, ("head",))
    assert list(defects(trace)) == []
    return trace


def test_a_usual_request() -> None:
    phases = request()
    made = prompt(phases)
    decision = RouteDecision(NodeId("w"), 7, 1, "ttft", 2, 0.25, 0.125)
    made.add_route(RoutePhase(101.0, 102.0, "first", "r1", decision, 16))
    made.add_attempt(attempt())
    trace = build(phases)
    assert [(s.name, s.start, s.end) for s in trace.spans] == [
        ("POST /v1/chat/completions", 0.0, 10.0),
        ("pdserve.tokenize", 0.5, 1.0),
        ("pdserve.route", 1.0, 2.0),
        ("pdserve.attempt", 2.0, 9.0),
        ("pdserve.queue", 3.0, 3.5),
        ("pdserve.prefill", 3.5, 4.5),
        ("pdserve.decode", 5.0, 9.0),
    ]
    root, _, route, work, _, prefill, decode = trace.spans
    assert [(event.name, event.at) for event in root.events] == [
        ("body_read", 0.5),
        ("first_token", 5.0),
    ]
    assert route.attributes == {
        "pdserve.router": "r1",
        "pdserve.reason": "first",
        "pdserve.policy": "ttft",
        "pdserve.overlap_tokens": 16,
        "pdserve.held": 0.125,
        "pdserve.predicted_ttft": 0.25,
    }
    assert work.attributes == {
        "pdserve.worker": "w",
        "pdserve.life": 7,
        "pdserve.number": 1,
        "pdserve.reason": "first",
        "pdserve.end": "finished",
        "pdserve.accepted_after": 0.25,
    }
    assert prefill.attributes == {"pdserve.cached_tokens": 4, "pdserve.computed_tokens": 8}
    assert decode.attributes == {
        "pdserve.tokens": 5,
        "pdserve.preemptions": 0,
        "pdserve.itl_mean": 1.0,
    }
    assert [span.parent_id for span in trace.spans[1:]] == [
        *[root.span_id] * 3,
        *[work.span_id] * 3,
    ]
    assert (trace.request_id, trace.model, trace.kept, trace.began) == (
        "r",
        "m",
        ("head",),
        ROOT.began,
    )


def test_a_router_that_was_asked_tells_what_its_decision_rests_on() -> None:
    phases = request()
    sources = (KvSource("a", 1, 9, 4), KvSource("b", 2, 5))
    decision = RouteDecision(
        NodeId("w"), 7, 1, candidates=4, waiting=2, sequences=3, kv_sources=sources
    )
    prompt(phases).add_route(RoutePhase(101.0, 102.0, "first", "r1", decision, 16))
    (route,) = named(build(phases), "pdserve.route")
    about = {
        "pdserve.candidates": 4,
        "pdserve.waiting": 2,
        "pdserve.sequences": 3,
        "pdserve.kv_sources": "a: 9, b: 5",
    }
    assert about.items() <= route.attributes.items()


def test_time_that_a_worker_does_not_account_for_was_spent_on_the_way() -> None:
    """Half of it on the way there."""
    phases = request()
    prompt(phases).add_attempt(attempt(started=FirstTokenStats(0, 0.25, 0.25, 0.2)))
    trace = build(phases)
    (queue,) = named(trace, "pdserve.queue")
    assert queue.start == 2.5 + (2.5 - 0.5) / 2


def test_a_worker_that_claims_more_time_than_there_was_stays_within_it() -> None:
    phases = request()
    prompt(phases).add_attempt(attempt(started=FirstTokenStats(0, 50.0, 70.0, 1.0)))
    trace = build(phases)
    (queue,), (prefill,) = named(trace, "pdserve.queue"), named(trace, "pdserve.prefill")
    assert (queue.start, queue.end, prefill.start, prefill.end) == (2.5, 5.0, 5.0, 5.0)


def test_a_lost_attempt_ends_with_the_loss_and_has_no_parts() -> None:
    phases = request()
    made = prompt(phases)
    lost = attempt(first=0.0, end=104.0, how="worker_lost", error="WorkerLost: gone", started=None)
    made.add_attempt(lost)
    made.add_move(MovePhase(104.0, 107.0, "worker_lost", "w", "x", "completed"))
    made.add_attempt(attempt(number=2, worker="x", why="worker_lost", start=104.5, sent=104.5))
    trace = build(phases)
    first, second = named(trace, "pdserve.attempt")
    assert (first.end, first.error, children(trace, first)) == (4.0, "WorkerLost: gone", [])
    assert second.attributes["pdserve.reason"] == "worker_lost"
    (move,) = named(trace, "pdserve.move")
    assert move.attributes["pdserve.gap"] == 3.0
    assert (move.attributes["pdserve.from"], move.attributes["pdserve.to"]) == ("w", "x")


def test_a_worker_that_tells_nothing_until_its_end() -> None:
    phases = request()
    finish = Finish(reason="stop", cached_tokens=3, queue_seconds=0.5, prefill_seconds=1.0)
    prompt(phases).add_attempt(attempt(started=None, finish=finish))
    trace = build(phases)
    (prefill,) = named(trace, "pdserve.prefill")
    assert prefill.attributes == {"pdserve.cached_tokens": 3}


def test_cached_tokens_are_told_by_where_they_were() -> None:
    phases = request()
    sources = (CachedSource("disk", 32), CachedSource("peer", 8, "w2"), CachedSource("disk", 4))
    started = FirstTokenStats(64, 0.25, 0.25, 0.2, sources=sources)
    prompt(phases).add_attempt(attempt(started=started, finish=None))
    (prefill,) = named(build(phases), "pdserve.prefill")
    assert prefill.attributes == {
        "pdserve.cached_tokens": 64,
        "pdserve.cached_tokens.disk": 36,
        "pdserve.cached_tokens.peer": 8,
        "pdserve.cached_from": "w2",
    }


def test_what_the_prefill_worker_had_is_told_too() -> None:
    phases = request()
    there = (CachedSource("host", 32), CachedSource("peer", 16, "w2"))
    started = FirstTokenStats(
        8,
        *(0.25, 0.25, 0.2),
        sources=(CachedSource("disk", 8),),
        prefill_cached=64,
        prefill_sources=there,
    )
    prompt(phases).add_attempt(attempt(started=started, finish=None))
    (prefill,) = named(build(phases), "pdserve.prefill")
    assert prefill.attributes == {
        "pdserve.cached_tokens": 8,
        "pdserve.cached_tokens.disk": 8,
        "pdserve.prefill_cached_tokens": 64,
        "pdserve.prefill_cached_tokens.host": 32,
        "pdserve.prefill_cached_tokens.peer": 16,
        "pdserve.prefill_cached_from": "w2",
    }


def test_a_worker_that_tells_nothing_at_all() -> None:
    phases = request()
    prompt(phases).add_attempt(attempt(started=None, finish=None))
    trace = build(phases)
    (work,) = named(trace, "pdserve.attempt")
    assert [span.name for span in children(trace, work)] == ["pdserve.decode"]


def test_the_callers_span_is_the_roots_parent() -> None:
    phases = request()
    phases.context = TraceContext(b"t" * 16, b"12345678", sampled=True, tracestate="a=1")
    trace = build(phases)
    assert (trace.spans[0].parent_id, trace.tracestate) == (b"12345678", "a=1")


def test_several_prompts_have_a_span_each() -> None:
    phases = request()
    for _ in range(2):
        prompt(phases).add_attempt(attempt())
    prompt(phases)
    phases.prompts_left_out = 4
    trace = build(phases)
    around = named(trace, "pdserve.prompt")
    assert [span.attributes["pdserve.index"] for span in around] == [0, 1, 2]
    assert [len(children(trace, span)) for span in around] == [1, 1, 0]
    assert trace.spans[0].attributes["pdserve.left_out"] == 4


def test_an_endless_mover_has_the_first_of_its_attempts() -> None:
    phases = request()
    made = prompt(phases)
    for number in range(1, MOST + 4):
        made.add_route(RoutePhase(101.0, 102.0, "kv"))
        made.add_attempt(attempt(number=number, start=102.0 + number / 100))
        made.add_move(MovePhase(103.0, 104.0, "kv", "a", "b", "completed"))
    trace = build(phases)
    numbers = [span.attributes["pdserve.number"] for span in named(trace, "pdserve.attempt")]
    assert numbers == list(range(1, MOST + 1))
    assert trace.spans[0].attributes["pdserve.left_out"] == 9


def test_texts_are_cut() -> None:
    phases = request()
    prompt(phases).add_attempt(attempt(worker="w" * 1000, error="e" * 1000))
    trace = build(phases)
    (work,) = named(trace, "pdserve.attempt")
    assert len(work.error) == MAX_ATTRIBUTE
    assert work.error.endswith("…")
    assert work.attributes["pdserve.worker"] == "w" * MAX_ATTRIBUTE


def test_a_time_outside_its_parent_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdserve.tracing.tree._within", lambda at, start, end: at)
    with pytest.raises(AssertionError):
        test_whatever_the_times_are_spans_nest(1)


def test_whatever_the_times_are_spans_nest(seed: int) -> None:
    draw = random.Random(seed)

    def at() -> float:
        return draw.choice((0.0, 100.0, draw.uniform(90.0, 120.0)))

    for _ in range(300):
        phases = RequestPhases(at(), never)
        for name in ("body_read", "planning", "planned", "first_token", "client_slow"):
            setattr(phases, name, at())
        for _ in range(draw.randrange(4)):
            made = prompt(phases)
            for number in range(1, draw.randrange(1, 5)):
                made.add_route(RoutePhase(at(), at(), "first"))
                started = FirstTokenStats(0, draw.uniform(0, 9), draw.uniform(0, 9), 0.0)
                finish = Finish(reason="stop", completion_tokens=draw.randrange(9))
                made.add_attempt(
                    attempt(
                        number=number,
                        start=at(),
                        sent=at(),
                        accepted=at(),
                        first=at(),
                        end=at(),
                        started=draw.choice((None, started)),
                        finish=draw.choice((None, finish)),
                        tokens_before=draw.randrange(9),
                    )
                )
                made.add_move(MovePhase(at(), at(), "kv", "a", "b", "completed"))
        ids = draw.getrandbits(63) + 1
        root = TraceRoot(trace_id=b"t" * 16, root_id=ids, end=at(), request_id="r", name="n")
        build(phases, root)


def test_what_a_worker_tells_of_itself_is_within_its_prefill_and_decode() -> None:
    phases = request()
    told = (WorkerPhase("chunk", 0.5, 1.0, 8), WorkerPhase("chunk", 1.0, 1.5, 4))
    started = FirstTokenStats(0, 0.5, 1.0, 0.9, phases=told)
    finish = Finish(
        reason="stop",
        completion_tokens=5,
        preemptions=1,
        phases=(WorkerPhase("preempted", 3.0, 3.5), WorkerPhase("new one", 90.0, 99.0)),
    )
    prompt(phases).add_attempt(attempt(started=started, finish=finish))
    trace = build(phases)
    (prefill,), (decode,) = named(trace, "pdserve.prefill"), named(trace, "pdserve.decode")
    assert [
        (span.name, span.start, span.end, span.attributes) for span in children(trace, prefill)
    ] == [
        ("pdserve.prefill.chunk", 3.5, 4.0, {"pdserve.tokens": 8}),
        ("pdserve.prefill.chunk", 4.0, 4.5, {"pdserve.tokens": 4}),
    ]
    assert [(span.name, span.start, span.end) for span in children(trace, decode)] == [
        ("pdserve.preempted", 6.0, 6.5),
        ("pdserve.worker.new one", 9.0, 9.0),
    ]


def test_a_remote_prefill_has_the_phases_of_its_handoff() -> None:
    phases = request()
    told = (
        WorkerPhase("handoff_admit", 0.0, 0.25),
        WorkerPhase("handoff_queue", 0.25, 0.5, attempt=0),
        WorkerPhase("handoff_open", 0.5, 0.75, node="p", attempt=1),
        WorkerPhase("handoff_fill", 0.75, 1.75, 12, "p", "tcp", 1),
        WorkerPhase("handoff_activate", 1.75, 2.0, node="p", attempt=1),
    )
    started = FirstTokenStats(
        0, 1.5, 0.5, 0.4, 12, "remote; node=p; reason=always", phases=told[1:]
    )
    prompt(phases).add_attempt(attempt(started=started))
    trace = build(phases)
    (queue,), (prefill,) = named(trace, "pdserve.queue"), named(trace, "pdserve.prefill")
    assert (queue.start, queue.end, prefill.start, prefill.end) == (2.75, 3.0, 3.0, 5.0)
    assert prefill.attributes["pdserve.where"] == "remote; node=p; reason=always"
    parts = children(trace, prefill)
    assert [span.name for span in parts] == [
        f"pdserve.handoff.{name}" for name in ("queue", "open", "fill", "activate")
    ]
    assert parts[2].attributes == {
        "pdserve.tokens": 12,
        "pdserve.node": "p",
        "pdserve.backend": "tcp",
        "pdserve.attempt": 1,
    }
    assert [(span.start, span.end) for span in parts] == [
        (3.0, 3.25),
        (3.25, 3.5),
        (3.5, 4.5),
        (4.5, 4.75),
    ]


def test_a_request_with_everything_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """All prompts, attempts, decisions, moves and phases that a record can have."""
    phases = request()
    chunks = tuple(WorkerPhase("chunk", 0.1, 0.2, 8) for _ in range(2 * MAX_WORKER_PHASES))
    busy = {
        "started": FirstTokenStats(4, 0.5, 1.0, 0.9, phases=chunks),
        "finish": Finish(reason="stop", phases=chunks),
    }
    while (one := phases.add_prompt()) is not None:
        for number in range(MOST):
            one.add_route(RoutePhase(101.0, 102.0, "first", "router"))
            one.add_attempt(attempt(number=number + 1, **busy))
            one.add_move(MovePhase(103.0, 104.0, "worker_lost", "a", "b", "completed"))
    trace = build(phases)
    assert len(trace.spans) == MOST_SPANS <= QUEUE_SPANS
    left_out = trace.spans[0].attributes["pdserve.left_out"]
    monkeypatch.setattr("pdserve.tracing.tree.MOST_SPANS", 10**9)
    whole = build(phases)
    assert whole.spans[1:MOST_SPANS] == trace.spans[1:]
    assert whole.spans[0].attributes["pdserve.left_out"] == 1, "the prompt that had no record"
    assert isinstance(left_out, int)
    assert 16 * MOST < left_out < len(whole.spans) - MOST_SPANS
    assert ROOT.attributes == {"http.route": "/v1/chat/completions"}, "the caller's own"

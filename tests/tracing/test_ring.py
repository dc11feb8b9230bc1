"""The last traces in memory: bounds, look-ups and lists."""

import gc
import tracemalloc

import msgspec
import pytest

from pdserve.messages.trace import TraceQuery
from pdserve.tracing.ring import MOST_SUMMARIES, TraceRing
from tests.support.traces import make_trace


def ids(ring, **query):
    return [one.request_id for one in ring.answer(TraceQuery(**query), "f1").summaries]


def filled(number, **ring):
    made = TraceRing(**ring)
    for n in range(number):
        made.add(make_trace(f"r{n}"))
    return made


def test_the_oldest_are_forgotten_beyond_the_count():
    ring = filled(7, traces=3)
    assert ids(ring) == ["r6", "r5", "r4"]
    assert len(ring) == 3
    assert ring.added == 7


def test_the_oldest_are_forgotten_beyond_the_bytes():
    one = filled(1).size
    ring = filled(50, limit=4 * one + one // 2)
    assert len(ring) == 4
    assert ring.size <= 4 * one + one // 2
    ring.add(make_trace("long" * 500))
    assert ring.size <= 4 * one + one // 2
    assert ids(ring)[0].startswith("long")


def test_a_trace_larger_than_the_ring_is_refused_and_the_others_stay():
    ring = filled(3, limit=20_000)
    ring.add(make_trace("x" * 30_000))
    assert (len(ring), ring.refused) == (3, 1)


def test_an_empty_ring_uses_nothing_again():
    ring = filled(3, traces=0)
    assert (len(ring), ring.size) == (0, 0)


def test_its_size_is_what_memory_it_takes():
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        ring = filled(200)
        gc.collect()
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert 0.8 < ring.size / taken < 1.25, (ring.size, taken)


@pytest.mark.parametrize("how", ["request", "trace", "upper", "prefix", "trace prefix"])
def test_a_trace_is_found(how):
    ring = filled(20)
    trace = make_trace("r7")
    wanted = {
        "request": "r7",
        "trace": trace.trace_id.hex(),
        "upper": trace.trace_id.hex().upper(),
        "prefix": "r7",
        "trace prefix": trace.trace_id.hex()[:12],
    }[how]
    reply = ring.answer(TraceQuery(id=wanted), "f1")
    assert reply.trace == trace
    assert [one.request_id for one in reply.summaries] == ["r7"]


def test_the_whole_id_wins_over_the_beginning_of_another():
    ring = filled(20)
    assert ids(ring, id="r1") == ["r1"]
    assert ids(ring, id="r") == [f"r{n}" for n in reversed(range(20))]


def test_the_newest_of_several_with_one_id_is_shown():
    ring = filled(2)
    ring.add(make_trace("r1", seconds=9.0))
    reply = ring.answer(TraceQuery(id="r1"), "f1")
    assert reply.trace.spans[0].end == 9.0
    assert len(reply.summaries) == 2


def test_nothing_is_found():
    reply = filled(2).answer(TraceQuery(id="nothing"), "f1")
    assert (reply.summaries, reply.trace, reply.frontends) == ((), None, ("f1",))
    assert reply.numbers == {"f1": 2}


def test_a_summary_says_what_happened():
    ring = TraceRing()
    ring.add(make_trace("r", seconds=2.0, error="worker lost", status=503, kept=("error", "moved")))
    (line,) = ring.answer(TraceQuery(), "f1").summaries
    assert (line.number, line.node, line.model) == (1, "f1", "tiny")
    assert (line.duration, line.ttft) == (2.0, 0.5)
    assert (line.status, line.error, line.kept) == (503, "worker lost", ("error", "moved"))


def test_a_list_is_filtered():
    ring = TraceRing()
    ring.add(make_trace("fine"))
    ring.add(make_trace("failed", error="worker lost", status=500))
    ring.add(make_trace("refused", status=429))
    ring.add(make_trace("late", seconds=30.0, kept=("slo_ttft",)))
    ring.add(make_trace("other", model="big"))
    assert ids(ring, errors=True) == ["refused", "failed"]
    assert ids(ring, slow=True) == ["late"]
    assert ids(ring, longer_than=1.0) == ["late"]
    assert ids(ring, model="big") == ["other"]
    assert ids(ring, limit=2) == ["other", "late"]


def test_a_follower_gets_what_is_new_the_oldest_first():
    ring = filled(5)
    assert ids(ring, after={"f1": 3}) == ["r3", "r4"]
    assert ids(ring, after={"f2": 3}) == ["r0", "r1", "r2", "r3", "r4"]
    assert ids(ring, after={"f1": 0}, limit=2) == ["r0", "r1"], "the rest comes with the next query"


def test_no_reply_is_endless():
    ring = filled(MOST_SUMMARIES + 50, traces=1000)
    assert len(ids(ring, limit=10**9)) == MOST_SUMMARIES
    assert ids(ring, limit=-1) == []


def test_what_it_holds_is_its_own():
    trace = make_trace("r")
    ring = TraceRing()
    ring.add(trace)
    before = msgspec.msgpack.encode(trace)
    trace.spans[0].attributes["late"] = "change"
    assert msgspec.msgpack.encode(ring.answer(TraceQuery(id="r"), "f1").trace) == before

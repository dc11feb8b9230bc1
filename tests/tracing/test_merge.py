"""Replies of several frontends become one."""

from msgspec.structs import replace

from pdserve.messages.trace import TraceQuery, TraceReply
from pdserve.tracing.merge import merge_trace_replies
from pdserve.tracing.ring import MOST_SUMMARIES, TraceRing
from tests.support.traces import BEGAN, make_trace


def ring_of(*requests):
    """A ring with requests, each as (id, second of its end)."""
    ring = TraceRing()
    for name, second in requests:
        ring.add(replace(make_trace(name), began=BEGAN + second * 10**9))
    return ring


A = ring_of(("req-a1", 1), ("req-a2", 4))
B = ring_of(("req-b1", 2), ("req-b", 3), ("req-b3", 5))


def merged(**query):
    asked = TraceQuery(**query)
    answers = {"fa": A.answer(asked, "fa"), "fb": B.answer(asked, "fb"), "fc": "no answer"}
    return merge_trace_replies(asked, answers)


def ids(reply):
    return [one.request_id for one in reply.summaries]


def test_the_newest_of_all_come_first():
    reply = merged(limit=4)
    assert ids(reply) == ["req-b3", "req-a2", "req-b", "req-b1"]
    assert [one.node for one in reply.summaries] == ["fb", "fa", "fb", "fb"]
    assert reply.frontends == ("fa", "fb")
    assert reply.silent == {"fc": "no answer"}
    assert reply.trace is None


def test_a_follower_gets_the_oldest_first_and_all():
    reply = merged(after={"fa": 1, "fb": 0}, limit=3)
    assert ids(reply) == ["req-b1", "req-b", "req-a2", "req-b3"]


def test_the_trace_is_that_of_the_first_line():
    assert merged(id="req-a1").trace == A.answer(TraceQuery(id="req-a1"), "fa").trace
    reply = merged(id="req-")
    assert ids(reply)[0] == "req-b3"
    assert reply.trace.request_id == "req-b3"


def test_a_whole_id_at_one_frontend_hides_beginnings_at_others():
    more = ring_of(("req-b99", 9))
    query = TraceQuery(id="req-b")
    reply = merge_trace_replies(
        query, {"fb": B.answer(query, "fb"), "fd": more.answer(query, "fd")}
    )
    assert ids(reply) == ["req-b"]
    assert reply.trace is not None
    assert reply.trace.request_id == "req-b"


def test_nothing_comes_of_nothing():
    assert merge_trace_replies(TraceQuery(), {}) == TraceReply()
    assert merged(id="none").trace is None


def test_the_limit_holds_for_all_together():
    many = ring_of(*((f"r{n}", n) for n in range(200)))
    query = TraceQuery(limit=10**6)
    answers = {name: many.answer(query, name) for name in ("f1", "f2", "f3")}
    assert len(merge_trace_replies(query, answers).summaries) == MOST_SUMMARIES

"""The table of traces, and traces as JSON."""

import datetime
import json

from pdserve.cli.console.trace_list import reply_as_json, trace_as_json, trace_list
from pdserve.messages.trace import TraceQuery
from pdserve.tracing.ring import TraceRing
from tests.support.traces import BEGAN, make_trace

DAY = datetime.datetime.fromtimestamp(BEGAN / 1e9, datetime.UTC)


def reply_of(*traces):
    ring = TraceRing()
    for trace in traces:
        ring.add(trace)
    return ring.answer(TraceQuery(), "f1")


def test_a_table_has_a_line_per_request():
    reply = reply_of(
        make_trace("req-0123456789abcdef", seconds=0.4),
        make_trace("req-fedcba9876543210", seconds=3.0, error="worker lost", status=503),
    )
    assert trace_list(reply.summaries, 80, DAY) == [
        "TIME      REQUEST       MODEL     TOOK     TTFT  STATUS  KEPT",
        "14:13:20  req-fedcba98  tiny     3.00s    750ms     503  head: worker lost",
        "14:13:20  req-01234567  tiny     400ms    100ms     200  head",
    ]


def test_another_day_is_named():
    lines = trace_list(reply_of(make_trace()).summaries, 80, DAY + datetime.timedelta(days=1))
    assert lines[1].startswith("21 Sep    req-1")


def test_ids_are_as_long_as_tells_them_apart():
    names = [f"my-own-request-{number}" for number in (10, 11)]
    lines = trace_list(reply_of(*map(make_trace, names)).summaries, 80, DAY)
    assert all(name in " ".join(lines) for name in names)
    same = trace_list(reply_of(make_trace("x" * 300), make_trace("x" * 300)).summaries, 80, DAY)
    assert all(len(line) <= 80 for line in same)


def test_what_would_move_the_cursor_is_replaced_and_no_line_is_too_long():
    lines = trace_list(reply_of(make_trace("a\x1b[2J\n" * 9, model="字" * 90)).summaries, 60, DAY)
    assert all(line.isprintable() and len(line) <= 60 for line in lines)


def test_what_does_not_fit_is_marked():
    trace = make_trace("req-1", error="e" * 90)
    lines = trace_list(reply_of(trace).summaries, 80, DAY)
    assert [len(line) for line in lines[1:]] == [80]
    assert lines[1].endswith("ee…")


def test_json_has_ids_in_hex_and_every_field():
    trace = make_trace()
    found = json.loads(json.dumps(trace_as_json(trace)))
    assert found["trace_id"] == trace.trace_id.hex()
    assert found["began"] == BEGAN
    assert found["spans"][0]["span_id"] == trace.spans[0].span_id.hex()
    assert found["spans"][0]["events"] == [
        {"name": "first_token", "at": 0.25, "attributes": {"choice": 0}}
    ]
    listed = json.loads(json.dumps(reply_as_json(reply_of(trace))))
    assert listed["frontends"] == ["f1"]
    assert listed["traces"][0]["request_id"] == "req-1"
    assert listed["traces"][0]["ttft"] == 0.25

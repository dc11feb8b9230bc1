"""Encoded traces come back as they were."""

from msgspec.structs import replace

from pdserve.messages.trace import Span, SpanEvent
from pdserve.tracing.compact import decode_trace, encode_trace
from tests.support.traces import make_trace


def test_a_trace_comes_back():
    trace = make_trace(error="worker lost", kept=("error", "moved"))
    assert decode_trace(encode_trace(trace)) == trace


def test_text_that_is_no_unicode_is_repaired_and_the_rest_stays():
    """As in a header whose bytes are not UTF-8."""
    bad = b"caf\xe9".decode("utf-8", "surrogateescape")
    attributes = {"server.address": bad, bad: ("a", bad), "n": 3, "x": 0.5, "yes": True}
    events = (SpanEvent(bad, 0.25, {bad: bad}),)
    span = Span(span_id=b"\x02" * 8, name=bad, start=0.0, end=1.0, events=events, error=bad)
    trace = replace(
        make_trace("r"),
        request_id=bad,
        spans=(replace(span, attributes=attributes), *make_trace().spans[1:]),
    )
    back = decode_trace(encode_trace(trace))
    assert back.request_id == "caf?"
    assert back.trace_id == trace.trace_id
    first, *others = back.spans
    assert first.attributes == {
        "server.address": "caf?",
        "caf?": ("a", "caf?"),
        "n": 3,
        "x": 0.5,
        "yes": True,
    }
    assert first.events == (SpanEvent("caf?", 0.25, {"caf?": "caf?"}),)
    assert tuple(others) == trace.spans[1:]

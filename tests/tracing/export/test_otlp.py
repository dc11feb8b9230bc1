"""Encoded traces, read by OpenTelemetry's own protobuf and compared field by field."""

import base64
import gzip
import json
import math

import pytest
from google.protobuf import json_format
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1 import trace_pb2

from pdserve import __version__
from pdserve.messages.trace import Span, SpanEvent, Trace
from pdserve.tracing.export.otlp import RequestFrame, encode_span, read_partial_success
from tests.support.otlp import parse_request
from tests.support.seeds import is_long
from tests.support.traces import BEGAN, make_trace

RESOURCE = {"service.name": "pdserve", "pdserve.cluster": "c1"}


def body_of(*traces, gzipped=False, resource=RESOURCE):
    body = RequestFrame(resource).body(gzip=gzipped)
    for trace in traces:
        for span in trace.spans:
            body.add(encode_span(trace, span))
    return body.finish()


def read(*traces, **options):
    (resource_spans,) = parse_request(body_of(*traces, **options)).resource_spans
    (scope_spans,) = resource_spans.scope_spans
    return resource_spans.resource, scope_spans.scope, list(scope_spans.spans)


def plain(attributes):
    """Attributes as Python values."""

    def value(any_value):
        kind = any_value.WhichOneof("value")
        found = getattr(any_value, kind)
        return tuple(map(value, found.values)) if kind == "array_value" else found

    names = [one.key for one in attributes]
    assert len(names) == len(set(names)), "no attribute twice"
    return {one.key: value(one.value) for one in attributes}


def check(trace, read_spans):
    """Every field of every span is what the trace says."""
    assert len(read_spans) == len(trace.spans)
    for number, (span, found) in enumerate(zip(trace.spans, read_spans, strict=True)):
        assert found.trace_id == trace.trace_id
        assert found.span_id == span.span_id
        assert found.parent_span_id == span.parent_id
        assert found.trace_state == trace.tracestate
        assert found.name == span.name
        kinds = {"server": trace_pb2.Span.SPAN_KIND_SERVER}
        assert found.kind == kinds.get(span.kind, trace_pb2.Span.SPAN_KIND_INTERNAL)
        assert found.start_time_unix_nano == trace.began + round(span.start * 1e9)
        assert found.end_time_unix_nano == trace.began + round(span.end * 1e9)
        own = {"pdserve.request_id": trace.request_id, "pdserve.kept": trace.kept}
        assert plain(found.attributes) == span.attributes | (own if number == 0 else {})
        events = [(e.name, e.time_unix_nano, plain(e.attributes)) for e in found.events]
        assert events == [
            (e.name, trace.began + round(e.at * 1e9), e.attributes) for e in span.events
        ]
        failed = trace_pb2.Status.STATUS_CODE_ERROR
        assert found.status.code == (failed if span.error else trace_pb2.Status.STATUS_CODE_UNSET)
        assert found.status.message == span.error
        assert found.flags & 0xFF == 1, "sampled"
        assert found.flags & 0x100, "whether the parent is remote is known"
        assert bool(found.flags & 0x200) == (number == 0 and bool(span.parent_id))


def test_a_trace_arrives_field_by_field():
    trace = make_trace(error="worker lost")
    resource, scope, spans = read(trace)
    assert plain(resource.attributes) == RESOURCE
    assert (scope.name, scope.version) == ("pdserve", __version__)
    check(trace, spans)
    assert plain(spans[0].attributes)["gen_ai.usage.input_tokens"] == 2**40


def test_several_traces_share_a_request():
    traces = [make_trace(f"r{n}") for n in range(5)]
    spans = read(*traces)[2]
    for number, trace in enumerate(traces):
        check(trace, spans[number * 7 : number * 7 + 7])


def test_a_packed_request_is_the_same():
    traces = [make_trace(f"r{n}") for n in range(20)]
    packed = body_of(*traces, gzipped=True)
    assert gzip.decompress(packed) == body_of(*traces)
    assert len(packed) < len(body_of(*traces)) / 4


def test_what_has_no_parent_and_no_tracestate_says_so():
    trace = Trace(
        trace_id=b"\x01" * 16,
        began=BEGAN,
        request_id="r",
        spans=(Span(span_id=b"\x02" * 8, name="GET", start=0.0, end=0.0),),
    )
    (span,) = json.loads(body_of(trace))["resourceSpans"][0]["scopeSpans"][0]["spans"]
    assert not {"parentSpanId", "traceState", "events", "status"} & span.keys()
    assert span["startTimeUnixNano"] == span["endTimeUnixNano"] == str(BEGAN)
    check(trace, read(trace)[2])


def test_ids_are_hex_numbers_are_strings_and_enums_are_numbers():
    (span, *_) = json.loads(body_of(make_trace()))["resourceSpans"][0]["scopeSpans"][0]["spans"]
    assert span["traceId"] == make_trace().trace_id.hex()
    assert span["kind"] == 2
    values = {one["key"]: one["value"] for one in span["attributes"]}
    assert values["gen_ai.usage.input_tokens"] == {"intValue": str(2**40)}
    assert values["gen_ai.request.stream"] == {"boolValue": True}
    assert isinstance(span["startTimeUnixNano"], str)


texts = st.text(max_size=20)
values = st.one_of(
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
    texts,
    st.lists(texts, max_size=3).map(tuple),
)
attributes = st.dictionaries(texts, values, max_size=4)
offsets = st.integers(0, 10**12).map(lambda ns: ns / 1e9)


@st.composite
def traces(draw):
    def span(number):
        start, end = sorted((draw(offsets), draw(offsets)))
        events = [SpanEvent(draw(texts), at, draw(attributes)) for at in draw(st.lists(offsets))]
        return Span(
            span_id=draw(st.binary(min_size=8, max_size=8)),
            parent_id=draw(st.sampled_from((b"", b"\x00\x01" * 4))),
            name=draw(texts),
            start=start,
            end=end,
            kind=draw(st.sampled_from(("server", "internal"))),
            attributes=draw(attributes),
            events=tuple(sorted(events, key=lambda event: event.at)),
            error=draw(texts),
        )

    return Trace(
        trace_id=draw(st.binary(min_size=16, max_size=16)),
        tracestate=draw(texts),
        began=draw(st.integers(0, 2**62)),
        request_id=draw(texts),
        kept=tuple(draw(st.lists(texts, max_size=3))),
        spans=tuple(span(n) for n in range(draw(st.integers(1, 4)))),
    )


@given(traces())
@settings(max_examples=1000 if is_long() else 40)
def test_any_trace_arrives_field_by_field(trace):
    check(trace, read(trace)[2])


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_numbers_that_are_none_survive(value):
    trace = _with({"x": value})
    found = plain(read(trace)[2][0].attributes)["x"]
    assert found == value or (math.isnan(found) and math.isnan(value))


def test_an_integer_beyond_64_bits_becomes_text():
    assert plain(read(_with({"x": 2**63}))[2][0].attributes)["x"] == str(2**63)


def test_text_that_is_no_unicode_does_not_lose_the_trace():
    trace = _with({"x\ud800": "a\udfffb", "y": ("\ud800",)})
    found = plain(read(trace)[2][0].attributes)
    assert found["x?"] == "a?b"
    assert found["y"] == ("?",)


def test_a_span_never_ends_before_it_starts():
    trace = _with({}, start=1.0, end=0.5)
    (span,) = read(trace)[2]
    assert span.end_time_unix_nano == span.start_time_unix_nano


def _with(attributes, start=0.0, end=1.0):
    span = Span(span_id=b"\x02" * 8, name="s", start=start, end=end, attributes=attributes)
    return Trace(trace_id=b"\x01" * 16, began=BEGAN, request_id="r", spans=(span,))


# ---------------------------------------------------------------- the answer


@pytest.mark.parametrize(
    ("body", "rejected"),
    [
        (b"", (0, "")),
        (b"{}", (0, "")),
        (b'{"partialSuccess":{}}', (0, "")),
        (b'{"partialSuccess":null}', (0, "")),
        (b'{"partialSuccess":{"rejectedSpans":"7","errorMessage":"too old"}}', (7, "too old")),
        (b'{"partialSuccess":{"rejectedSpans":7}}', (7, "")),
        (b'{"partialSuccess":{"errorMessage":"soon"}}', (0, "soon")),
        (b'{"partialSuccess":{"rejectedSpans":"-7"}}', (0, "")),
        (b'{"partialSuccess":{"rejectedSpans":"many"}}', (0, "")),
        (b'{"partialSuccess":[]}', (0, "")),
        (b"\x0a\x02\x08\x07", (0, "")),
        (b"<html>", (0, "")),
        (b'{"a":' * 10_000, (0, "")),
    ],
)
def test_partial_success(body, rejected):
    assert read_partial_success(body) == rejected


def test_the_helper_of_these_tests_undoes_hex():
    """Protobuf's own JSON has base64 where OTLP has hex."""
    trace = make_trace()
    as_protobuf_reads = ExportTraceServiceRequest()
    json_format.Parse(body_of(trace), as_protobuf_reads)
    (span, *_) = as_protobuf_reads.resource_spans[0].scope_spans[0].spans
    assert base64.b64encode(span.trace_id).decode() == trace.trace_id.hex()

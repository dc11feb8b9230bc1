"""Drawings of traces: exact lines, widths, and names that would break a terminal."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from pdserve.messages.trace import Span, SpanEvent, Trace
from pdserve.tracing.steps import StepTrace
from pdserve.tracing.waterfall import MAX_WIDTH, MIN_WIDTH, plain_text, seconds_text, waterfall
from tests.support.traces import BEGAN, make_trace

DRAWN = """\
request                ###############       0   800ms in=1099511627776 finish=~
  tokenize             #                     0    20ms tokens=12
  route                #                  20ms    20ms policy=ttft overlap=0
  attempt               ##############    40ms   760ms worker=w1 reason=first
    queue               #                 40ms    60ms
    prefill              ##              100ms   100ms cached=8 computed=4
    decode                 ###########   200ms   600ms tokens=30 itl_p50=25ms
  first_token              *             200ms         choice=0"""


def rows_of(trace, width=80):
    lines = waterfall(trace, width, ascii_only=True)
    return lines[[line.startswith("phase") for line in lines].index(True) + 1 :]


def test_a_trace_is_drawn():
    assert "\n".join(rows_of(make_trace(seconds=0.8))) == DRAWN


def test_the_head_says_which_request_it_is():
    head = waterfall(make_trace(kept=("head", "slo_ttft")))
    assert head[0] == "POST /v1/chat/completions  200  tiny  took 1.00s"
    assert head[1] == "request req-1"
    assert head[2].startswith(f"trace   {make_trace().trace_id.hex()}  20")
    assert head[3] == "kept    head, slo_ttft"
    assert head[4] == ""


def test_a_failure_stands_below_its_span():
    assert rows_of(make_trace(error="worker lost"))[1] == "  failed: worker lost"


def test_both_alphabets_draw_the_same():
    trace = make_trace()
    plain = waterfall(trace, ascii_only=True)
    assert all(line.isascii() for line in plain)
    drawn = "\n".join(waterfall(trace)).translate(str.maketrans("█▏◆…", "#|*~"))
    assert drawn == "\n".join(plain)


names = st.text(max_size=40)


@given(
    st.integers(0, 200),
    st.lists(st.tuples(names, st.floats(0, 1e6), st.floats(0, 1e6), st.integers(0, 5)), max_size=8),
    names,
    st.dictionaries(names, st.one_of(names, st.integers(), st.floats(), st.booleans())),
)
def test_every_line_fits_whatever_is_in_a_name(width, spans, text, attributes):
    """Parents may be unknown, later, or the span itself."""
    made = [
        Span(
            span_id=bytes([7] * 7 + [number]),
            parent_id=bytes([7] * 7 + [parent]),
            name=name,
            start=min(a, b),
            end=max(a, b),
            attributes=attributes,
            events=(SpanEvent(name, a, attributes),),
            error=text,
        )
        for number, (name, a, b, parent) in enumerate([("root", 0.0, 1.0, 9), *spans])
    ]
    trace = Trace(
        trace_id=b"\x01" * 16,
        began=BEGAN,
        request_id=text,
        model=text,
        kept=(text,),
        spans=(*made,),
    )
    lines = waterfall(trace, width)
    assert all(len(line) <= max(MIN_WIDTH, min(width, MAX_WIDTH)) for line in lines)
    assert all(line == plain_text(line) for line in lines)
    assert all(line.isascii() for line in waterfall(trace, width, ascii_only=True))


def test_a_drawing_is_not_endless():
    root, *_ = make_trace().spans
    many = tuple(
        Span(
            span_id=number.to_bytes(8, "big"),
            parent_id=root.span_id,
            name="pdserve.move",
            start=0.1,
            end=0.2,
        )
        for number in range(1, 5000)
    )
    rows = rows_of(replace(make_trace(), spans=(root, *many)))
    assert len(rows) == 201
    assert rows[-1] == "~ 4801 more rows"


def test_spans_without_their_parent_stand_below_the_root():
    trace = make_trace()
    lost = replace(trace, spans=tuple(s for s in trace.spans if s.name != "pdserve.attempt"))
    assert [row.split()[0] for row in rows_of(lost)] == [
        *("request", "tokenize", "route", "queue", "prefill", "decode", "first_token"),
    ]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        *((0.0, "0"), (0.00042, "0.42ms"), (0.0042, "4.2ms"), (0.051, "51ms"), (0.9994, "999ms")),
        *((0.9996, "1.00s"), (1.234, "1.23s"), (12.34, "12.3s"), (310.0, "310s"), (6000, "100m")),
        *((3.6e6, "1000h"), (0.0000004, "0"), (0.00999, "10.0ms")),
    ],
)
def test_durations(seconds, text):
    assert seconds_text(seconds) == text


def test_what_begins_together_stays_in_its_order():
    root, *_ = make_trace().spans
    phases = tuple(
        Span(span_id=bytes([9] * 7 + [n]), parent_id=root.span_id, name=name, start=0.1, end=0.1)
        for n, name in enumerate(("open", "fill", "activate"))
    )
    rows = rows_of(replace(make_trace(), spans=(root, *phases)))
    assert [row.split()[0] for row in rows] == [
        "request",
        "open",
        "fill",
        "activate",
        "first_token",
    ]


def test_attributes_in_few_words():
    span = Span(
        span_id=b"\x02" * 8,
        name="pdserve.route",
        start=0.0,
        end=1.0,
        attributes={
            "pdserve.held": True,
            "pdserve.other": False,
            "pdserve.router": "",
            "pdserve.ratio": 0.123456,
            "pdserve.life": 7,
            "pdserve.preemptions": 0,
            "x": ("a", "b"),
            "pdserve.predicted_ttft": 0.051,
            "pdserve.policy": "ttft",
        },
    )
    (root, *_) = make_trace().spans
    row = rows_of(replace(make_trace(), spans=(root, replace(span, parent_id=root.span_id))), 100)
    assert row[1].endswith("held policy=ttft predicted=51ms ratio~")


def test_how_long_a_router_held_a_request_comes_first():
    span = Span(
        span_id=b"\x02" * 8,
        name="pdserve.route",
        start=0.0,
        end=1.0,
        attributes={"pdserve.policy": "ttft", "pdserve.overlap_tokens": 0, "pdserve.held": 0.98},
    )
    (root, *_) = make_trace().spans
    row = rows_of(replace(make_trace(), spans=(root, replace(span, parent_id=root.span_id))))[1]
    assert row.endswith("held=980ms policy=ttft o~")


def test_a_change_is_drawn_with_its_attributes_in_the_head() -> None:
    steps = StepTrace("pdserve.change", "c-7", 0.0, model="m", action="start", kind="gpu")
    steps.event("decided", 0.0, binding="with 2 workers")
    steps.enter("asked", 0.0)
    steps.enter("booting", 2.0)
    lines = waterfall(steps.built(10.0, 0.0, Random(1), result="failed", error="no GPU"), 80)
    text = "\n".join(lines)
    for words in (
        "pdserve.change  m  took 10.0s",
        "change  c-7",
        "about   result=failed action=start kind=gpu",
        "failed: no GPU",
    ):
        assert words in text
    rows = [line.split()[0] for line in lines if line.startswith(("change", " "))]
    assert rows.index("change.asked") < rows.index("change.booting")
    assert "request" not in text

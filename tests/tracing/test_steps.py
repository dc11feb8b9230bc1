"""Traces of what happens in steps."""

from __future__ import annotations

from random import Random

from pdserve.messages.trace import AttributeValue, SpanEvent
from pdserve.tracing.steps import StepTrace


def made() -> StepTrace:
    return StepTrace("pdserve.change", "c-1", 100.0, model="m", action="start", worker="", plan=3)


def test_steps_follow_each_other_and_fill_the_whole() -> None:
    trace = made()
    trace.enter("asked", 100.0)
    trace.enter("asked", 101.0)
    trace.enter("booting", 103.0)
    trace.enter("joined", 110.0)
    built = trace.built(112.5, 2000.0, Random(1), result="done")
    root, *steps = built.spans
    assert (root.start, root.end, root.error) == (0.0, 12.5, "")
    assert root.attributes == {
        "pdserve.action": "start",
        "pdserve.plan": 3,
        "pdserve.result": "done",
    }
    assert [(one.name, one.start, one.end) for one in steps] == [
        ("pdserve.change.asked", 0.0, 3.0),
        ("pdserve.change.booting", 3.0, 10.0),
        ("pdserve.change.joined", 10.0, 12.5),
    ]
    assert {one.parent_id for one in steps} == {root.span_id}
    assert len({one.span_id for one in built.spans}) == 4
    assert (built.request_id, built.model, built.kept) == ("c-1", "m", ("change",))
    assert built.began == round((2000.0 - 12.5) * 1e9)
    assert len(built.trace_id) == 16
    assert any(built.trace_id)


def test_a_failure_is_at_the_root_and_at_its_step() -> None:
    trace = made()
    trace.enter("asked", 100.0)
    trace.enter("booting", 103.0)
    built = trace.built(104.0, 0.0, Random(1), error="x" * 1000)
    assert [len(one.error) for one in built.spans] == [256, 0, 256]


def test_an_event_that_is_repeated_is_told_once() -> None:
    trace = made()
    for at in (101.0, 102.0, 103.0):
        trace.event("ordered_in_vain", at, reason="full")
    trace.event("ordered", 104.0)
    trace.event("ordered_in_vain", 105.0, reason="full")
    (root,) = trace.built(106.0, 0.0, Random(1)).spans
    why: dict[str, AttributeValue] = {"pdserve.reason": "full"}
    assert root.events == (
        SpanEvent("ordered_in_vain", 1.0, why),
        SpanEvent("ordered", 4.0),
        SpanEvent("ordered_in_vain", 5.0, why),
    )


def test_it_is_bounded() -> None:
    trace = made()
    for number in range(1000):
        trace.enter(f"s{number}", 100.0 + number)
        trace.event(f"e{number}", 100.0 + number)
    built = trace.built(2000.0, 0.0, Random(1))
    assert len(built.spans) == 65
    assert len(built.spans[0].events) == 64

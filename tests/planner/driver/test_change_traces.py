"""One trace for each change of a planner."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from msgspec.structs import replace

from pdserve.messages.planner import Change, ScalingPlan
from pdserve.planner.changes.book import Ended
from pdserve.planner.changes.table import ChangeState
from pdserve.planner.driver import change_traces
from pdserve.planner.driver.change_traces import ChangeTraces
from pdserve.planner.tick import Order, Refusal

if TYPE_CHECKING:
    from pdserve.messages.trace import Trace

START = Change(id="c1", action="start", kind="gpu", mode="decode", state="asked", reason="8 % miss")


class Kept:
    def __init__(self) -> None:
        self.traces: list[Trace] = []

    def add(self, trace: Trace) -> None:
        self.traces.append(trace)


def made() -> tuple[ChangeTraces, Kept]:
    kept = Kept()
    return ChangeTraces(kept, Random(1), lambda: 5000.0), kept


def plan(*changes: Change) -> ScalingPlan:
    return ScalingPlan(term=7, number=3, model="m", changes=changes, binding="ttft")


def test_a_start_from_its_decision_to_its_first_request() -> None:
    traces, kept = made()
    traces.note(10.0, [plan(START)], [])
    traces.ordered(10.5, Order("begin", START, "m", 7, 3), Refusal("exhausted", "no slot"))
    traces.ordered(15.5, Order("begin", START, "m", 7, 3), None)
    for at, state in ((20.0, "pending"), (25.0, "booting"), (30.0, "booting"), (60.0, "joined")):
        traces.note(at, [plan(replace(START, state=state))], [])
    assert kept.traces == []
    traces.note(70.0, [plan()], [Ended(START, "m", ChangeState.DONE, 60.0)])
    (trace,) = kept.traces
    root, *steps = trace.spans
    assert (trace.request_id, trace.model, root.error) == ("c1", "m", "")
    assert root.attributes["pdserve.result"] == "done"
    assert root.attributes["pdserve.reason"] == "8 % miss"
    assert [(one.name, one.at) for one in root.events] == [
        ("decided", 0.0),
        ("ordered_in_vain", 0.5),
        ("ordered", 5.5),
    ]
    assert [(one.name.rpartition(".")[2], one.end - one.start) for one in steps] == [
        ("asked", 10.0),
        ("pending", 5.0),
        ("booting", 35.0),
        ("joined", 10.0),
    ]


def test_a_change_that_fails_says_why() -> None:
    traces, kept = made()
    traces.note(10.0, [plan(START)], [])
    ended = Ended(replace(START, reason="out of memory"), "m", ChangeState.FAILED, 20.0)
    traces.note(30.0, [plan()], [ended])
    (trace,) = kept.traces
    assert trace.spans[0].error == trace.spans[-1].error == "out of memory"
    assert trace.spans[0].attributes["pdserve.result"] == "failed"


def test_what_another_planner_leads_on_has_no_trace_here() -> None:
    traces, kept = made()
    traces.note(10.0, [plan(START)], [])
    traces.note(15.0, [], [])
    traces.ordered(16.0, Order("begin", START, "m", 7, 3), None)
    traces.note(20.0, [], [Ended(START, "m", ChangeState.DONE, 60.0)])
    assert kept.traces == []
    assert traces._traces == {}


def test_as_many_as_are_traced_at_a_time() -> None:
    traces, _ = made()
    many = [replace(START, id=f"c{number}") for number in range(2 * change_traces._MOST)]
    traces.note(10.0, [plan(*many)], [])
    assert len(traces._traces) == change_traces._MOST

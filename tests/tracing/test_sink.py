"""Traces reach every sink."""

import logging

from pdserve.tracing.sink import NO_SINK, TraceSinks
from tests.support.traces import make_trace


class Taker:
    def __init__(self):
        self.taken = []

    def add(self, trace):
        self.taken.append(trace)


class Broken:
    def add(self, trace):
        raise ValueError("broken")


def test_every_sink_gets_each_trace():
    one, two = Taker(), Taker()
    sinks = TraceSinks(one, two)
    traces = [make_trace(f"r{n}") for n in range(3)]
    for trace in traces:
        sinks.add(trace)
    assert one.taken == two.taken == traces


def test_a_sink_that_fails_hurts_no_request_and_no_other_sink(caplog):
    last = Taker()
    lost = []
    sinks = TraceSinks(Broken(), last, on_lost=lambda: lost.append(1))
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            sinks.add(make_trace())
    assert len(last.taken) == len(lost) == 3
    assert caplog.text.count("a trace was lost in Broken") == 1


def test_no_sink_takes_everything():
    NO_SINK.add(make_trace())

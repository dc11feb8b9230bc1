"""A frontend's answers to queries."""

import math

import pytest

from pdserve.errors import InvalidRequest, Overloaded
from pdserve.messages.trace import TraceQuery
from pdserve.tracing.answers import TraceAnswers
from pdserve.tracing.ring import TraceRing
from pdserve.tracing.watches import TraceWatches
from tests.support.traces import make_trace


def test_a_query_is_answered_from_the_ring():
    ring = TraceRing()
    ring.add(make_trace("r1"))
    answers = TraceAnswers(ring, TraceWatches(), "f1", lambda: 0.0)
    assert answers(TraceQuery(id="r1")).trace == make_trace("r1")


def test_a_query_begins_a_watch():
    watches, now = TraceWatches(models=1), 10.0
    answers = TraceAnswers(TraceRing(), watches, "f1", lambda: now)
    assert answers(TraceQuery(watch="tiny", watch_seconds=60.0)).frontends == ("f1",)
    assert watches.watching("tiny", 69.0)
    assert not watches.watching("tiny", 71.0)
    with pytest.raises(Overloaded):
        answers(TraceQuery(watch="other", watch_seconds=60.0))


@pytest.mark.parametrize(
    ("model", "seconds"), [("tiny", 0.0), ("tiny", -1.0), ("tiny", math.nan), ("x" * 600, 60.0)]
)
def test_a_watch_that_makes_no_sense_is_refused(model, seconds):
    watches = TraceWatches()
    answers = TraceAnswers(TraceRing(), watches, "f1", lambda: 0.0)
    with pytest.raises(InvalidRequest):
        answers(TraceQuery(watch=model, watch_seconds=seconds))
    assert len(watches) == 0

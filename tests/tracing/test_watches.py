"""Watched models, and the end of every watch."""

import pytest

from pdserve.errors import Overloaded
from pdserve.tracing.watches import LONGEST_WATCH, TraceWatches


def test_a_watch_concerns_one_model_and_ends():
    watches = TraceWatches()
    assert not watches.watching("tiny", 0.0)
    watches.begin("tiny", 60.0, now=100.0)
    assert watches.watching("tiny", 159.9)
    assert not watches.watching("other", 101.0)
    assert not watches.watching("tiny", 160.0)
    assert not watches.take("tiny", 160.0)


def test_a_watch_begins_anew():
    watches = TraceWatches(traces=1)
    watches.begin("tiny", 60.0, now=0.0)
    assert watches.take("tiny", 1.0)
    watches.begin("tiny", 60.0, now=50.0)
    assert watches.take("tiny", 109.0)


def test_a_watch_keeps_only_so_many():
    watches = TraceWatches(traces=3)
    watches.begin("tiny", 60.0, now=0.0)
    assert [watches.take("tiny", 1.0) for _ in range(5)] == [True] * 3 + [False] * 2
    assert not watches.watching("tiny", 1.0), "more requests need not be traced"


def test_watches_are_few_and_short():
    watches = TraceWatches(models=2)
    watches.begin("a", 1e9, now=0.0)
    assert not watches.watching("a", LONGEST_WATCH)
    watches.begin("b", 10.0, now=0.0)
    with pytest.raises(Overloaded, match="2 models are watched already"):
        watches.begin("c", 10.0, now=5.0)
    watches.begin("b", 10.0, now=5.0)
    watches.begin("c", 10.0, now=15.0)
    assert len(watches) == 2, "a watch that has ended makes room"

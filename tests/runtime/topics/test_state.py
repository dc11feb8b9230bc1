"""One value, many subscribers: each gets the latest, and never the same twice in a row."""

from __future__ import annotations

from itertools import pairwise

import hypothesis.strategies as st
import pytest
from hypothesis import given

from pdserve.errors import ProtocolError
from pdserve.runtime.topics.state import StatePublisher


def encode(number: int) -> bytes:
    return b"%d" % number


def test_nothing_is_sent_before_there_is_a_value() -> None:
    publisher = StatePublisher(encode)
    feed = publisher.feed()
    assert feed.poll(0.0) is None
    assert publisher.set(1)
    assert feed.poll(0.0) == b"1"
    assert feed.poll(0.0) is None
    assert publisher.feed().poll(0.0) == b"1"


def test_values_between_polls_are_skipped() -> None:
    publisher = StatePublisher(encode)
    feed = publisher.feed()
    for number in range(100):
        publisher.set(number)
    assert feed.poll(0.0) == b"99"


def test_a_value_that_came_back_is_not_sent() -> None:
    publisher = StatePublisher(encode)
    feed = publisher.feed()
    publisher.set(1)
    assert feed.poll(0.0) == b"1"
    publisher.set(2)
    publisher.set(1)
    assert feed.poll(0.0) is None
    assert not publisher.set(1)


def test_the_interval_delays_and_then_sends_the_latest() -> None:
    publisher = StatePublisher(encode, interval=1.0)
    feed = publisher.feed()
    publisher.set(1)
    assert feed.poll(5.0) == b"1"
    assert feed.due is None
    publisher.set(2)
    assert feed.poll(5.5) is None
    assert feed.due == 6.0
    publisher.set(3)
    assert feed.poll(6.0) == b"3"


def test_subscribers_say_nothing() -> None:
    feed = StatePublisher(encode).feed()
    with pytest.raises(ProtocolError):
        feed.hear(b"x", 0.0)
    feed.close()


@given(st.lists(st.one_of(st.integers(0, 3), st.none())))
def test_each_feed_ends_with_the_last_value(steps: list[int | None]) -> None:
    """None: the subscriber has credit."""
    publisher = StatePublisher(encode)
    feed = publisher.feed()
    got: list[bytes] = []
    for step in [*steps, None]:
        if step is not None:
            publisher.set(step)
        elif (value := feed.poll(0.0)) is not None:
            got.append(value)
    assert all(one != other for one, other in pairwise(got))
    assert got[-1:] == ([] if publisher.value is None else [publisher.value])

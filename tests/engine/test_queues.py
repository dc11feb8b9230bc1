"""The scheduler's ordered collections."""

from __future__ import annotations

import pytest

from pdserve.engine.queues import Deadlines, WaitingQueue
from pdserve.engine.sequence import Sequence
from pdserve.messages.request import GenerateRequest, SamplingParams

REQUEST = GenerateRequest(
    request_id="r", model="m", prompt=[1], sampling=SamplingParams(max_tokens=1)
)


def sequence(*order: int) -> Sequence:
    return Sequence(1, 0, REQUEST, [1], 1, 0.0, order=order)  # type: ignore[arg-type]


def test_a_sequence_returns_to_the_place_its_arrival_gives_it():
    queue = WaitingQueue()
    first, second, urgent = sequence(0, 1, 0), sequence(0, 2, 0), sequence(-1, 9, 0)
    for entry in (second, urgent, first):
        queue.push(entry)
    seen = []
    while len(queue):
        seen.append(queue.first())
        assert queue.discard(seen[-1])
    assert seen == [urgent, first, second]
    assert not queue.discard(first)
    with pytest.raises(IndexError):
        queue.first()


def test_deadlines_pass_in_order_and_can_be_withdrawn():
    deadlines = Deadlines()
    for handle, at in enumerate([3.0, 1.0, 2.0, 2.0]):
        deadlines.add(at, handle)
    deadlines.discard(2.0, 3)
    deadlines.discard(2.0, 99)
    assert deadlines.next() == 1.0
    assert deadlines.passed(0.5) == []
    assert deadlines.passed(2.0) == [1, 2]
    assert len(deadlines) == 3
    assert Deadlines().next() is None

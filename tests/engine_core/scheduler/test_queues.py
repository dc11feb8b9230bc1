"""The scheduler's queue."""

from __future__ import annotations

import pytest

from pdserve.engine_core.scheduler.queues import WaitingQueue
from pdserve.engine_core.scheduler.sequence import Sequence
from pdserve.messages.request import GenerateRequest, SamplingParams
from pdserve.token_ids import token_ids

REQUEST = GenerateRequest(
    request_id="r", model="m", prompt=token_ids([1]), sampling=SamplingParams(max_tokens=1)
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

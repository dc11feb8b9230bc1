"""Credit is never lost and never made: what a budget gave, it gets back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.wire.flow import CreditBudget, StreamState, cost_of
from pdserve.wire.limits import FRAME_COST


def test_a_budget_gives_what_it_has_or_nothing() -> None:
    budget = CreditBudget(1000)
    assert budget.take(600, least=100) == 600
    assert budget.take(600, least=100) == 400
    assert budget.take(600, least=100) == 0
    assert budget.take(0, least=100) == 0
    budget.give(50)
    assert budget.take(600, least=100) == 0
    assert budget.take(20, least=100) == 20
    budget.give(970)
    with pytest.raises(AssertionError):
        budget.give(1)


def test_a_frame_costs_more_than_its_body() -> None:
    assert cost_of(0) == FRAME_COST
    assert cost_of(1000) == 1000 + FRAME_COST


@given(
    window=st.integers(1, 5000),
    sizes=st.lists(st.integers(0, 3000), max_size=40),
    taken=st.integers(0, 40),
    listening=st.booleans(),
)
def test_a_stream_returns_its_whole_window(window, sizes, taken, listening) -> None:
    budget = CreditBudget(10_000)
    stream = StreamState(1, credit=0)
    stream.window = stream.allowance = budget.take(window, least=1)
    waiting: list[int] = []
    consumed = 0
    for size in sizes:
        if stream.allowance <= 0:
            if not waiting:
                break
            stream.refill(waiting.pop(0))
            consumed += 1
            continue
        stream.allowance -= cost_of(size)
        waiting.append(cost_of(size))
        # All credit is somewhere: with the peer, in the queue, or taken and not yet granted.
        assert stream.allowance + sum(waiting) + stream.spent == stream.window
        if consumed < taken:
            stream.refill(waiting.pop(0))
            consumed += 1
    stream.receiving = False
    stream.listening = listening
    budget.give(stream.release())
    for cost in waiting if listening else ():
        budget.give(stream.reclaim(cost))
    assert budget.granted == 0

"""Busy is relative to size, and ties rotate."""

from __future__ import annotations

from random import Random

import pytest

from pdserve.router.policies.least_loaded import choose
from pdserve.testing.policy_conformance import ROUTE_REQUEST, some_states, state_of, view


def test_nobody_is_less_busy_than_the_chosen():
    for state in some_states():
        least = choose(ROUTE_REQUEST, state, Random()).occupancy
        assert least == min(worker.sequences / worker.max_sequences for worker in state.workers)


@pytest.mark.parametrize(
    ("small", "large", "chosen"), [(1, 15, "small"), (1, 17, "small"), (2, 15, "large")]
)
def test_size_counts(small: int, large: int, chosen: str):
    state = state_of([view("small", small, 8), view("large", large, 64)])
    assert choose(ROUTE_REQUEST, state, Random()).node == chosen


def test_ties_rotate_among_the_least_busy_only():
    workers, last, chosen = [view("a"), view("b", 1), view("c"), view("d")], "", []
    for _ in range(4):
        last = choose(ROUTE_REQUEST, state_of(workers, last), Random()).node
        chosen.append(last)
    assert chosen == ["a", "c", "d", "a"]


def test_a_burst_spreads_evenly_over_equal_workers():
    load = {f"w{i}": 0 for i in range(5)}
    for done in range(1, 101):
        state = state_of([view(node, count) for node, count in load.items()])
        load[choose(ROUTE_REQUEST, state, Random()).node] += 1
        assert max(load.values()) - min(load.values()) <= (done % 5 != 0)

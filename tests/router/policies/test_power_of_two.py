"""Every pair of draws, none left to chance."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from pdserve.router.policies.power_of_two import choose
from pdserve.testing.policy_conformance import ROUTE_REQUEST, state_of, view


class Draws(Random):
    """Gives what it is told to."""

    def __init__(self, *draws: int) -> None:
        super().__init__(0)
        self.draws = list(draws)

    def randrange(self, start, stop=None, step=1):
        assert 0 <= self.draws[0] < start
        return self.draws.pop(0)


def every_pair(workers) -> Counter[str]:
    """How often each is chosen, over all equally likely draws."""
    size = len(workers)
    draws = [Draws(i, j) for i in range(size) for j in range(size - 1)]
    return Counter(choose(ROUTE_REQUEST, state_of(workers), random).node for random in draws)


@pytest.mark.parametrize("size", [2, 3, 7])
def test_equal_workers_are_equally_likely(size: int):
    chosen = every_pair([view(f"w{i}", 3) for i in range(size)])
    assert chosen == {f"w{i}": size - 1 for i in range(size)}


def test_the_busiest_is_never_chosen_and_the_idlest_most_often():
    assert every_pair([view("a", 9), view("b", 1), view("c", 5)]) == {"b": 4, "c": 2}


def test_the_only_one_needs_no_draw():
    assert choose(ROUTE_REQUEST, state_of([view("a", 9)]), Draws()).node == "a"

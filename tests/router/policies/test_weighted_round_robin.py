"""Shares follow size, evenly spread."""

from __future__ import annotations

from collections import Counter
from random import Random

from pdserve.router.policies.weighted_round_robin import choose
from tests.router.policies.support import ask, snapshot, worker

WORKERS = [worker("a", max_sequences=8), worker("b", max_sequences=16), worker("c", 0, 40)]


def turns(begin: int, count: int) -> list[str]:
    return [
        choose(ask(), snapshot(WORKERS, count=k), Random()).node
        for k in range(begin, begin + count)
    ]


def test_shares_are_those_of_the_sizes():
    shares = Counter(turns(0, 640))
    assert abs(shares["a"] - 80) <= 3
    assert abs(shares["b"] - 160) <= 3
    assert abs(shares["c"] - 400) <= 3


def test_any_run_of_decisions_is_shared_alike():
    for begin in range(0, 1000, 37):
        shares = Counter(turns(begin, 64))
        assert abs(shares["a"] - 8) <= 2
        assert abs(shares["c"] - 40) <= 3


def test_the_last_place_on_the_circle_belongs_to_somebody():
    assert choose(ask(), snapshot(WORKERS, count=10**15), Random()).node in {"a", "b", "c"}

"""Everybody in turn, whoever is busy."""

from __future__ import annotations

from random import Random

from pdserve.router.policies.round_robin import choose
from pdserve.testing.policy_conformance import ROUTE_REQUEST, state_of, view


def test_each_worker_has_exactly_one_turn_in_a_round():
    workers, last, chosen = [view("a", 7), view("b"), view("c", 3)], "", []
    for _ in range(6):
        last = choose(ROUTE_REQUEST, state_of(workers, last), Random()).node
        chosen.append(last)
    assert chosen == ["a", "b", "c", "a", "b", "c"]

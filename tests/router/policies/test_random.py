"""Everybody gets a turn."""

from __future__ import annotations

from collections import Counter
from random import Random

from pdserve.router.policies.random import choose
from tests.router.policies.support import ask, snapshot, worker


def test_every_worker_is_drawn_whatever_its_load():
    state, random = snapshot([worker("a", 8), worker("b"), worker("c", 3)]), Random(1)
    drawn = Counter(str(choose(ask(), state, random).node) for _ in range(300))
    assert set(drawn) == {"a", "b", "c"}
    assert min(drawn.values()) > 60

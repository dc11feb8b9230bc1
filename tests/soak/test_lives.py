"""What a round of work leaves behind: less than any object of some size for each piece.

Slopes of real processes are `bench/soak.py`'s; here nothing is lost in an allocator's noise.
"""

from __future__ import annotations

from functools import partial

import pytest

from pdserve.frontend.cluster import ClusterBackend
from tests.soak.lives import PLAIN, counted, growth

pytestmark = pytest.mark.slow

MOST = 150
"""Bytes for each request."""


def left_behind(count: int, seed: int) -> tuple[float, str]:
    """By each request, in bytes; and where."""
    with counted(PLAIN, seed) as lives:
        rounds = lives.held_after(4, partial(lives.requests, count))
        assert lives.world.outcomes["completed"] > 0
    least, where = growth(rounds)
    return least / count, where


def test_requests_leave_nothing_behind(seed):
    left, where = left_behind(80, seed)
    assert left < MOST, where


def test_what_is_left_behind_is_seen(seed, monkeypatch):
    """One errand of each request."""
    kept = []
    usual = ClusterBackend.open

    async def keep(*args, **options):
        kept.append(await usual(*args, **options))
        return kept[-1]

    monkeypatch.setattr("pdserve.sim.roles.ClusterBackend.open", keep)
    left, where = left_behind(40, seed)
    assert left > MOST
    assert "frontend/errand.py" in where or "frontend/cluster.py" in where

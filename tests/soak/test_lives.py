"""What a round of work leaves behind: less than any object of some size for each piece.

Slopes of real processes are `bench/soak.py`'s; here nothing is lost in an allocator's noise.
"""

from __future__ import annotations

from functools import partial

import pytest

from pdserve.frontend.dispatch.cluster_client import ClusterClient
from tests.soak.lives import PLAIN, counted, growing, growth
from tests.worlds.roles import NodeSettings

pytestmark = [pytest.mark.slow, pytest.mark.long(one_in=3), pytest.mark.timeout(240)]

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


@pytest.mark.long(one_in=3)
def test_what_is_left_behind_is_seen(seed, monkeypatch):
    """One dispatched request of each request."""
    kept = []
    usual = ClusterClient.open

    async def keep(*args, **options):
        kept.append(await usual(*args, **options))
        return kept[-1]

    monkeypatch.setattr(ClusterClient, "open", keep)
    left, where = left_behind(40, seed)
    assert left > MOST
    assert "frontend/dispatch/" in where


# ---------------------------------------------------------------------- entry by entry

ROUNDS = 5
PAIR = {
    "r0": NodeSettings(),
    "w0": NodeSettings(mode="decode"),
    "w1": NodeSettings(mode="prefill"),
    "f0": NodeSettings(),
}
GUESTS = ["w1", "f1", "r1"]


def kept_by_requests(settings: dict[str, NodeSettings], count: int, seed: int) -> list[str]:
    with counted(settings, seed, traced=False) as lives:
        rounds = lives.sizes_after(ROUNDS, partial(lives.requests, count))
        assert lives.world.outcomes["completed"] > ROUNDS
        return growing(rounds, least=count // 8)


@pytest.mark.parametrize("settings", [PLAIN, PAIR], ids=["served", "handed over"])
def test_no_request_leaves_an_entry_anywhere(settings, seed):
    assert kept_by_requests(settings, 24, seed) == []


@pytest.mark.long(one_in=3)
def test_an_entry_for_each_request_is_seen(seed, monkeypatch):
    usual, kept = ClusterClient.open, []

    async def keep(self, *args, **options):
        dispatched = await usual(self, *args, **options)
        kept.append(dispatched.request.request_id)
        return dispatched

    monkeypatch.setattr(ClusterClient, "kept", kept, raising=False)
    monkeypatch.setattr(ClusterClient, "open", keep)
    found = kept_by_requests(PLAIN, 24, seed)
    assert len(found) == 1
    assert "ClusterClient" in found[0]


def test_no_member_that_comes_and_goes_leaves_an_entry_anywhere(seed):
    settings = PLAIN | dict.fromkeys(GUESTS, NodeSettings())
    with counted(settings, seed, traced=False) as lives:
        rounds = lives.sizes_after(ROUNDS, partial(lives.changes, GUESTS, 9))
        assert growing(rounds, least=3) == []

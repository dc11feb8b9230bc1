"""Lifeguard's formulas at their corners."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.gossip.config import GossipConfig
from pdserve.gossip.suspicion import LocalHealth, Suspicion, floor, remaining, spread
from pdserve.ids import NodeId

CONFIG = GossipConfig()


def test_news_takes_longer_in_a_larger_cluster_and_the_floor_follows():
    times = [spread(CONFIG, n) for n in (1, 10, 100, 1000, 10_000)]
    assert times == sorted(times)
    assert floor(CONFIG, 3) == CONFIG.suspicion_floor
    slow = GossipConfig(gossip_interval=1.0)
    assert floor(slow, 1000) == 2 * spread(slow, 1000) + 1.0 > CONFIG.suspicion_floor


@given(st.integers(0, 9), st.integers(0, 9))
def test_confirmations_only_shorten(heard, wanted):
    now, then = remaining(4, 24, heard, wanted), remaining(4, 24, heard + 1, wanted)
    assert 4 <= then <= now <= 24


def test_the_first_confirmation_counts_most():
    lengths = [remaining(4, 24, heard, 2) for heard in range(4)]
    assert lengths[0] == 24
    assert lengths[2] == lengths[3] == pytest.approx(4)
    assert lengths[0] - lengths[1] > lengths[1] - lengths[2]


def test_where_nobody_else_could_confirm_nobody_is_waited_for():
    assert Suspicion(1, 0, since=10.0).deadline(CONFIG, 2, 0) == 14.0


def test_each_accuser_counts_once_and_only_so_many_matter():
    suspicion = Suspicion(1, 0, since=0.0)
    assert suspicion.confirm(NodeId("a"), False, CONFIG)
    assert not suspicion.confirm(NodeId("a"), False, CONFIG)
    assert suspicion.deadline(CONFIG, 9, 0) == 24.0
    assert suspicion.confirm(NodeId("b"), False, CONFIG)
    assert suspicion.confirm(NodeId("c"), False, CONFIG)
    assert not suspicion.confirm(NodeId("d"), False, CONFIG)
    assert suspicion.deadline(CONFIG, 9, 0) == pytest.approx(4.0)


def test_a_sick_observer_waits_longer():
    suspicion = Suspicion(1, 0, since=0.0)
    assert suspicion.deadline(CONFIG, 2, 3) == 4 * suspicion.deadline(CONFIG, 2, 0)


def test_there_is_no_verdict_while_deaf():
    suspicion = Suspicion(1, 0, since=0.0, not_before=100.0)
    assert suspicion.deadline(CONFIG, 2, 0) == 100.0


def test_two_refusals_suffice_and_one_where_there_are_two_members():
    suspicion = Suspicion(1, 0, since=0.0)
    suspicion.confirm(NodeId("a"), False, CONFIG)
    assert not suspicion.gone(CONFIG, 2)
    assert suspicion.confirm(NodeId("a"), True, CONFIG)
    assert suspicion.gone(CONFIG, 2)
    assert not suspicion.gone(CONFIG, 3)
    suspicion.confirm(NodeId("b"), True, CONFIG)
    assert suspicion.gone(CONFIG, 1000)


def test_health_stays_within_its_bounds():
    health = LocalHealth(3)
    health.better()
    assert health.stretch(2.0) == 2.0
    for _ in range(9):
        health.worse()
    assert health.score == 2
    assert health.stretch(2.0) == 6.0

"""Dialling again: soon at first, never in step, patiently where only a person can help."""

from __future__ import annotations

import random

import pytest

from pdserve.errors import (
    DialFailed,
    DialRefused,
    DialTimeout,
    HandshakeRefused,
    NoCommonVersion,
    WrongCluster,
    WrongClusterKey,
    WrongPeer,
)
from pdserve.net.redial import REDIAL_POLICIES, Redial


class Longest(random.Random):
    """Always draws the upper end."""

    def uniform(self, a: float, b: float) -> float:
        return b


def test_delays_double_to_five_seconds() -> None:
    redial = Redial(Longest())
    delays = [redial.failed(DialRefused("x")) for _ in range(9)]
    assert delays == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0])
    for _ in range(2000):
        assert redial.failed(DialTimeout("x")) == 5.0


def test_jitter_is_full() -> None:
    redial = Redial(random.Random(1))
    for _ in range(10):
        redial.failed(DialRefused("x"))
    drawn = [redial.failed(DialRefused("x")) for _ in range(500)]
    assert min(drawn) < 0.1
    assert max(drawn) > 4.9
    assert 2.2 < sum(drawn) / len(drawn) < 2.8


@pytest.mark.parametrize(
    "error", [WrongClusterKey("x"), WrongCluster("x"), WrongPeer("x"), NoCommonVersion("x")]
)
def test_what_time_does_not_cure_is_tried_rarely(error) -> None:
    redial = Redial(random.Random(2))
    assert all(redial.failed(error) >= 5.0 for _ in range(20))
    redial = Redial(Longest())
    assert [redial.failed(error) for _ in range(6)] == [5.0, 10.0, 20.0, 40.0, 60.0, 60.0]


def test_a_new_cause_starts_its_own_series() -> None:
    redial = Redial(Longest())
    for _ in range(6):
        redial.failed(DialRefused("x"))
    assert redial.failed(WrongClusterKey("x")) == 5.0
    assert redial.failed(HandshakeRefused("busy")) == 0.1


def test_a_healthy_link_starts_over_and_a_flapping_one_does_not() -> None:
    redial = Redial(Longest())
    for _ in range(4):
        redial.failed(DialRefused("x"))
    redial.connected(100.0)
    assert redial.lost(101.0) == pytest.approx(1.6)
    redial.connected(200.0)
    assert redial.lost(231.0) == pytest.approx(0.1)


def test_every_cause_of_a_failed_dial_has_its_pace() -> None:
    def kinds(kind: type[DialFailed]) -> list[type[DialFailed]]:
        return [kind, *(found for below in kind.__subclasses__() for found in kinds(below))]

    assert {kind.cause for kind in kinds(DialFailed)} == REDIAL_POLICIES.keys() - {"lost"}

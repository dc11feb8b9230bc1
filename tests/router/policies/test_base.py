"""Rotation, and which workers are open."""

from __future__ import annotations

from pdserve.ids import NodeId
from pdserve.router.policies.base import after
from pdserve.testing.policy_conformance import view
from tests.router.policies.support import worker

WORKERS = [view("a"), view("c"), view("e")]


def turn(last: str) -> str:
    return after(WORKERS, NodeId(last)).node


def test_the_next_one_has_its_turn_and_the_first_follows_the_last():
    assert [turn(last) for last in "ace"] == ["c", "e", "a"]


def test_one_that_left_still_marks_the_place():
    assert [turn(last) for last in ("", "b", "d", "z")] == ["a", "c", "e", "a"]


def test_a_worker_is_open_with_little_work_and_a_free_sequence():
    busy = worker("a", 7, work=0.3, head=0.3, as_of=10.0)
    assert [busy.is_open(now, 0.1) for now in (10.0, 10.1, 10.25)] == [False, False, True]
    assert not worker("a", 8).is_open(10.0, 0.1)
    assert not worker("a").is_open(10.0, 0.0)  # requests never wait: no worker has to be open

"""Rotation."""

from __future__ import annotations

from pdserve.ids import NodeId
from pdserve.router.policies.base import after
from pdserve.testing.policy_conformance import view

WORKERS = [view("a"), view("c"), view("e")]


def turn(last: str) -> str:
    return after(WORKERS, NodeId(last)).node


def test_the_next_one_has_its_turn_and_the_first_follows_the_last():
    assert [turn(last) for last in "ace"] == ["c", "e", "a"]


def test_one_that_left_still_marks_the_place():
    assert [turn(last) for last in ("", "b", "d", "z")] == ["a", "c", "e", "a"]

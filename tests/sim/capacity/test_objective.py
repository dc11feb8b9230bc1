"""Which requests keep an objective, and when it is certainly missed."""

from __future__ import annotations

import pytest

from pdserve.sim.capacity.objective import Objective, SloLimit, SloTally
from pdserve.sim.replay.record import ReplayRecord


def record(ttft: float, itl: float = 0.01, outcome: str = "completed") -> ReplayRecord:
    made = ReplayRecord(number=0, arrival=1.0, prompt_tokens=100, wanted_tokens=11)
    made.first, made.output_tokens, made.outcome = 1.0 + ttft, 11, outcome
    made.end = made.first + 10 * itl
    return made


def idle(length: int) -> float:
    return length / 100


BOTH = Objective(ttft=SloLimit(0.5), itl=SloLimit(0.05), good=0.9)


@pytest.mark.parametrize(
    ("one", "missed"),
    [
        (record(0.4), set()),
        (record(0.6), {"ttft"}),
        (record(0.4, 0.06), {"itl"}),
        (record(0.4, outcome="rejected"), {"ttft", "itl"}),
    ],
)
def test_a_request_misses_limits(one: ReplayRecord, missed: set[str]) -> None:
    assert BOTH.misses(one, idle) == missed


def test_a_long_prompt_may_take_longer() -> None:
    assert Objective(ttft=SloLimit(0.5), cold=2).misses(record(2.4), idle) == set()
    assert Objective(ttft=SloLimit(0.5), cold=2).misses(record(2.6), idle) == {"ttft"}


def test_limits_without_a_share_are_kept_together() -> None:
    assert [part.names for part in BOTH.parts] == [("ttft", "itl")]
    tally = SloTally(BOTH, 20)
    tally.count(frozenset({"ttft"}))
    tally.count(frozenset({"itl", "ttft"}))
    assert not tally.lost, "2 of 20 may miss"
    tally.count(frozenset({"itl"}))
    assert tally.lost
    assert (tally.ended, tally.missed) == (3, {"ttft": 2, "itl": 2})


def test_a_limit_with_a_share_counts_alone() -> None:
    objective = Objective(ttft=SloLimit(0.5, 0.5), itl=SloLimit(0.05), good=1.0)
    tally = SloTally(objective, 4)
    for _ in range(2):
        tally.count(frozenset({"ttft"}))
    assert not tally.lost
    tally.count(frozenset({"itl"}))
    assert tally.lost


@pytest.mark.parametrize("share", [0.9, 0.99, 0.7, 1.0])
def test_shares_are_exact(share: float) -> None:
    [part] = Objective(ttft=SloLimit(1.0), good=share).parts
    assert part.allowed(1000) == round((1 - share) * 1000)

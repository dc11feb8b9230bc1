"""Which traces are kept, and how many."""

from __future__ import annotations

import random
from typing import Any

import pytest
from msgspec.structs import replace

from pdserve.tracing.keep import Allowance, RequestFacts, tail_reasons

USUAL = RequestFacts(ttft=0.5, itl=0.02, slo_ttft=1.0, slo_itl=0.05, attempts=1)


def test_a_usual_request_is_not_kept() -> None:
    assert tail_reasons(USUAL) == ()
    assert tail_reasons(RequestFacts()) == ()


@pytest.mark.parametrize(
    ("change", "reasons"),
    [
        ({"failed": True}, ("error",)),
        ({"ttft": 1.0}, ()),
        ({"ttft": 1.01}, ("slo_ttft",)),
        ({"ttft": None}, ()),
        ({"ttft": 99.0, "slo_ttft": None}, ()),
        ({"itl": 0.06}, ("slo_itl",)),
        ({"itl": 0.06, "slo_itl": None}, ()),
        ({"moves": 1}, ("moved",)),
        ({"preemptions": 2}, ("preempted",)),
        ({"attempts": 2}, ("retried",)),
        ({"prefill_failed": True}, ("prefill_failed",)),
        ({"failed": True, "moves": 1, "attempts": 3}, ("error", "moved", "retried")),
    ],
)
def test_each_rule_is_a_reason(change: dict[str, Any], reasons: tuple[str, ...]) -> None:
    assert tail_reasons(replace(USUAL, **change)) == reasons


def test_an_allowance_is_a_burst_of_one_second_and_then_a_rate() -> None:
    bucket = Allowance(5.0)
    assert sum(bucket.take(10.0) for _ in range(20)) == 5
    assert bucket.refused == 15
    assert sum(bucket.take(10.5) for _ in range(20)) == 2
    assert sum(bucket.take(1000.0) for _ in range(20)) == 5


def test_a_slow_rate_gives_one_at_a_time() -> None:
    bucket = Allowance(0.1)
    assert [bucket.take(at) for at in (0.0, 5.0, 10.0, 11.0, 20.0)] == [1, 0, 1, 0, 1]


def test_no_rate_gives_nothing() -> None:
    assert not Allowance(0.0).take(1.0)


def test_a_clock_that_goes_back_gives_nothing_away() -> None:
    bucket = Allowance(1.0)
    assert [bucket.take(at) for at in (100.0, 50.0, 100.0, 100.5, 101.0)] == [1, 0, 0, 0, 1]


def test_over_any_time_no_more_than_the_rate_is_given(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(50):
        rate = draw.choice((0.5, 1.0, 20.0, 50.0))
        bucket, now, given = Allowance(rate), 0.0, []
        for _ in range(300):
            now += draw.expovariate(3 * rate)
            if bucket.take(now):
                given.append(now)
        for first in range(0, len(given), 7):
            last = given[-1]
            count = len(given) - first
            assert count <= max(1.0, rate) + rate * (last - given[first]) + 1e-6

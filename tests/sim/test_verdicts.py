"""What a planner in a replay hears of objectives that were kept and missed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pdserve.sim.replay.config import ReplaySlo
from pdserve.sim.replay.metrics import meets_slo
from pdserve.sim.replay.record import ReplayRecord
from pdserve.sim.verdicts import ReplayJudge, Verdicts

SLO = ReplaySlo(ttft=1.0, cold=2.0, itl=0.05)
GOOD = ReplayRecord(
    number=1,
    arrival=10.0,
    prompt_tokens=1000,
    wanted_tokens=11,
    worker="w",
    routed=10.1,
    first=10.5,
    last=10.9,
    end=10.9,
    output_tokens=11,
    queue_seconds=0.1,
    prefill_seconds=0.2,
    outcome="completed",
)


def alone(tokens: int) -> float:
    return tokens / 10_000


def judged(slo: ReplaySlo = SLO, **changes: Any) -> Verdicts:
    return ReplayJudge(slo, alone)(replace(GOOD, **changes))


def both(cause: str) -> Verdicts:
    return tuple((name, cause) for name in ("ttft", "itl", "both"))


def test_a_request_keeps_its_objectives() -> None:
    assert judged() == both("")


@pytest.mark.parametrize(
    ("cause", "parts"),
    [
        ("held", {"held": 2.0}),
        ("queue", {"queue_seconds": 2.0}),
        ("prefill", {"prefill_seconds": 2.0}),
        ("handoff", {"prefill_seconds": 2.0, "prefill": "remote"}),
        ("moved", {"prefill_seconds": 0.3}),
    ],
)
def test_a_late_first_token_has_the_cause_that_took_longest(
    cause: str, parts: dict[str, object]
) -> None:
    late: dict[str, Any] = {"first": 12.6, "last": 13.0, "end": 13.0} | parts
    assert judged(**late) == (("ttft", cause), ("itl", ""), ("both", cause))


def test_a_long_prompt_may_take_longer() -> None:
    late: dict[str, Any] = {"first": 12.6, "last": 13.0, "end": 13.0, "prefill_seconds": 2.0}
    assert judged(**late, prompt_tokens=20_000) == both("")


def test_slow_tokens_are_for_want_of_decoding() -> None:
    slow: dict[str, Any] = {"last": 12.5, "end": 12.5}
    assert judged(**slow) == (("ttft", ""), ("itl", "decode"), ("both", "decode"))
    assert judged(replace(SLO, itl=0.0), **slow) == (("ttft", ""), ("both", ""))


@pytest.mark.parametrize("outcome", ["lost", "failed", "no worker"])
def test_what_fails_is_missed(outcome: str) -> None:
    assert judged(outcome=outcome) == both("error")


@pytest.mark.parametrize("outcome", ["rejected", "deadline"])
def test_what_found_no_worker_waited_for_one(outcome: str) -> None:
    assert judged(outcome=outcome, worker="") == both("held")
    assert judged(outcome=outcome) == both("error")


def test_what_its_client_ended_says_nothing() -> None:
    assert judged(outcome="cancelled") == ()


def test_summaries_agree() -> None:
    for first in (10.5, 11.1, 11.3, 12.0):
        for end in (first + 0.4, first + 0.6):
            one = replace(GOOD, first=first, last=end, end=end)
            told = dict(ReplayJudge(SLO, alone)(one))
            assert (not told["both"]) == meets_slo(one, SLO, alone), (first, end)

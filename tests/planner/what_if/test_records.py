"""What-if records refuse what cannot be meant, and add up."""

from __future__ import annotations

from math import inf, nan

import pytest

from pdserve.errors import ConfigError
from pdserve.observe.slo import CAUSES as OBSERVED
from pdserve.planner.what_if.records import (
    CAUSES,
    CandidatePool,
    CandidateWorker,
    LatencyObjective,
    Outcome,
)


@pytest.mark.parametrize("value", [-0.1, inf, nan])
@pytest.mark.parametrize("name", ["ttft", "itl", "idle_factor"])
def test_impossible_limits_are_refused(name: str, value: float):
    with pytest.raises(ConfigError, match=f"objective's {name}"):
        LatencyObjective(**{name: value}).validate()


def test_a_pool_has_counts_and_a_cost():
    pool = CandidatePool(
        "two kinds",
        (
            CandidateWorker(mode="prefill", price=2.0),
            CandidateWorker(mode="decode"),
            CandidateWorker(mode="decode", price=0.5),
        ),
    )
    assert pool.count() == {"prefill": 1, "decode": 2}
    assert pool.cost == 3.5


def test_the_most_frequent_cause_is_the_cause():
    numbers = {"requests": 1, "unreachable": 0.0, "miss": 0.0, "miss_ttft": 0.0}
    one = Outcome(
        pool=CandidatePool("p", ()),
        miss_itl=0.0,
        spread=0.0,
        causes={"queue": 0.1, "decode": 0.2},
        **numbers,  # type: ignore[arg-type]
    )
    assert one.cause == "decode"


def test_causes_that_both_know_have_one_name():
    assert set(CAUSES) - set(OBSERVED) == {"decode_admission"}

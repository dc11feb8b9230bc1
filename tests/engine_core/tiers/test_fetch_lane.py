"""How fast fetches from other workers are: what counts, and what does not."""

from __future__ import annotations

import pytest

from pdserve.engine_core.tiers.fetch_lane import FetchLane
from pdserve.kv.tiers.lanes import ASSUMED

MB = 1_000_000


def test_nothing_is_known_before_the_first_fetch():
    lane = FetchLane(MB)
    assert lane.load().bandwidth == 0.0
    assert lane.estimate() == ASSUMED["fetch"]


def test_a_fetch_that_brings_all_says_how_fast():
    lane = FetchLane(MB)
    lane.begin(1, 100, 10.0)
    assert lane.load().backlog == 100 * MB
    lane.end(1, 100, "", 10.1)
    assert lane.load().backlog == 0
    assert lane.load().bandwidth == pytest.approx(1e9)


def test_one_that_is_late_makes_the_next_one_look_longer():
    """Until it is sooner to compute, a slow network would be tried again."""
    lane, times = FetchLane(MB), []
    for number in range(5):
        predicted = lane.estimate().seconds(100 * MB)
        times.append(predicted)
        lane.begin(number, 100, 10.0 * number)
        lane.end(number, 0, "deadline", 10.0 * number + 1.5 * predicted + 0.02)
    assert times == sorted(times)
    assert times[-1] > 2 * times[0]


@pytest.mark.parametrize("error", ["absent", "busy", "cancelled", "gone", "corrupt"])
def test_one_that_fails_otherwise_says_nothing(error: str):
    lane = FetchLane(MB)
    lane.begin(1, 100, 0.0)
    lane.end(1, 40, error, 0.001)
    assert lane.load().backlog == 0
    assert lane.load().bandwidth == 0.0


def test_an_end_counts_once():
    lane = FetchLane(MB)
    lane.begin(1, 100, 0.0)
    lane.end(1, 0, "cancelled", 0.1)
    lane.end(1, 100, "", 0.2)
    lane.end(7, 100, "", 0.2)
    assert (lane.load().backlog, lane.load().bandwidth) == (0, 0.0)

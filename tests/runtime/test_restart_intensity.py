"""Never more restarts in a window than allowed, never a longer pause than the cap."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from pdserve.runtime.restart_intensity import Backoff, RestartIntensity, RestartLimits

GAPS = st.lists(st.floats(0, 20, allow_nan=False), max_size=60)


def test_a_window_slides() -> None:
    intensity = RestartIntensity(RestartLimits(most=2, within=10.0))
    assert intensity.allows(0.0)
    assert intensity.allows(4.0)
    assert not intensity.allows(9.9)
    assert intensity.allows(10.0)
    assert not intensity.allows(13.9)
    assert intensity.allows(14.0)


def test_none_may_be_allowed() -> None:
    assert not RestartIntensity(RestartLimits(most=0)).allows(0.0)


def test_pauses_double_to_the_cap_and_start_over() -> None:
    restarts = RestartLimits(first=0.1, cap=1.0, jitter=0.0, within=30.0)
    backoff = Backoff(restarts, random.Random(0))
    assert [backoff.failed(float(second)) for second in range(5)] == [0.1, 0.2, 0.4, 0.8, 1.0]
    assert backoff.failed(33.9) == 1.0
    assert backoff.failed(63.9) == 0.1


@given(gaps=GAPS, most=st.integers(0, 5), within=st.floats(0.1, 50))
def test_no_window_holds_more_than_allowed(gaps, most, within) -> None:
    intensity = RestartIntensity(RestartLimits(most=most, within=within))
    now = 0.0
    allowed: list[float] = []
    for gap in gaps:
        now += gap
        recent = [then for then in allowed if now - then < within]
        assert intensity.allows(now) is (len(recent) < most)
        if len(recent) < most:
            allowed.append(now)


@given(gaps=GAPS, seed=st.integers(0, 2**32), jitter=st.floats(0, 1))
def test_pauses_stay_between_their_bounds(gaps, seed, jitter) -> None:
    restarts = RestartLimits(jitter=jitter)
    backoff = Backoff(restarts, random.Random(seed))
    plain = Backoff(RestartLimits(jitter=0.0), random.Random(seed))
    now = 0.0
    for gap in gaps:
        now += gap
        most, pause = plain.failed(now), backoff.failed(now)
        assert most * (1 - jitter) <= pause <= most <= restarts.cap


def test_a_thousand_failures_are_no_overflow() -> None:
    backoff = Backoff(RestartLimits(jitter=0.0), random.Random(0))
    assert max(backoff.failed(0.0) for _ in range(2000)) == 10.0

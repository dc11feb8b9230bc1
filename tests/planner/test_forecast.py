"""What a forecast says of known series, and that it is sound for any series."""

from __future__ import annotations

from math import inf, nan, pi, sin
from random import Random
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.planner.forecast import BUCKET, Forecast, Quantiles

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

DAY = 86_400.0
WEEK = 7 * DAY


def fed(values: Iterable[float], begin: float = 0.0, every: float = BUCKET) -> Forecast:
    forecast = Forecast()
    for number, value in enumerate(values):
        forecast.observe(begin + number * every, value)
    return forecast


def at(forecast: Forecast, horizon: float) -> Quantiles:
    found = forecast.at(horizon)
    assert found is not None
    return found


def test_nothing_observed_is_no_forecast():
    assert Forecast().at(60) is None


@pytest.mark.parametrize("value", [0.0, 0.25, 1e9])
def test_a_constant_stays(value: float):
    quantiles = at(fed([value] * 100), 60)
    assert quantiles.p50 == quantiles.p90 == quantiles.p95 == pytest.approx(value)


def test_no_arrivals_are_data():
    quantiles = at(fed([5.0] * 100 + [0.0] * 100), 60)
    assert quantiles.mean == pytest.approx(0.0, abs=0.05)
    assert quantiles.p90 < 0.5


def test_a_step_is_followed_within_two_buckets_at_a_short_horizon():
    quantiles = at(fed([1.0] * 100 + [4.0] * 2), 5)
    assert quantiles.parts["last"] == 4.0
    assert at(fed([1.0] * 100 + [4.0] * 24), 60).p50 == pytest.approx(4.0, rel=0.25)


def test_a_ramp_is_seen_ahead():
    values = [0.1 * number for number in range(400)]
    quantiles = at(fed(values), 60)
    assert quantiles.weights["trend"] > 0.5
    assert quantiles.weights["trend"] > quantiles.weights["ewma"]
    assert quantiles.mean == pytest.approx(values[-1] + 0.1 * 12, rel=0.02)


def test_a_damped_trend_does_not_go_on_for_ever():
    forecast = fed([0.1 * number for number in range(100)])
    trend = [at(forecast, horizon).parts["trend"] for horizon in (300, 3_000, 30_000)]
    assert trend[1] > trend[0]
    assert trend[2] == pytest.approx(trend[1], rel=0.01)


def _of_day(time: float) -> float:
    return 10 + 8 * sin(2 * pi * time / DAY)


def test_the_second_day_is_known_from_the_first():
    forecast = Forecast()
    for minute in range(2 * 1440):
        forecast.observe(60.0 * minute, _of_day(60.0 * minute))
    quantiles = at(forecast, 1_800)
    then = _of_day(60.0 * 2879 + 1_800)
    assert quantiles.parts["day"] == pytest.approx(then, rel=0.05)
    assert "week" not in quantiles.parts
    assert abs(quantiles.p50 - then) < abs(quantiles.parts["last"] - then)


def test_the_second_week_is_known_from_the_first():
    """Weekends have no load, which the day before does not tell."""
    forecast = Forecast()

    def load(time: float) -> float:
        return 0.0 if (time % WEEK) >= 5 * DAY else 3.0

    minutes = 0.0
    while minutes < WEEK + 5 * DAY - 300:
        forecast.observe(minutes, load(minutes))
        minutes += 60.0
    quantiles = at(forecast, 600)
    assert quantiles.parts["week"] == 0.0
    assert quantiles.parts["day"] == 3.0


def test_the_week_begins_where_the_clock_says():
    forecast = Forecast(week_phase=lambda at: at + DAY)
    shifted = Forecast()
    for number in range(400):
        time = number * 300.0
        forecast.observe(time, float(number))
        shifted.observe(time + DAY, float(number))
    assert at(forecast, 300).parts == at(shifted, 300).parts


def test_a_gap_is_not_zero():
    forecast = fed([5.0] * 100)
    forecast.observe(100 * BUCKET + 3_600, 5.0)
    quantiles = at(forecast, 60)
    assert quantiles.mean == pytest.approx(5.0)
    assert quantiles.p50 == pytest.approx(5.0)


def test_after_a_gap_the_present_counts_and_not_the_past():
    forecast = fed([5.0] * 100)
    forecast.observe(100 * BUCKET + 3_600, 1.0)
    parts = at(forecast, 60).parts
    assert set(parts) == {"last", "ewma", "trend"}
    assert set(parts.values()) == {1.0}


def test_slots_that_were_missed_are_not_the_week_before():
    forecast = Forecast()
    forecast.observe(0.0, 7.0)
    forecast.observe(300.0, 7.0)
    forecast.observe(DAY, 1.0)
    assert at(forecast, 0).parts["day"] == 7.0
    forecast.observe(8 * DAY, 1.0)
    forecast.observe(8 * DAY + 600, 1.0)
    assert "day" not in at(forecast, 0).parts
    assert "week" not in at(forecast, 0).parts


def test_values_within_a_bucket_are_averaged():
    forecast = fed([0.0, 2.0] * 100, every=1.0)
    assert at(forecast, 5).parts["last"] == pytest.approx(1.0, abs=0.3)


def test_a_timer_that_is_early_ends_its_bucket():
    forecast = Forecast()
    for number in range(10):
        forecast.observe(number * BUCKET - (0.3 if number else 0.0), float(number))
    assert at(forecast, 5).parts["last"] == 9.0


@pytest.mark.parametrize("value", [-1.0, nan, inf])
def test_impossible_values_are_refused(value: float):
    with pytest.raises(ValueError, match="must be a number"):
        Forecast().observe(0.0, value)


def test_time_does_not_go_back():
    forecast = fed([1.0] * 3)
    with pytest.raises(ValueError, match="before the last"):
        forecast.observe(1.0, 1.0)
    with pytest.raises(ValueError, match="not in the future"):
        forecast.at(-1.0)


def test_weights_and_errors_show_why():
    quantiles = at(fed([1.0, 3.0] * 200), 5)
    assert sum(quantiles.weights.values()) == pytest.approx(1.0)
    assert set(quantiles.weights) == set(quantiles.parts)
    assert quantiles.errors["last"] == pytest.approx(2.0)
    assert quantiles.weights["ewma"] > quantiles.weights["last"]
    assert quantiles.samples == 200


def _noisy(random: Random, number: int) -> float:
    return max(0.0, random.gauss(10, 2))


def _bursty(random: Random, number: int) -> float:
    return sum(random.expovariate(1.0) for _ in range(random.choice((0, 1, 2, 8))))


def _wave(random: Random, number: int) -> float:
    return max(0.0, 10 + 6 * sin(number / 150) + random.gauss(0, 1))


@pytest.mark.parametrize("load", [_noisy, _bursty, _wave])
@pytest.mark.parametrize("steps", [1, 12, 60])
def test_nine_of_ten_are_below_p90(load: Callable[[Random, int], float], steps: int):
    random, forecast = Random(f"{load.__name__} {steps}"), Forecast()
    expected: list[float] = []
    below: list[bool] = []
    for number in range(3_500):
        value = load(random, number)
        if number >= 1_000:
            below.append(value <= expected[number - steps])
        forecast.observe(number * BUCKET, value)
        expected.append(at(forecast, steps * BUCKET).p90)
    assert sum(below) / len(below) == pytest.approx(0.9, abs=0.035)


series = st.lists(
    st.one_of(st.just(0.0), st.floats(0, 1e6, allow_subnormal=False)), min_size=1, max_size=80
)


@settings(max_examples=60, deadline=None)
@given(series, st.floats(0, 1e4), st.floats(0.1, 400))
def test_quantiles_are_ordered_and_never_negative(
    values: list[float], horizon: float, every: float
):
    quantiles = at(fed(values, every=every), horizon)
    assert 0 <= quantiles.p50 <= quantiles.p90 <= quantiles.p95 < inf
    assert min(quantiles.parts.values()) >= 0
    assert sum(quantiles.weights.values()) == pytest.approx(1.0)


@settings(max_examples=60, deadline=None)
@given(series, st.sampled_from([2.0**-10, 2.0**-1, 2.0, 2.0**12]))
def test_the_unit_does_not_matter(values: list[float], factor: float):
    one = at(fed(values), 60)
    other = at(fed([value * factor for value in values]), 60)
    for name in ("p50", "p90", "p95", "mean"):
        assert getattr(other, name) == pytest.approx(getattr(one, name) * factor, rel=1e-9)


def test_a_step_that_was_told_does_not_widen_what_comes_after_it():
    """From 0.4 to 3.4: eight times more than forecast. Learnt as an error, it would make the p90 of
    a load that stands still more than twice that load."""

    def after_a_step(told: bool) -> float:
        forecast, at = Forecast(), 0.0
        for number in range(240):
            value = 0.4 if number < 120 else 3.4
            if told and number in range(120, 127):
                forecast.shifted()
            forecast.observe(at, value)
            at += BUCKET
        found = forecast.at(125.0)
        assert found is not None
        return found.p90

    assert after_a_step(told=True) == pytest.approx(3.4, rel=0.1)
    assert after_a_step(told=False) > 5.0


def _trend_after_a_step(told: bool) -> float:
    forecast = Forecast()
    for number in range(106):
        if told and number >= 101:
            forecast.shifted()
        forecast.observe(number * BUCKET, 1.0 if number < 100 else 4.0)
    return at(forecast, 125.0).parts["trend"]


def test_a_step_that_was_told_is_no_slope():
    """Holt's method sees a slope in it, and continues it beyond the load that is there."""
    assert _trend_after_a_step(told=True) == pytest.approx(4.0)
    assert _trend_after_a_step(told=False) > 5.0


def test_a_trend_leads_to_at_most_twice_the_highest_of_the_last_minutes():
    """From 1 to 2 in half a minute: the slope alone would lead to 4.4."""
    forecast = fed([1.0] * 60 + [2.0] * 6)
    assert at(forecast, 3000.0).parts["trend"] == pytest.approx(4.0)
    assert at(forecast, 5.0).parts["trend"] < 2.0

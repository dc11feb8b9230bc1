"""Quantiles, probabilities, and when a model is called poor."""

from __future__ import annotations

from random import Random

import pytest

from pdserve.perf_model.prediction_error import ErrorTracker, RatioWindow, bucket_of


@pytest.mark.parametrize(
    ("uncached", "sequences", "bucket"),
    [(0, 0, (0, 0)), (255, 1, (0, 1)), (256, 3, (256, 1)), (70_000, 500, (65536, 64))],
)
def test_buckets_are_named_by_their_lower_bounds(
    uncached: int, sequences: int, bucket: tuple[int, int]
):
    assert bucket_of(uncached, sequences) == bucket


def test_ratios_keep_the_last_and_stay_sorted():
    random, ratios, all = Random(1), RatioWindow(size=7), []
    for _ in range(100):
        all.append(random.choice((0.5, 1.0, random.random())))
        ratios.add(all[-1])
        last = sorted(all[-7:])
        assert len(ratios) == len(last)
        assert ratios.quantile(0.5) == last[len(last) // 2]
        assert ratios.quantile(1.0) == last[-1]


def test_a_probability_is_a_share_and_never_certain():
    ratios = RatioWindow()
    for k in range(1, 9):
        ratios.add(k / 4)
    assert [ratios.within(limit) for limit in (0.0, 1.0, 9.0)] == [0.1, 0.5, 0.9]


def test_a_summary_counts_each_error_as_one_at_most():
    ratios = RatioWindow()
    for ratio in (1.0, 0.001, 2.0):
        ratios.add(ratio)
    assert ratios.summary().error == pytest.approx((0 + 1 + 0.5) / 3)
    assert RatioWindow().summary().count == 0


def fed(error: ErrorTracker, start: float, seconds: int, predicted: float) -> ErrorTracker:
    for second in range(seconds):
        error.add(start + second, predicted, 1.0)
    return error


def test_poor_takes_a_large_error_for_long():
    error = ErrorTracker(limit=0.4, patience=60.0, size=20, least=10)
    fed(error, 0, 69, predicted=2.0)
    assert not error.poor
    assert fed(error, 69, 3, predicted=2.0).poor


def test_good_again_takes_a_clearly_smaller_one():
    error = fed(ErrorTracker(limit=0.4, patience=60.0, size=20, least=10), 0, 100, predicted=2.0)
    assert fed(error, 100, 40, predicted=1.35).poor
    assert not fed(error, 140, 40, predicted=1.2).poor


def test_a_pause_in_being_wrong_starts_anew():
    error = ErrorTracker(limit=0.4, patience=60.0, size=10, least=5)
    for start in range(0, 200, 50):
        fed(error, start, 35, predicted=2.0)
        fed(error, start + 35, 15, predicted=1.0)
    assert not error.poor


def test_small_things_do_not_make_it_poor():
    """Of work that hardly takes time, nothing need be known."""
    error = ErrorTracker(limit=0.4, patience=10.0)
    for second in range(300):
        error.add(second, 0.01, 0.001)
        error.add(second, 1.0, 1.0)
    assert not error.poor

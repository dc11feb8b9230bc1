import pytest

from pdserve.router.drain_rate import DrainRate


def test_what_is_assumed_holds_until_something_is_seen():
    pace = DrainRate(10.0)
    assert pace.rate(10.0, 4.0) == 4.0


def test_it_follows_what_is_seen():
    pace = DrainRate(0.0)
    for step in range(1, 101):
        pace.began(0.1 * step, 0.05)
    assert pace.rate(10.0, 4.0) == pytest.approx(0.5, rel=0.1)
    for step in range(101, 201):
        pace.began(0.1 * step, 0.2)
    assert pace.rate(20.0, 4.0) == pytest.approx(2.0, rel=0.1)


def test_a_queue_that_stands_still_becomes_slower():
    pace = DrainRate(0.0)
    pace.began(1.0, 4.0)
    rates = [pace.rate(1.0 + passed, 4.0) for passed in (0.0, 1.0, 5.0, 50.0)]
    assert rates == sorted(rates, reverse=True)
    assert 0.0 < rates[-1] <= 0.2


def test_a_clock_that_goes_back_does_no_harm():
    pace = DrainRate(10.0)
    pace.began(9.0, 1.0)
    assert pace.rate(8.0, 1.0) > 0.0


def test_seconds_in_which_nothing_is_begun_are_not_taken_for_minutes():
    """With 1.8 s of work ahead and three workers, 8 s of silence were a wait of 143 s once."""
    rate = DrainRate(0.0)
    for number in range(10):
        rate.began(number * 0.1, 0.3)
    assert 1.8 / rate.rate(9.0, assumed=3.0) < 15.0

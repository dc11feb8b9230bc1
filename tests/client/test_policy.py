"""When it is tried again."""

from __future__ import annotations

from random import Random

import pytest

from pdserve.client import ConnectionFailed, Retries, Timeout
from pdserve.client.errors import api_error
from pdserve.client.policy import retry_after_of


def test_pauses_double_up_to_the_most_and_are_drawn_from_all_of_it():
    retries = Retries(attempts=10, first=1.0, most=5.0)
    error, random = ConnectionFailed("x"), Random(3)
    for attempt, most in ((1, 1.0), (2, 2.0), (3, 4.0), (4, 5.0), (9, 5.0)):
        pauses = [retries.pause(attempt, error, random) for _ in range(300)]
        assert all(pause is not None and 0 <= pause <= most for pause in pauses)
        assert min(p for p in pauses if p is not None) < 0.1 * most
        assert max(p for p in pauses if p is not None) > 0.9 * most
    assert retries.pause(10, error, random) is None


def test_the_servers_word_goes_before_the_dice():
    error = api_error(503, b"", retry_after=7.0)
    assert Retries().pause(1, error, Random(0)) == 7.0
    assert Retries(most=6.9).pause(1, error, Random(0)) is None


@pytest.mark.parametrize(
    "error", [api_error(400, b""), api_error(500, b""), api_error(504, b""), Timeout("first", "x")]
)
def test_what_no_second_attempt_can_help(error):
    assert Retries().pause(1, error, Random(0)) is None


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (None, None),
        ("3", 3.0),
        ("0.5", 0.5),
        ("-1", 0.0),
        ("nan", None),
        ("inf", None),
        ("soon", None),
        ("Thu, 01 Jan 1970 00:01:40 GMT", 60.0),
        ("Thu, 01 Jan 1970 00:00:10 GMT", 0.0),
    ],
)
def test_seconds_and_dates(value, seconds):
    assert retry_after_of(value, now=40.0) == seconds

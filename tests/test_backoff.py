"""Delays double up to the most, and never overflow."""

from __future__ import annotations

import pytest

from pdserve.backoff import backoff_delay


def test_delays_double_to_the_most() -> None:
    delays = [backoff_delay(0.1, 5.0, failures) for failures in range(8)]
    assert delays == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0])


def test_a_first_delay_above_the_most_is_cut() -> None:
    assert backoff_delay(10.0, 5.0, 0) == 5.0


@pytest.mark.parametrize("failures", [64, 1100, 10**9])
def test_many_failures_are_no_overflow(failures: int) -> None:
    assert backoff_delay(1e-6, 60.0, failures) == 60.0

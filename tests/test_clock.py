"""Moments that timers share."""

from __future__ import annotations

import pytest

from pdserve.clock import until_next


@pytest.mark.parametrize(
    ("now", "period", "wait"),
    [(0.0, 1.0, 1.0), (10.25, 1.0, 0.75), (10.25, 0.5, 0.25), (7.3, 0.25, 0.2)],
)
def test_the_next_multiple_is_waited_for(now: float, period: float, wait: float) -> None:
    assert until_next(now, period) == pytest.approx(wait)


def test_a_timer_that_comes_early_does_not_fire_twice() -> None:
    assert until_next(9.999, 1.0) == pytest.approx(1.001)

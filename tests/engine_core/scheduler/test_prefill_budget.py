"""How many prompt tokens a step takes, by what steps took before."""

from __future__ import annotations

import pytest

from pdserve.engine_core.scheduler.prefill_budget import TARGET_STEP_SECONDS, PrefillBudget


def settle(pace: PrefillBudget, speed: float, steps: int = 40) -> list[float]:
    """Seconds of full steps at so many tokens per second."""
    took = []
    for _ in range(steps):
        took.append(pace.tokens / speed)
        pace.note(pace.tokens, took[-1])
    return took


def test_a_fast_device_takes_all_it_may_from_the_first_step():
    pace = PrefillBudget(2048, slow=False)
    settle(pace, 50_000.0)
    assert pace.tokens == 2048


@pytest.mark.parametrize("speed", [150.0, 400.0, 1000.0, 3000.0])
def test_steps_of_a_slow_device_come_to_stay_below_the_target(speed: float):
    pace = PrefillBudget(2048, slow=True)
    took = settle(pace, speed)
    assert max(took[1:]) <= 1.01 * TARGET_STEP_SECONDS
    assert took[-1] >= 0.5 * TARGET_STEP_SECONDS or pace.tokens == 2048


def test_a_slow_device_that_is_not_slow_soon_takes_all():
    pace = PrefillBudget(2048, slow=True)
    settle(pace, 100_000.0, steps=3)
    assert pace.tokens == 2048


def test_one_long_step_is_made_up_for():
    pace = PrefillBudget(2048, slow=False)
    pace.note(2048, 60.0)
    assert pace.tokens == 64
    settle(pace, 20_000.0, steps=6)
    assert pace.tokens == 2048


def test_steps_that_hardly_prefill_tell_nothing():
    pace = PrefillBudget(2048, slow=False)
    pace.note(8, 5.0)
    assert pace.tokens == 2048


def test_a_small_limit_is_never_exceeded_and_time_may_stand_still():
    pace = PrefillBudget(8, slow=True)
    for took in (0.0, 100.0, 1e-9):
        pace.note(8, took)
        assert pace.tokens == 8

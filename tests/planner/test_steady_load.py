"""How high a load is now, although it varies by chance."""

from __future__ import annotations

from random import Random

import pytest

from pdserve.planner.steady_load import Stretch, beyond_chance, mean_work, running, steady


def newest(stretches: list[Stretch], spread: float) -> Stretch:
    return steady(running(stretches), 0, len(stretches), spread)


def stretches(*rates: float, each: int = 1, unit: float = 0.1, seed: int | None = None):
    """Stretches of 5 s with requests of `unit` seconds; with a seed their number is by chance."""
    random = Random(seed)
    found = []
    for rate in rates:
        for _ in range(each):
            number = 5 * rate
            if seed is not None:
                number = sum(random.random() < rate / 100 for _ in range(500))
            found.append(Stretch(5.0, number, number * unit))
    return found


def test_a_load_that_varies_by_chance_is_taken_as_one(seed: int) -> None:
    whole = stretches(*[4.0] * 60, seed=seed)
    found = [newest(whole[:end], 0.1) for end in range(30, 61)]
    alone = [sum(whole[:end], Stretch(0.0, 0.0, 0.0)) for end in range(30, 61)]
    assert sum(a == b for a, b in zip(found, alone, strict=True)) >= 20


def test_after_a_step_only_what_came_since_counts() -> None:
    found = newest(stretches(*[1.0] * 50, *[4.0] * 10), 0.1)
    assert found.seconds <= 50.0
    assert found.arrivals / found.seconds == pytest.approx(4.0)


def test_longer_prompts_at_the_same_rate_are_a_change() -> None:
    before, after = stretches(4.0, each=50, unit=0.02), stretches(4.0, each=10, unit=0.5)
    found = newest([*before, *after], 0.5)
    assert 45.0 <= found.seconds <= 65.0
    assert found.work / found.seconds == pytest.approx(2.0, rel=0.25)


def test_a_change_after_a_greater_one_is_seen() -> None:
    found = newest(stretches(*[1.0] * 25, *[30.0] * 25, *[15.0] * 6), 0.1)
    assert found.seconds == 30.0


def test_few_stretches_and_none_are_what_they_are() -> None:
    assert newest([], 0.1) == Stretch(0.0, 0.0, 0.0)
    assert newest(stretches(3.0), 0.1) == Stretch(5.0, 15.0, 1.5)


def test_units_that_come_by_chance_differ_by_their_root() -> None:
    """16 of what is usually 9 is 2 standard deviations."""
    assert beyond_chance(16.0, 9.0, 1.0, 1.9)
    assert not beyond_chance(16.0, 9.0, 1.0, 2.1)
    assert not beyond_chance(16.0, 9.0, 4.0, 1.1)
    assert beyond_chance(9.1, 9.0, 0.0, 3.5)  # nothing is known of chance


def test_few_requests_do_not_tell_their_mean_work() -> None:
    assert mean_work(Stretch(5.0, 20.0, 10.0), 0.0) == pytest.approx(2.0)
    assert mean_work(Stretch(5.0, 20.0, 10.0), 0.1) == pytest.approx(4 * 0.18)
    assert mean_work(Stretch(300.0, 8000.0, 4000.0), 0.1) == pytest.approx(13.3, rel=0.01)
    assert mean_work(Stretch(5.0, 0.0, 0.0), 0.1) == 0.0
    assert mean_work(Stretch(0.0, 0.0, 0.0), 0.1) == 0.0

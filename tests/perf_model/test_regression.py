"""The regression: what it finds, what it never says, what it keeps."""

from __future__ import annotations

from random import Random

import pytest

from pdserve.perf_model.regression import RegressionRow, StratifiedWindow, fit_nonnegative

PRIOR = (0.02, 1e-4, 1e-9)
TRUTHS = [
    (0.01, 6e-5, 6e-10),
    (0.0, 1e-5, 3e-10),
    (0.1, 2e-4, 0.0),
    (0.004, 0.0, 2e-9),
]


def rows(
    truth: tuple[float, float, float], count: int, noise: float, seed: int = 1
) -> list[RegressionRow]:
    random = Random(seed)
    found = []
    for _ in range(count):
        length = round(2 ** random.uniform(5, 16))
        cached = random.choice((0, random.randrange(length)))
        row = RegressionRow(length - cached, length * length - cached * cached, 0.0)
        found.append(row._replace(y=row.predicted(truth) * random.lognormvariate(0, noise)))
    return found


@pytest.mark.parametrize("truth", TRUTHS)
def test_it_finds_the_truth_without_noise(truth: tuple[float, float, float]):
    found = fit_nonnegative(rows(truth, 500, 0.0), PRIOR, passes=4)
    for row in rows(truth, 50, 0.0, seed=2):
        assert row.predicted(found) == pytest.approx(row.y, rel=0.1)


@pytest.mark.parametrize("truth", TRUTHS)
@pytest.mark.parametrize("seed", range(5))
def test_noise_of_a_third_leaves_a_tenth(truth: tuple[float, float, float], seed: int):
    found = fit_nonnegative(rows(truth, 1000, 0.3, seed), PRIOR)
    errors = sorted(
        abs(row.predicted(found) / row.y - 1) for row in rows(truth, 100, 0.0, seed + 9)
    )
    assert errors[50] < 0.12
    assert errors[90] < 0.25


def test_no_coefficient_is_negative():
    for seed in range(50):
        random = Random(seed)
        noise = [r._replace(y=random.expovariate(1.0)) for r in rows(PRIOR, 20, 0.0, seed)]
        assert min(fit_nonnegative(noise, PRIOR)) >= 0.0


def test_prompts_of_one_length_leave_the_priors_shape_at_their_scale():
    found = fit_nonnegative([RegressionRow(1000, 1_000_000, 0.5)] * 40, PRIOR)
    assert RegressionRow(1000, 1_000_000, 0.5).predicted(found) == pytest.approx(0.5, rel=0.01)
    assert found[2] / found[1] == pytest.approx(PRIOR[2] / PRIOR[1], rel=0.1)


def test_nothing_seen_is_nothing_learnt():
    assert fit_nonnegative([], PRIOR) == PRIOR


def test_a_few_long_prompts_count_among_many_short_ones():
    """Each class is heard: unstratified, 20 rows in 10,000 of noise would not matter."""
    window, random = StratifiedWindow(), Random(3)
    truth = (0.01, 5e-5, 1e-9)
    for index in range(10_000):
        length = 60_000 if index % 500 == 0 else random.randint(50, 500)
        row = RegressionRow(length, length * length, 0.0)
        y = row.predicted(truth) * random.lognormvariate(0, 0.3)
        window.add(length.bit_length(), row._replace(y=y))
    long = RegressionRow(60_000, 60_000**2, 0.0)
    assert sum(row.x1 == 60_000 for row in window.rows()) == 20
    assert long.predicted(fit_nonnegative(window.rows(), PRIOR)) == pytest.approx(
        long.predicted(truth), rel=0.25
    )


def test_a_window_is_bounded_and_drops_the_quietest_stratum():
    window = StratifiedWindow(depth=3, strata=2)
    for stratum in (1, 1, 1, 1, 2, 1, 3):
        window.add(stratum, RegressionRow(stratum, 0, 1))
    assert [row.x1 for row in window.rows()] == [1, 1, 1, 3]
    assert len(window) == 4


@pytest.mark.parametrize("seed", range(20))
def test_prompts_of_nearly_one_length_leave_a_price_to_each_token(seed: int):
    """Else a cached prefix would be worth nothing."""
    random = Random(seed)
    rows = [
        RegressionRow(length, length * length, 0.007 * random.uniform(0.6, 1.4))
        for length in (random.randint(14, 18) for _ in range(35))
    ]
    base, each, pair = fit_nonnegative(rows, (0.02, 1e-4, 1e-9))
    assert each * 1500 + pair * 1500**2 > 0.002
    assert base + each * 16 == pytest.approx(0.007, rel=0.25)


def test_rows_of_others_count_where_few_are_here():
    here, there = StratifiedWindow(), StratifiedWindow()
    for stratum, count in ((1, 3), (2, 4)):
        for _ in range(count):
            here.add(stratum, RegressionRow(stratum, 0, 1))
    for stratum in (1, 2, 3, 3):
        there.add(stratum, RegressionRow(10 * stratum, 0, 1))
    assert sorted(row.x1 for row in here.rows_with(there, 4)) == [1, 1, 1, 2, 2, 2, 2, 10, 30, 30]
    assert here.has(1)
    assert not here.has(3)

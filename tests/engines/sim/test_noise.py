"""Factors of steps."""

from __future__ import annotations

import statistics

import pytest

from pdserve_engines.sim.noise import StepNoise


def test_noise_has_mean_one_and_repeats():
    noise, twin, other, none = (
        StepNoise(0.3, "1"),
        StepNoise(0.3, "1"),
        StepNoise(0.3, "2"),
        StepNoise(0.0, "1"),
    )
    draws = [noise.of(step) for step in range(4096)]
    assert draws == [twin.of(step) for step in range(4096)]
    assert draws != [other.of(step) for step in range(4096)]
    assert statistics.fmean(draws) == pytest.approx(1.0, abs=0.03)
    assert statistics.stdev(draws) == pytest.approx(0.307, abs=0.03)
    assert noise.of(4096) == noise.of(0)
    assert {none.of(step) for step in range(10)} == {1.0}

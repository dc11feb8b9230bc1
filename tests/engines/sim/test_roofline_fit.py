"""From measured steps to a timing model: with invented measurements, so that the truth is known."""

from __future__ import annotations

import random
from dataclasses import astuple

import pytest

from pdserve.perf_model.step_time import Roofline
from pdserve_engines.sim.roofline_fit import StepSample, errors_of, fit_roofline

TRUE = Roofline(base=2e-3, sequence=1e-4, weights=16 * 5e-5, token=5e-5, pair=3e-8, kv=4e-7)


def samples(seed: int, noise: float = 0.0) -> list[StepSample]:
    rng = random.Random(seed)
    found = []
    for _ in range(80):
        prefill = tuple(
            (rng.choice([0, 200, 900]), rng.choice([20, 100, 500]))
            for _ in range(rng.choice([0, 1, 2]))
        )
        decodes = rng.choice([0, 1, 4, 30]) if prefill else rng.choice([1, 4, 12, 30])
        kv_tokens = decodes * rng.choice([10, 300, 1500])
        seconds = TRUE.step(prefill, decodes, kv_tokens, 1) * rng.lognormvariate(0, noise)
        found.append(StepSample(prefill, decodes, kv_tokens, seconds))
    return found


def test_what_the_form_can_say_is_found_exactly():
    model = fit_roofline(samples(1))
    assert astuple(model) == pytest.approx(astuple(TRUE), rel=1e-6)
    errors = errors_of(model, samples(2))
    assert errors.largest < 1e-6


def test_noise_is_averaged_out():
    model = fit_roofline(samples(1, noise=0.1))
    assert errors_of(model, samples(2)).median < 0.05


def test_no_time_is_negative():
    flat = [StepSample(((0, n),), 0, 0, 1.0 / n) for n in range(10, 30)]
    assert min(astuple(fit_roofline(flat))) >= 0


def test_errors_are_relative_and_keep_their_sign():
    model = Roofline(1.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    errors = errors_of(model, [StepSample((), 1, 0, 2.0), StepSample((), 1, 0, 0.5)])
    assert (errors.median, errors.largest, errors.bias) == (0.75, 1.0, 0.25)


def test_a_handful_of_samples_is_refused():
    with pytest.raises(ValueError, match="too few"):
        fit_roofline(samples(1)[:7])

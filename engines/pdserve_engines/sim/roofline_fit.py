"""Fits a `Roofline` to measured steps. Pure arithmetic.

Errors count relative to the step's time, so that short steps matter as much as long ones.
Coefficients cannot be negative: the most negative one is set to 0 until none is left. The bend of
the roofline (the tokens per step above which compute, not reading weights, takes the time) is
searched over powers of two.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pdserve.perf_model.step_time import Roofline

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from pdserve.ids import Seconds

__all__ = ["FitErrors", "StepSample", "errors_of", "fit_roofline"]

_BENDS = (0, 1, 2, 4, 8, 16, 32, 64, 128)


@dataclass(frozen=True, slots=True)
class StepSample:
    """One kind of step and how long it took."""

    prefill: tuple[tuple[int, int], ...]
    """(tokens before, tokens computed)."""
    decodes: int
    kv_tokens: int
    seconds: Seconds


@dataclass(frozen=True, slots=True)
class FitErrors:
    """Relative errors of a model over samples: predicted / measured - 1."""

    median: float
    """Median of the absolute values; p90 and the largest are of these, too."""
    p90: float
    largest: float
    bias: float
    """Mean, with its sign."""


def fit_roofline(samples: Sequence[StepSample]) -> Roofline:
    """Return the model with the smallest error over the samples. Raises ValueError if there are too
    few."""
    if len(samples) < 8:
        raise ValueError(f"{len(samples)} samples are too few for five coefficients")
    models = [_fit_bent(samples, bend) for bend in _BENDS]
    return min(models, key=lambda model: _loss(model, samples))


def errors_of(model: Roofline, samples: Sequence[StepSample]) -> FitErrors:
    """The errors of a model over the samples."""
    off = [_predict(model, sample) / sample.seconds - 1 for sample in samples]
    ranked = sorted(abs(error) for error in off)
    return FitErrors(
        median=statistics.median(ranked),
        p90=ranked[min(len(ranked) - 1, int(0.9 * len(ranked)))],
        largest=ranked[-1],
        bias=statistics.fmean(off),
    )


def _predict(model: Roofline, sample: StepSample) -> Seconds:
    return model.step(sample.prefill, sample.decodes, sample.kv_tokens, 1)


def _loss(model: Roofline, samples: Sequence[StepSample]) -> float:
    return sum((_predict(model, sample) / sample.seconds - 1) ** 2 for sample in samples)


def _fit_bent(samples: Sequence[StepSample], bend: int) -> Roofline:
    rows = np.array([_features(sample, bend) for sample in samples])
    seconds = np.array([sample.seconds for sample in samples])
    base, sequence, token, pair, kv = _least_squares(rows / seconds[:, None])
    return Roofline(base, sequence, bend * token, token, pair, kv)


def _features(sample: StepSample, bend: int) -> list[float]:
    tokens = sample.decodes + sum(count for _, count in sample.prefill)
    pairs = sum(count * (start + count / 2) for start, count in sample.prefill)
    sequences = sample.decodes + len(sample.prefill)
    return [1.0, sequences, max(tokens, bend), pairs, sample.kv_tokens]


def _least_squares(rows: NDArray[np.float64]) -> list[float]:
    """The non-negative coefficients whose weighted sum over each row is closest to 1."""
    scale = np.abs(rows).max(axis=0)
    scale[scale == 0] = 1.0
    used = list(range(rows.shape[1]))
    while True:
        found, *_ = np.linalg.lstsq(rows[:, used] / scale[used], np.ones(len(rows)), rcond=None)
        if not used or found.min() >= 0:
            break
        del used[int(found.argmin())]
    coefficients = np.zeros(rows.shape[1])
    coefficients[used] = found / scale[used]
    return [float(value) for value in coefficients]

"""Adds noise to the time of simulated steps, as on real machines."""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["StepNoise"]


class StepNoise:
    """Yields a factor for each step, lognormal with mean 1, a function of seed and step number."""

    _TABLE = 4096
    """Number of draws made in advance; they then repeat, so that a step costs one look-up."""

    def __init__(self, sigma: float, seed: str) -> None:
        """`sigma`: standard deviation of the factor's logarithm; 0: no noise."""
        draw = random.Random(f"step noise {seed}").gauss
        shift = -sigma * sigma / 2
        self._factors = (
            [math.exp(draw(shift, sigma)) for _ in range(self._TABLE)] if sigma else [1.0]
        )
        self.of: Callable[[int], float] = self._look_up

    def _look_up(self, step: int) -> float:
        return self._factors[step % len(self._factors)]

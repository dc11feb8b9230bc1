"""Generates the arrival times of an open loop from a rate, a burstiness and a seed. Pure."""

from __future__ import annotations

import itertools
from random import Random
from typing import TYPE_CHECKING

from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pdserve.ids import Seconds

__all__ = ["arrival_times", "parse_burstiness"]


def parse_burstiness(text: str) -> float:
    """Reads the shape of the gamma distribution of gaps: 1 for `poisson`, 0 for `even`, or the
    number in `gamma:SHAPE`; below 1 is burstier than Poisson. Errors: `ConfigError`."""
    if text in ("poisson", "even"):
        return 1.0 if text == "poisson" else 0.0
    kind, _, number = text.partition(":")
    try:
        shape = float(number)
    except ValueError:
        shape = 0.0
    if kind != "gamma" or not 0 < shape < 1e6:
        raise ConfigError(f"--arrivals: {text!r} is not poisson, even or gamma:SHAPE")
    return shape


def arrival_times(rate: float, shape: float, seed: int) -> Iterator[Seconds]:
    """Yields arrival times in seconds since the start, without end. Args: `rate` is per second,
    `shape` as returned by `parse_burstiness`."""
    if not shape:
        yield from (number / rate for number in itertools.count())
    random, at = Random(f"arrivals {seed}"), 0.0
    while True:
        yield at
        at += random.gammavariate(shape, 1 / (rate * shape))

"""Forecasts a load, such as prefill seconds per second, and says how sure it is.

Five simple forecasts are combined. Each weighs the more, the less it was off recently at about the
horizon that is asked for:

    last    the newest value
    ewma    exponentially weighted mean over 30 s
    trend   level and damped trend (Holt's method) over 5 minutes
    day     what was there at this time yesterday, in slots of 5 minutes
    week    the same a week ago

Quantiles are the combined forecast times quantiles of 200 ratios of what came over what was
forecast, at that horizon. Nothing assumes a distribution.

No load is a value, 0. Time without any observation is not: after a gap, the forecast begins anew
from the next value, and remembers days and weeks.

Pure: times are arguments, and only their order and distance matter. `week_phase` alone knows the
time of day. The planner's core owns one for each series.
"""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import dataclass
from math import ceil, exp, inf, isnan, nan
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pdserve.ids import Seconds

__all__ = ["BUCKET", "Forecast", "Quantiles"]

BUCKET: Final[Seconds] = 5.0
"""Length of the buckets in which values are averaged: the planner's tick."""
_EARLY: Final = 0.1
"""A bucket may end this share of its length early, since timers are not exact."""
_SLOT: Final[Seconds] = 300.0
"""Length of the slots of a day."""
_DAY: Final = 288
_WEEK: Final = 7 * _DAY
"""Slots of a day and of a week."""
_EWMA: Final[Seconds] = 30.0
_LEVEL: Final[Seconds] = 30.0
_TREND: Final[Seconds] = 60.0
_DAMPED: Final[Seconds] = 300.0
"""Time constants: of the mean, of Holt's level and slope, and of the damping of the slope."""
_HIGHEST: Final = 60
"""Buckets whose highest value bounds the trend: five minutes."""
_MOST: Final = 2.0
"""The trend forecasts at most so many times that value. Twice the load within a start-up is more
than ramps do; what does more is a surge, which the planner sees by itself within two ticks."""
_GAP: Final[Seconds] = 60.0
"""After this long without an observation, nothing is known of the present any more."""
_STEPS: Final = (1, 2, 4, 8, 16, 32, 64, 128)
"""Horizons at which errors are measured, in buckets: 5 s to almost 11 minutes."""
_MEMORY: Final[Seconds] = 300.0
"""Time constant of the mean errors, at least; twice the horizon if that is longer."""
_RATIOS: Final = 200
"""Ratios from which quantiles are taken."""
_ENOUGH: Final = 20
"""Fewer ratios say nothing about quantiles; the prior's are taken."""
_PRIOR: Final[Mapping[float, float]] = {0.5: 1.0, 0.9: 1.3, 0.95: 1.5}
_APART: Final = 8
"""Ratios that are kept of the buckets within one horizon."""
_FLOOR: Final = 0.02
"""Share of the usual load below which a forecast counts as this share: without it the first load
after none would be infinitely more than forecast."""
_SURE: Final = 1e-3
"""Error, as a share of the usual load, below which parts count as equally good."""


@dataclass(frozen=True, slots=True)
class Quantiles:
    """A forecast of the mean load of one bucket, in the series' own unit."""

    horizon: Seconds
    """From the newest observation to the bucket that is meant."""
    p50: float
    p90: float
    p95: float
    mean: float
    """The combined forecast before the quantiles of its errors."""
    parts: Mapping[str, float]
    """What each part forecasts; parts that know nothing yet are left out."""
    weights: Mapping[str, float]
    """The weight of each of these parts; they add up to 1."""
    errors: Mapping[str, float]
    """The recent mean absolute error of each part at this horizon, from which the weights are."""
    samples: int
    """Ratios behind the quantiles; with fewer than 20 they are a guess."""


class _Part(Protocol):
    """One of the combined forecasts."""

    def take(self, value: float, after: Seconds) -> None:
        """Take the next bucket's mean, `after` seconds after the one before."""
        ...

    def at(self, horizon: Seconds) -> float | None:
        """The forecast; None: it knows nothing of that time."""
        ...


class _Last:
    def __init__(self) -> None:
        self._value: float | None = None

    def take(self, value: float, after: Seconds) -> None:
        self._value = value

    def at(self, horizon: Seconds) -> float | None:
        return self._value


class _Mean:
    """Exponentially weighted mean."""

    def __init__(self, memory: Seconds) -> None:
        self._memory = memory
        self.value: float | None = None

    def take(self, value: float, after: Seconds) -> None:
        if self.value is None or after > _GAP:
            self.value = value
        else:
            self.value += (1 - exp(-after / self._memory)) * (value - self.value)

    def at(self, horizon: Seconds) -> float | None:
        return self.value


class _Trend:
    """Holt's method with a damped trend (Gardner and McKenzie, 1985), for uneven distances.

    It forecasts at most `_MOST` times the highest of the last values: a slope that would lead
    beyond is that of a step, or chance.
    """

    def __init__(self) -> None:
        self._level: float | None = None
        self._slope = 0.0
        """Change per second."""
        self._recent: deque[float] = deque(maxlen=_HIGHEST)

    def restart(self) -> None:
        """The next value is the level, without a slope."""
        self._level = None

    def take(self, value: float, after: Seconds) -> None:
        self._recent.append(value)
        if self._level is None or after > _GAP:
            self._level, self._slope = value, 0.0
            self._recent = deque([value], maxlen=_HIGHEST)
            return
        before, expected = self._level, self._level + _damped(after) * self._slope
        self._level = expected + (1 - exp(-after / _LEVEL)) * (value - expected)
        slope = self._slope * exp(-after / _DAMPED)
        self._slope = slope + (1 - exp(-after / _TREND)) * ((self._level - before) / after - slope)

    def at(self, horizon: Seconds) -> float | None:
        if self._level is None:
            return None
        wanted = self._level + _damped(horizon) * self._slope
        return min(max(0.0, wanted), _MOST * max(self._recent))


def _damped(horizon: Seconds) -> Seconds:
    """Seconds over which the present slope counts until `horizon`: it fades meanwhile."""
    return _DAMPED * (1 - exp(-horizon / _DAMPED))


class _Season:
    """The means of the slots of the last week."""

    def __init__(self) -> None:
        self._means = array("d", [nan]) * _WEEK
        self._slot = -1
        """The present slot, counted over all weeks; its mean is kept when it has ended."""
        self._sum = 0.0
        self._count = 0

    def take(self, phase: Seconds, value: float) -> None:
        """The mean of the bucket at `phase` seconds after the beginning of some week."""
        slot = int(phase // _SLOT)
        if slot != self._slot:
            self._end_slot(slot)
        self._sum += value
        self._count += 1

    def _end_slot(self, following: int) -> None:
        if self._count:
            self._means[self._slot % _WEEK] = self._sum / self._count
            for missed in range(self._slot + 1, min(following, self._slot + 1 + _WEEK)):
                self._means[missed % _WEEK] = nan
        self._slot, self._sum, self._count = following, 0.0, 0

    def ago(self, slots: int, phase: Seconds) -> float | None:
        """The mean `slots` slots before the time `phase`; None: it is not known."""
        mean = self._means[(int(phase // _SLOT) - slots) % _WEEK]
        return None if isnan(mean) else mean


@dataclass(frozen=True, slots=True)
class _Expected:
    """A forecast that was made for one bucket."""

    bucket: int
    parts: Mapping[str, float]
    mean: float
    floor: float


class _Record:
    """How well the parts have forecast so many buckets ahead."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.errors: dict[str, float] = {}
        """Recent mean absolute error by part."""
        self.ratios: deque[float] = deque(maxlen=_RATIOS)
        self._counts: dict[str, int] = {}
        self._expected: deque[_Expected] = deque()
        self._memory = max(_MEMORY, 2 * steps * BUCKET) / BUCKET
        self._apart = max(1, steps // _APART)
        """Buckets from one ratio to the next: forecasts for neighbours are wrong in the same way,
        so ratios at a far horizon have to cover more time."""

    def expect(self, expected: _Expected) -> None:
        """Remember a forecast until its bucket comes."""
        self._expected.append(expected)

    def forget_expected(self) -> None:
        """Forecasts that were made are not compared with what comes."""
        self._expected.clear()

    def score(self, bucket: int, value: float) -> None:
        """Compare what came in a bucket with what was forecast for it. Forecasts for buckets that
        nobody observed are dropped."""
        while self._expected and self._expected[0].bucket <= bucket:
            expected = self._expected.popleft()
            if expected.bucket == bucket:
                self._learn(expected, value)

    def _learn(self, expected: _Expected, value: float) -> None:
        for name, forecast in expected.parts.items():
            count = self._counts[name] = self._counts.get(name, 0) + 1
            rate = max(1 / count, 1 - exp(-1 / self._memory))
            before = self.errors.get(name, 0.0)
            self.errors[name] = before + rate * (abs(value - forecast) - before)
        if expected.bucket % self._apart == 0:
            base = max(expected.mean, expected.floor)
            self.ratios.append(value / base if base > 0 else 1.0)


class Forecast:
    """The forecast of one series of values that are never negative."""

    def __init__(self, week_phase: Callable[[Seconds], Seconds] = lambda at: at) -> None:
        """`week_phase` gives the seconds since some Monday's beginning for a time of `observe`; it
        is asked once a bucket, so a clock that is set changes later buckets only."""
        self._week_phase = week_phase
        self._season = _Season()
        self._usual = _Mean(_DAMPED)
        self._trend = _Trend()
        self._parts: dict[str, _Part] = {
            "last": _Last(),
            "ewma": _Mean(_EWMA),
            "trend": self._trend,
        }
        self._records = [_Record(steps) for steps in _STEPS]
        self._open: list[float] = []
        """Values of the bucket that has not ended."""
        self._origin: Seconds | None = None
        """When the first bucket ended."""
        self._newest: Seconds = -inf
        self._bucket = -1
        self._phase: Seconds = 0.0

    def observe(self, at: Seconds, value: float) -> None:
        """Take the mean load since the observation before. Once in 5 s is enough; more often, the
        values of 5 s are averaged.

        Errors: `ValueError` for a value that is negative or no number, and for a time before the
        last one.
        """
        if not 0 <= value < inf:
            raise ValueError(f"a load of {value} cannot be: it must be a number of 0 or more")
        if not self._newest <= at < inf:
            raise ValueError(f"time {at} is before the last observation's, {self._newest}")
        self._newest = at
        self._open.append(value)
        if self._origin is None:
            self._origin = at
        bucket = int((at - self._origin) / BUCKET + _EARLY)
        if bucket > self._bucket:
            mean = sum(self._open) / len(self._open)
            self._open.clear()
            self._end_bucket(bucket, at, mean)

    def shifted(self) -> None:
        """Forget what was forecast for times to come, and the trend: the load has changed all at
        once. How wrong forecasts were across that change says nothing of those that are made after
        it, and would multiply the new load by the step for as long as ratios are kept. The step is
        no slope either, which would go on."""
        self._trend.restart()
        for record in self._records:
            record.forget_expected()

    def at(self, horizon: Seconds) -> Quantiles | None:
        """Forecast the mean load `horizon` seconds after the newest observation; None: nothing was
        observed yet.

        Errors: `ValueError` for a negative horizon.
        """
        if not 0 <= horizon < inf:
            raise ValueError(f"a horizon of {horizon} s is not in the future")
        parts = self._forecasts(horizon)
        if not parts:
            return None
        record = self._record(horizon)
        weights = _weights(parts, record.errors, self._floor(_SURE))
        mean = sum(weights[name] * parts[name] for name in parts)
        base = max(mean, self._floor(_FLOOR))
        p50, p90, p95 = (base * ratio for ratio in _ratios(record.ratios))
        errors = {name: record.errors[name] for name in parts if name in record.errors}
        return Quantiles(horizon, p50, p90, p95, mean, parts, weights, errors, len(record.ratios))

    def _end_bucket(self, bucket: int, at: Seconds, value: float) -> None:
        after = (bucket - self._bucket) * BUCKET
        self._bucket, self._phase = bucket, self._week_phase(at)
        for record in self._records:
            record.score(bucket, value)
        for part in self._parts.values():
            part.take(value, after)
        self._usual.take(value, after)
        self._season.take(self._phase, value)
        for record in self._records:
            self._expect(record)

    def _expect(self, record: _Record) -> None:
        parts = self._forecasts(record.steps * BUCKET)
        weights = _weights(parts, record.errors, self._floor(_SURE))
        mean = sum(weights[name] * parts[name] for name in parts)
        record.expect(_Expected(self._bucket + record.steps, parts, mean, self._floor(_FLOOR)))

    def _forecasts(self, horizon: Seconds) -> dict[str, float]:
        """What each part forecasts, of those that know anything."""
        then = self._phase + horizon
        found = {name: part.at(horizon) for name, part in self._parts.items()}
        found["day"] = self._season.ago(_DAY, then)
        found["week"] = self._season.ago(_WEEK, then)
        return {name: value for name, value in found.items() if value is not None}

    def _record(self, horizon: Seconds) -> _Record:
        """The record at the least measured horizon that is not shorter; while that one is young, at
        the longest that is not young."""
        wanted = next((r for r in self._records if r.steps * BUCKET >= horizon), self._records[-1])
        for record in reversed(self._records[: self._records.index(wanted) + 1]):
            if len(record.ratios) >= _ENOUGH:
                return record
        return self._records[0]

    def _floor(self, share: float) -> float:
        return share * (self._usual.value or 0.0)


def _weights(
    parts: Mapping[str, float], errors: Mapping[str, float], sure: float
) -> dict[str, float]:
    """Weights in proportion to 1 / error. A part without a record counts as the worst."""
    worst = max((errors[name] for name in parts if name in errors), default=1.0)
    found = {name: errors.get(name, worst) + sure for name in parts}
    exact = [name for name, error in found.items() if error <= 0]
    if exact:
        return {name: (name in exact) / len(exact) for name in parts}
    total = sum(1 / error for error in found.values())
    return {name: 1 / error / total for name, error in found.items()}


def _ratios(seen: Sequence[float]) -> tuple[float, float, float]:
    """The ratios of p50, p90 and p95 to the mean."""
    if len(seen) < _ENOUGH:
        return _PRIOR[0.5], _PRIOR[0.9], _PRIOR[0.95]
    ordered = sorted(seen)
    p50, p90, p95 = (ordered[ceil(share * len(ordered)) - 1] for share in _PRIOR)
    return p50, p90, p95

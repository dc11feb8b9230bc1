"""Searches values on some slices of a trace, and accepts them only by others. Pure.

    slices      the trace's time in five parts: 1, 3 and 5 propose, 2 and 4 are held out
    trials      every choice is replayed on the proposing slices, with the same seeds as the values
                of today (common random numbers), so that differences are the choice's
    simplify    a knob whose return to today's value costs nothing is not proposed
    acceptance  on the held-out slices, at least `LEAST_GAIN` more good requests; on no slice a loss
                of more than `MOST_LOSS`

The held-out slices are looked at once, for one choice: to try many there would choose by them.
It does not know how a replay runs; `Replays` does.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.messages.knobs import TuningKnob
    from pdserve.sim.tuning.sampler import Choice, ChoiceSampler

__all__ = [
    "HELD_OUT",
    "LEAST_GAIN",
    "MOST_LOSS",
    "PROPOSING",
    "SLICES",
    "Gain",
    "Proposal",
    "Replays",
    "TunedKnob",
    "propose",
]

SLICES: Final = 5
PROPOSING: Final = (0, 2, 4)
HELD_OUT: Final = (1, 3)
LEAST_GAIN: Final = 0.03
"""Least gain on the held-out slices, as a share of today's good requests: less is often noise, and
a changed setting has a cost of its own."""
MOST_LOSS: Final = 0.01
"""Most that any slice may lose, as a share of its good requests today."""


class Replays(Protocol):
    """Replays slices."""

    def good(self, values: Sequence[float], slice_: int) -> Sequence[float]:
        """The share of good requests with these values of the knobs, for each seed in turn."""
        ...


@dataclass(frozen=True, slots=True)
class TunedKnob:
    """A knob and the values that it may get here."""

    knob: TuningKnob
    today: float
    values: tuple[float, ...]

    @property
    def first(self) -> int:
        """The index of today's value, or of the one next to it."""
        return min(range(len(self.values)), key=lambda n: abs(self.values[n] - self.today))


@dataclass(frozen=True, slots=True)
class Gain:
    """The difference that a choice makes on some slices, as a share of today's good requests."""

    mean: float
    spread: float
    """Standard deviation over slices and seeds."""
    slices: dict[int, float]
    """By slice: the mean over seeds."""

    @property
    def worst(self) -> float:
        return min(self.slices.values())


@dataclass(slots=True)
class Proposal:
    """The result of a search."""

    values: dict[str, float]
    """Proposed values by knob, without those that stay; empty: nothing was better."""
    trials: int = 0
    replays: int = 0
    proposing: Gain | None = None
    held_out: Gain | None = None
    reasons: list[str] = field(default_factory=list)
    """Why the proposal is not accepted; empty: it is."""

    @property
    def accepted(self) -> bool:
        return bool(self.values) and not self.reasons


class _Tried:
    """All results so far, each replayed once."""

    def __init__(self, knobs: Sequence[TunedKnob], replays: Replays) -> None:
        self.knobs = knobs
        self._replays = replays
        self._known: dict[tuple[tuple[float, ...], int], Sequence[float]] = {}
        self.today = tuple(one.today for one in knobs)

    @property
    def count(self) -> int:
        """Number of slices replayed."""
        return len(self._known)

    def good(self, values: tuple[float, ...], slice_: int) -> Sequence[float]:
        key = values, slice_
        if key not in self._known:
            self._known[key] = self._replays.good(values, slice_)
        return self._known[key]

    def gain(self, values: tuple[float, ...], slices: Sequence[int]) -> Gain:
        """The gain of these values over today's."""
        by_slice, pairs = {}, []
        for one in slices:
            before, after = self.good(self.today, one), self.good(values, one)
            level = statistics.fmean(before)
            moved = [_share(new - old, level) for old, new in zip(before, after, strict=True)]
            by_slice[one] = statistics.fmean(moved)
            pairs += moved
        spread = statistics.stdev(pairs) if len(pairs) > 1 else 0.0
        return Gain(statistics.fmean(pairs), spread, by_slice)

    def values(self, choice: Choice) -> tuple[float, ...]:
        return tuple(one.values[n] for one, n in zip(self.knobs, choice, strict=True))


def _share(difference: float, level: float) -> float:
    """A difference as a share of today's level; where nothing is good today, any gain is whole."""
    if level > 0:
        return difference / level
    return float(difference > 0)


def propose(
    knobs: Sequence[TunedKnob], sampler: ChoiceSampler, replays: Replays, trials: int
) -> Proposal:
    """Tries `trials` choices, and judges the best one on the held-out slices."""
    tried = _Tried(knobs, replays)
    best, most = tried.today, 0.0
    for _ in range(trials):
        values = tried.values(sampler.ask())
        gain = tried.gain(values, PROPOSING).mean
        sampler.tell(gain)
        if gain > most:
            best, most = values, gain
    best = _simplified(tried, best)
    found = Proposal(_changed(tried, best), trials, tried.count)
    if not found.values:
        found.reasons.append("no values were better than today's")
        return found
    found.proposing = tried.gain(best, PROPOSING)
    found.held_out = tried.gain(best, HELD_OUT)
    found.replays = tried.count
    found.reasons += _objections(found.proposing, found.held_out)
    return found


def _simplified(tried: _Tried, values: tuple[float, ...]) -> tuple[float, ...]:
    """Returns each knob to today's value where that costs nothing."""
    for place, today in enumerate(tried.today):
        if values[place] == today:
            continue
        without = (*values[:place], today, *values[place + 1 :])
        if tried.gain(without, PROPOSING).mean >= tried.gain(values, PROPOSING).mean:
            values = without
    return values


def _changed(tried: _Tried, values: tuple[float, ...]) -> dict[str, float]:
    return {
        one.knob.name: value
        for one, value in zip(tried.knobs, values, strict=True)
        if value != one.today
    }


def _objections(proposing: Gain, held_out: Gain) -> list[str]:
    """Why a proposal is not accepted."""
    found = []
    if held_out.mean < LEAST_GAIN or math.isclose(held_out.mean, LEAST_GAIN):
        found.append(
            f"on the slices held out it gains {held_out.mean:+.1%}, not more than {LEAST_GAIN:.0%}"
        )
    for number, gain in sorted({**proposing.slices, **held_out.slices}.items()):
        if gain < -MOST_LOSS:
            found.append(f"slice {number + 1} loses {-gain:.1%}, more than {MOST_LOSS:.0%}")
    return found

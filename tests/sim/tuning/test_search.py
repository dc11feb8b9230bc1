"""A proposal is accepted for what it does on slices that have not chosen it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pdserve.messages.knobs import KNOBS
from pdserve.sim.tuning.search import HELD_OUT, PROPOSING, SLICES, TunedKnob, propose

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdserve.sim.tuning.sampler import Choice

KNOB, OTHER = KNOBS[0], KNOBS[1]
TWO = (TunedKnob(KNOB, 1, (1, 2, 3)), TunedKnob(OTHER, 5, (5, 6)))
ALL: list[tuple[int, ...]] = [(a, b) for a in range(3) for b in range(2)]


class Fixed:
    """Asks for these choices in turn."""

    def __init__(self, choices: Sequence[Choice]) -> None:
        self._choices = iter(choices)
        self.told: list[float] = []

    def ask(self) -> Choice:
        return next(self._choices)

    def tell(self, score: float) -> None:
        self.told.append(score)


class World:
    """Replays whose result a test says."""

    def __init__(self, good: Callable[[Sequence[float], int], float], noise: float = 0.0) -> None:
        self._good, self._noise = good, noise
        self.asked: list[tuple[tuple[float, ...], int]] = []

    def good(self, values: Sequence[float], slice_: int) -> list[float]:
        self.asked.append((tuple(values), slice_))
        # Both seeds' noise is that of every choice: common random numbers.
        return [self._good(values, slice_) + sign * self._noise for sign in (-1, 1)]


def test_the_best_choice_is_proposed_and_what_does_nothing_is_not() -> None:
    world = World(lambda values, _: 0.5 + 0.1 * (values[0] - 1), noise=0.2)
    sampler = Fixed(ALL)
    found = propose(TWO, sampler, world, 6)
    assert found.values == {KNOB.name: 3}
    assert found.accepted
    assert found.held_out is not None
    assert found.held_out.mean == pytest.approx(0.4)
    assert len(sampler.told) == 6
    assert max(sampler.told) == pytest.approx(0.4)


def test_the_slices_held_out_see_one_choice_only() -> None:
    world = World(lambda values, _: 0.5 + 0.1 * (values[0] - 1))
    propose(TWO, Fixed(ALL), world, 6)
    there = {values for values, slice_ in world.asked if slice_ in HELD_OUT}
    assert there == {(1, 5), (3, 5)}
    assert len(world.asked) == len(set(world.asked)), "a slice is replayed once"
    assert sorted((*PROPOSING, *HELD_OUT)) == list(range(SLICES))


@pytest.mark.parametrize(
    ("held_out", "reason"),
    [(0.0, "not more than 3%"), (0.029, "not more than 3%"), (-0.2, "loses 20.0%")],
)
def test_a_gain_only_where_it_was_chosen_is_refused(held_out: float, reason: str) -> None:
    def good(values: Sequence[float], slice_: int) -> float:
        gain = 0.3 if slice_ in PROPOSING else held_out
        return 0.5 * (1 + gain * (values[0] == 3))

    found = propose(TWO, Fixed(ALL), World(good), 6)
    assert found.values == {KNOB.name: 3}
    assert not found.accepted
    assert any(reason in words for words in found.reasons)


@pytest.mark.parametrize("loser", range(SLICES))
def test_one_slice_that_loses_refuses_all(loser: int) -> None:
    def good(values: Sequence[float], slice_: int) -> float:
        gain = -0.02 if slice_ == loser else 0.5
        return 0.5 * (1 + gain * (values[0] == 3))

    found = propose(TWO, Fixed(ALL), World(good), 6)
    assert found.reasons == [f"slice {loser + 1} loses 2.0%, more than 1%"]


def test_nothing_better_is_no_proposal() -> None:
    found = propose(TWO, Fixed(ALL), World(lambda values, _: 0.9 - 0.1 * (values[0] - 1)), 6)
    assert (found.values, found.accepted) == ({}, False)
    assert found.reasons == ["no values were better than today's"]
    assert found.held_out is None


def test_where_nothing_was_good_any_gain_counts() -> None:
    found = propose(TWO, Fixed(ALL), World(lambda values, _: 0.1 * (values[0] == 3)), 6)
    assert found.accepted

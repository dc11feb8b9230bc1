"""Each planted bug is caught by the simulated worlds, within a stated number of seeds."""

from __future__ import annotations

import pytest

from pdserve.router.bookings import Bookings
from pdserve.sim.run import Failure, run
from pdserve.testing.planted import BUGS, planted
from tests.sim.worlds import everything

SEEDS = 20
"""At most so many worlds until a bug is caught; nearly all are caught by the first. Always the same
ones: what a bug costs to find is a property of the suite, not of luck."""


def worlds_until_caught(name: str) -> int:
    """First the world in which everything goes wrong once, then drawn ones."""
    with planted(name):
        for number in range(SEEDS):
            try:
                if number < 2:
                    everything(number)
                else:
                    run(number)
            except Failure:
                return number + 1
    raise AssertionError(f"{SEEDS} worlds did not notice: {name}")


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_caught(name: str) -> None:
    assert worlds_until_caught(name) <= SEEDS


def test_a_bug_is_gone_afterwards() -> None:
    before = vars(Bookings)["expire"]
    with planted("booking never expires"):
        assert vars(Bookings)["expire"] is not before
    assert vars(Bookings)["expire"] is before


def test_there_are_enough_of_them() -> None:
    assert len(BUGS) >= 15
    assert all(bug.why for bug in BUGS.values())

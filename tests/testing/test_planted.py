"""Each planted bug is caught by the simulated worlds, within a stated number of seeds."""

from __future__ import annotations

import pytest

from pdserve.sim.run import Failure, run
from pdserve.testing.planted import BUGS, planted

SEEDS = 25
"""At most so many worlds until a bug is caught; most are caught by the first."""
FIRST = 0
"""Always the same ones: what a bug costs to find is a property of the suite, not of luck."""


def seeds_until_caught(name: str) -> int:
    with planted(name):
        for number in range(SEEDS):
            try:
                run(FIRST + number)
            except Failure:
                return number + 1
    raise AssertionError(f"{SEEDS} worlds did not notice: {name}")


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_caught(name: str) -> None:
    assert seeds_until_caught(name) <= SEEDS


def test_a_bug_is_gone_afterwards() -> None:
    import pdserve.router.bookings as module

    before = vars(module.Bookings)["expire"]
    with planted("booking never expires"):
        assert vars(module.Bookings)["expire"] is not before
    assert vars(module.Bookings)["expire"] is before


def test_there_are_enough_of_them() -> None:
    assert len(BUGS) >= 15
    assert all(bug.why for bug in BUGS.values())

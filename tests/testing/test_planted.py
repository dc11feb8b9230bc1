"""Each planted bug is caught by the simulated worlds, within a stated number of seeds."""

from __future__ import annotations

import pytest

from pdserve.router.bookings import Bookings
from pdserve.sim.faults import Fault
from pdserve.sim.run import Failure, Plan, run, run_plan
from pdserve.testing.planted import BUGS, planted
from tests.sim.worlds import one_after_another, plan

SEEDS = 20
"""At most so many worlds until a bug is caught; nearly all are caught by the first. Always the same
ones: what a bug costs to find is a property of the suite, not of luck."""


PATIENCE = 0.4
"""Times the usual waits, for a bug that makes everybody busy with each other; enough for a world
without a bug, as is tested."""


RESETS = [Fault("reset", 0.0, 0.0, f, w) for f in ("f0", "f1") for w in ("w0", "w1")]
CUT_OFF = [Fault("isolate", 0.0, 15.0, "f1")]
CRASH = [Fault("crash", 0.0, 0.01, "w1")]
FAULTS = {
    "a lost channel ends nothing": RESETS,
    "channel outlives its end": RESETS,
    "epoch not compared": CRASH,
    "Gone told twice": CRASH,
    "an index keeps dead workers": CRASH,
    "a dead engine's blocks stay": [Fault("engine", 0.0, 0.0, "w0")],
    "LinkDown dropped": [Fault("reset", 0.0, 0.0, "w0", "w1")],
    "failed dials not told": [Fault("cut", 0.0, 30.0, "w0", "w1")],
    "own death not heard": CUT_OFF,
    "card not told in a later life": CUT_OFF,
    "refutation not spoken": [Fault("pause", 0.0, 5.0, "w1")],
    "watermark not checked": [Fault("amnesia", 0.0, 0.0, "r0")],
}
"""What must go wrong for a bug to show; the others show in any world."""


def made_for(name: str, seed: int) -> Plan:
    """A busy world in which the bug must show."""
    faults = one_after_another(*FAULTS.get(name, []), begin=8.0, gap=0.5)
    end = max([12.0, *(fault.at + fault.lasts for fault in faults)])
    return plan(seed, faults, until=end, rate=6.0, patience=PATIENCE)


def worlds_until_caught(name: str) -> int:
    """First the world that was made for it, then drawn ones."""
    with planted(name):
        for number in range(SEEDS):
            try:
                if number < 2:
                    run_plan(made_for(name, number))
                else:
                    run(number)
            except Failure:
                return number + 1
    raise AssertionError(f"{SEEDS} worlds did not notice: {name}")


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_caught(name: str) -> None:
    assert worlds_until_caught(name) <= SEEDS


def test_a_world_without_a_bug_passes_with_that_patience() -> None:
    for name in ("no faults", *FAULTS):
        run_plan(made_for(name, 0))


def test_a_bug_is_gone_afterwards() -> None:
    before = vars(Bookings)["expire"]
    with planted("booking never expires"):
        assert vars(Bookings)["expire"] is not before
    assert vars(Bookings)["expire"] is before


def test_there_are_enough_of_them() -> None:
    assert len(BUGS) >= 15
    assert all(bug.why for bug in BUGS.values())

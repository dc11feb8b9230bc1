"""Random lives of a state machine, of which some have to visit every corner."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import seed
from hypothesis.stateful import run_state_machine_as_test

if TYPE_CHECKING:
    from collections.abc import Callable, Set

    from hypothesis import settings
    from hypothesis.stateful import RuleBasedStateMachine

ROUNDS = 4


def run_lives(
    machine: type[RuleBasedStateMachine], lives: settings, missed: Callable[[], Set[str]]
) -> None:
    """Run the lives of this run's seed. While they have missed a corner, run as many again, at most
    `ROUNDS` times: a few dozen lives miss one now and then. Those seeds are always the same, so no
    seed of a run decides whether a corner is found. Errors: AssertionError names what none visits.
    """
    run_state_machine_as_test(machine, settings=lives)
    for number in range(ROUNDS):
        if missed():
            more = seed(number)(type("More", (machine,), {}))
            run_state_machine_as_test(more, settings=lives)
    assert not missed()

"""What a supervisor decides: which to stop, which to start, in which order, when to give up."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from pdserve.runtime.restart_intensity import RestartLimits
from pdserve.runtime.supervisor_plan import (
    RestartKind,
    RestartStrategy,
    RestartsUsedUp,
    StartChild,
    StopChild,
    SupervisorPlan,
    WaitUntil,
)

CALM = RestartLimits(most=5, within=30.0, first=1.0, jitter=0.0)


def plan(
    *kinds: RestartKind, strategy: RestartStrategy = "one_for_one", restarts: RestartLimits = CALM
) -> SupervisorPlan:
    return SupervisorPlan(kinds, strategy, restarts, random.Random(0))


def test_the_kinds_differ_in_what_is_restarted() -> None:
    table: list[tuple[RestartKind, bool, bool]] = [
        ("permanent", True, True),
        ("transient", True, False),
        ("temporary", False, False),
    ]
    for kind, after_failure, after_end in table:
        for failed, restarted in ((True, after_failure), (False, after_end)):
            made = plan(kind)
            made.ended(0, 10.0, failed=failed)
            assert made.next(10.0) == WaitUntil(11.0 if restarted else None)
            assert made.next(11.0) == (StartChild(0) if restarted else WaitUntil(None))


def test_one_for_one_leaves_the_others_alone() -> None:
    made = plan("permanent", "permanent", "permanent")
    made.ended(1, 0.0, failed=True)
    made.ended(0, 0.5, failed=True)
    assert made.next(0.5) == WaitUntil(1.0)
    assert made.next(1.0) == StartChild(1)
    made.started(1)
    assert made.next(1.0) == WaitUntil(1.5)


def test_rest_for_one_stops_the_later_in_reverse_and_starts_in_order() -> None:
    made = plan("permanent", "permanent", "transient", "temporary", strategy="rest_for_one")
    made.ended(1, 0.0, failed=True)
    assert made.next(0.0) == StopChild(3)
    made.ended(3, 0.1, failed=False)
    assert made.next(0.1) == StopChild(2)
    made.ended(2, 0.2, failed=False)
    assert made.next(0.2) == WaitUntil(1.0), "the later ones wait for the first"
    assert made.next(1.0) == StartChild(1)
    made.started(1)
    assert made.next(1.0) == StartChild(2)
    made.started(2)
    assert made.next(1.0) == WaitUntil(None), "a temporary one stays away"


def test_an_earlier_one_fails_while_later_ones_are_down() -> None:
    made = plan("permanent", "permanent", "permanent", strategy="rest_for_one")
    made.ended(1, 0.0, failed=True)
    made.ended(2, 0.0, failed=False)
    made.ended(0, 0.5, failed=True)
    order = []
    for now in (1.5, 1.5, 1.5):
        action = made.next(now)
        assert isinstance(action, StartChild)
        order.append(action.index)
        made.started(action.index)
    assert order == [0, 1, 2]


def test_a_failed_start_counts_and_in_the_end_it_gives_up() -> None:
    made = plan("permanent", restarts=RestartLimits(most=2, first=1.0, jitter=0.0))
    made.ended(0, 0.0, failed=True)
    made.start_failed(0, 1.0)
    assert made.next(1.0) == WaitUntil(3.0)
    made.start_failed(0, 3.0)
    assert made.next(3.0) == RestartsUsedUp()


@given(
    events=st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.floats(0, 3)), max_size=40),
    strategy=st.sampled_from(["one_for_one", "rest_for_one"]),
    kinds=st.lists(
        st.sampled_from(["permanent", "transient", "temporary"]), min_size=4, max_size=4
    ),
)
def test_when_all_is_done_all_that_should_run_do(events, strategy, kinds) -> None:
    """Whatever ends when: following the plan leaves nothing down, nothing condemned, and in
    rest_for_one nothing was started before one ahead of it."""
    made = plan(*kinds, strategy=strategy, restarts=RestartLimits(most=1000))
    up, now = {0, 1, 2, 3}, 0.0
    over: set[int] = set()

    def follow(until: float | None) -> None:
        nonlocal now
        while True:
            action = made.next(now)
            if isinstance(action, StopChild):
                assert strategy == "rest_for_one"
                up.discard(action.index)
                made.ended(action.index, now, failed=False)
                if kinds[action.index] == "temporary":
                    over.add(action.index)
            elif isinstance(action, StartChild):
                if strategy == "rest_for_one":
                    assert {n for n in range(action.index) if n not in over} <= up
                assert action.index not in up
                up.add(action.index)
                made.started(action.index)
            else:
                assert isinstance(action, WaitUntil)
                if action.until is None or (until is not None and action.until > until):
                    return
                now = action.until

    for index, failed, gap in events:
        follow(now + gap)
        now += gap
        if index in up:
            up.discard(index)
            made.ended(index, now, failed=failed)
            if kinds[index] == "temporary" or (kinds[index] == "transient" and not failed):
                over.add(index)
    follow(None)
    assert up == {0, 1, 2, 3} - over

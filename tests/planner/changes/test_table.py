"""The tables are whole, and each cell leads where the picture in their module says."""

from __future__ import annotations

import itertools

import pytest

from pdserve.planner.changes.table import (
    ENDS,
    TABLES,
    Action,
    ChangeEvent,
    ChangeState,
    next_state,
)

S, E = ChangeState, ChangeEvent
CELLS = [
    (action, state, event)
    for action, table in TABLES.items()
    for state in table
    for event in ChangeEvent
]


def test_every_cell_is_defined():
    assert {*TABLES} == {*Action}
    for action, state in ((a, s) for a, table in TABLES.items() for s in table):
        assert {*TABLES[action][state]} == {*ChangeEvent}, (action, state)
        assert state not in ENDS


@pytest.mark.parametrize(("action", "state", "event"), CELLS)
def test_every_cell_leads_to_a_state_of_its_table(action, state, event):
    after = next_state(action, state, event)
    assert after in {*TABLES[action], *ENDS}
    if after is state:
        return
    # No state is entered twice: a change goes forward, and so it ends.
    assert state not in reachable(action, after)


def reachable(action: Action, start: ChangeState) -> set[ChangeState]:
    found, todo = set(), [start]
    while todo:
        for after in TABLES[action].get(todo.pop(), {}).values():
            if after not in found and after is not start:
                found.add(after)
                todo.append(after)
    return found


@pytest.mark.parametrize("action", Action)
def test_every_state_is_reached_and_has_a_way_out(action):
    first = S.ASKED if action is Action.START else S.ORDERED
    states = {*TABLES[action]}
    assert states - {first} <= reachable(action, first)
    for state in states:
        assert reachable(action, state) & ENDS


@pytest.mark.parametrize(("action", "event"), [*itertools.product(Action, ChangeEvent)])
def test_what_is_over_stays_over(action, event):
    for state in ENDS:
        assert next_state(action, state, event) is state


@pytest.mark.parametrize(
    ("action", "events", "end"),
    [
        (Action.START, [E.PENDING, E.BOOTING, E.LOADING, E.READY], S.DONE),
        (Action.START, [E.READY], S.DONE),
        (Action.START, [E.BOOTING, E.LOADING, E.WRONG], S.FAILED),
        (Action.START, [E.PENDING, E.LATE, E.GONE], S.GIVEN_UP),
        (Action.START, [E.PENDING, E.FAILED], S.FAILED),
        (Action.START, [E.GONE, E.PENDING], S.PENDING),  # not listed yet is not gone
        (Action.START, [E.PENDING, E.GONE], S.FAILED),
        (Action.STOP, [E.DRAINING, E.GONE], S.DONE),
        (Action.STOP, [E.DRAINING, E.BACK], S.GIVEN_UP),
        (Action.STOP, [E.DRAINING, E.LATE], S.STOPPING),
        (Action.STOP, [E.LATE], S.GIVEN_UP),  # never drained: nothing is ended that was not
        (Action.STOP, [E.DRAINING, E.LATE, E.WITHDRAWN, E.GONE], S.DONE),
        (Action.SWITCH, [E.LEAVING, E.PROVING, E.READY], S.DONE),
        (Action.SWITCH, [E.BACK, E.LEAVING, E.BACK], S.GIVEN_UP),
        (Action.SWITCH, [E.LEAVING, E.GONE], S.GIVEN_UP),
        (Action.UNDO, [E.DRAINING, E.READY], S.DONE),
        (Action.UNDO, [E.GONE], S.GIVEN_UP),
    ],
)
def test_ways_through_a_table(action, events, end):
    state = S.ASKED if action is Action.START else S.ORDERED
    for event in events:
        state = next_state(action, state, event)
    assert state is end

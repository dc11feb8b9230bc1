"""The table of a mode change: each cell, and what holds for all ways through it."""

from __future__ import annotations

import itertools

import pytest

from pdserve.worker.mode.state_table import TABLE, ModeEvent, ModeState, next_state

S, E = ModeState, ModeEvent
CELLS = {
    (S.SERVING, E.ORDERED): S.LEAVING,
    (S.LEAVING, E.EMPTY): S.FLIPPING,
    (S.LEAVING, E.TIMED_OUT): S.SERVING,
    (S.LEAVING, E.CANCELLED): S.SERVING,
    (S.LEAVING, E.LAST): S.SERVING,
    (S.LEAVING, E.DRAINING): S.SERVING,
    (S.FLIPPING, E.FLIPPED): S.PROVING,
    (S.FLIPPING, E.FAILED): S.RETURNING,
    (S.PROVING, E.PROVED): S.SERVING,
    (S.PROVING, E.FAILED): S.RETURNING,
    (S.PROVING, E.DRAINING): S.SERVING,
    (S.RETURNING, E.FLIPPED): S.SERVING,
    (S.RETURNING, E.FAILED): S.SERVING,
}


@pytest.mark.parametrize("state", ModeState)
@pytest.mark.parametrize("event", ModeEvent)
def test_each_cell(state: ModeState, event: ModeEvent) -> None:
    assert next_state(state, event) is CELLS.get((state, event), state)


def test_every_state_leads_back_to_serving() -> None:
    """Within four events, so no change can end in a state where nothing is taken."""
    for start in ModeState:
        reached = {start}
        for _ in range(4):
            reached |= {after for state in reached for after in TABLE[state].values()}
        assert S.SERVING in reached


def test_nothing_is_taken_back_once_the_new_mode_is_there() -> None:
    """An operator's cancellation counts only before the flip."""
    after = (S.FLIPPING, S.PROVING, S.RETURNING)
    for state, event in itertools.product(after, (E.CANCELLED, E.TIMED_OUT, E.LAST, E.ORDERED)):
        assert next_state(state, event) is state

"""The table of a request's life: complete, and true to its rules on every path."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve_engines.request_states import (
    CELLS,
    IMPOSSIBLE,
    RequestAction,
    RequestEvent,
    RequestLife,
    RequestState,
)

PAIRS = [(state, event) for state in RequestState for event in RequestEvent]


def reasons(state: RequestState, event: RequestEvent) -> list[str]:
    return [why for why, rows in IMPOSSIBLE.items() if event in rows.get(state, ())]


@pytest.mark.parametrize(("state", "event"), PAIRS)
def test_every_pair_has_a_cell_or_one_reason(state, event) -> None:
    has_cell = event in CELLS[state]
    assert has_cell + len(reasons(state, event)) == 1


def test_every_state_is_reached_and_left() -> None:
    seen, waiting = {RequestState.POSTED}, [RequestState.POSTED]
    while waiting:
        for state, _ in CELLS[waiting.pop()].values():
            if state not in seen:
                seen.add(state)
                waiting.append(state)
    assert seen == set(RequestState)
    for state in RequestState:
        if state not in (RequestState.FREED, RequestState.LOST):
            assert any(cell[0] is not state for cell in CELLS[state].values())


def test_a_pair_that_cannot_happen_is_an_error() -> None:
    with pytest.raises(AssertionError, match="tokens came to a request that is posted"):
        RequestLife().fire(RequestEvent.TOKENS)


@given(st.lists(st.sampled_from(RequestEvent), max_size=30))
def test_on_every_path_the_rules_hold(events) -> None:
    """Nothing is reported after a drop, an end or a stop; it is forgotten exactly once, at the end;
    and what was dropped after it was taken is cancelled."""
    life = RequestLife()
    silent = dropped = taken = False
    actions: list[RequestAction] = []
    for event in events:
        if event not in CELLS[life.state]:
            continue
        new = life.fire(event)
        if silent:
            assert not {RequestAction.REPORT, RequestAction.END, RequestAction.FAIL} & set(new)
        actions.extend(new)
        dropped = dropped or event is RequestEvent.DROP
        taken = taken or event is RequestEvent.ADMITTED
        silent = (
            silent
            or event in (RequestEvent.DROP, RequestEvent.DEAD)
            or bool({RequestAction.END, RequestAction.FAIL} & set(new))
            or event is RequestEvent.STOPPED
        )
        assert actions.count(RequestAction.FREE) == life.over
        if dropped and taken and not life.over:
            assert RequestAction.CANCEL in actions or life.state is RequestState.HELD

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pdserve.worker.disagg.prefill_job import _PERFORM as PREFILL_ACTIONS
from pdserve.worker.disagg.remote_prefill import _PERFORM as DECODE_ACTIONS
from pdserve.worker.disagg.state_table import (
    DECODE_TABLE,
    PREFILL_TABLE,
    DecodeAction,
    DecodeEvent,
    DecodeState,
    PrefillAction,
    PrefillEvent,
    PrefillState,
    StateMachine,
    StateTable,
    UndefinedTransition,
    markdown,
)

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "disaggregation.md"
BEGIN, END = "<!-- tables -->\n", "\n<!-- end of tables -->"
BOTH = [(DECODE_TABLE, DecodeState, DecodeEvent), (PREFILL_TABLE, PrefillState, PrefillEvent)]

LEADS_ON = (
    DecodeAction.ENQUEUE,
    DecodeAction.OPEN,
    DecodeAction.ACTIVATE,
    DecodeAction.PREFILL_HERE,
)
"""What may bring about the next event at once."""


@pytest.mark.parametrize(("table", "states", "events"), BOTH)
def test_every_pair_has_one_meaning(table, states, events):
    pairs = {(state, event) for state in states for event in events}
    assert table.cells.keys() | table.impossible.keys() == pairs
    assert not table.cells.keys() & table.impossible.keys()


@pytest.mark.parametrize(("table", "states", "events"), BOTH)
def test_every_state_can_be_reached_and_left(table, states, events):
    reached, new = {table.start}, {table.start}
    while new:
        following = {cell.next for (state, _), cell in table.cells.items() if state in new}
        new = following - reached
        reached |= new
    assert reached == set(states)
    for state in set(states) - {table.end}:
        assert any(
            cell.next is table.end for (there, _), cell in table.cells.items() if there is state
        )


def test_a_table_with_a_hole_is_none():
    with pytest.raises(ValueError, match="must have one meaning"):
        StateTable(
            "holes", DecodeState, DecodeEvent, DecodeState.ADMIT, DecodeState.RELEASED, {}, {}
        )


@pytest.mark.parametrize(("table", "states", "events"), BOTH)
def test_an_impossible_event_is_a_bug(table, states, events, monkeypatch, caplog):
    state, event = next(iter(table.impossible))
    machine = StateMachine(table)
    machine.state = state
    with pytest.raises(UndefinedTransition):
        machine.feed(event)
    monkeypatch.setattr(StateMachine, "strict", False)
    assert machine.feed(event) == ()
    assert machine.state is state
    assert "although" in caplog.text


def test_what_brings_about_the_next_event_is_done_last():
    for cell in DECODE_TABLE.cells.values():
        assert not any(action in LEADS_ON for action in cell.actions[:-1])


def test_who_cancels_expires_or_fails_is_released_from_every_state():
    for state in set(DecodeState) - {DecodeState.RELEASED}:
        for event in (DecodeEvent.CANCEL, DecodeEvent.ERROR, DecodeEvent.EXPIRE):
            if (state, event) == (DecodeState.ACTIVE, DecodeEvent.EXPIRE):
                continue  # the engine's own deadline
            cell = DECODE_TABLE.cells[state, event]
            assert cell.next is DecodeState.RELEASED
            assert DecodeAction.FORGET in cell.actions
            assert (DecodeAction.FREE in cell.actions) == (event is not DecodeEvent.ERROR)
            assert (DecodeAction.FAIL in cell.actions) == (event is not DecodeEvent.CANCEL)


def test_an_attempt_is_closed_by_whatever_leaves_it():
    attempt = {DecodeState.ATTEMPT, DecodeState.FILL, DecodeState.VERIFY}
    for (state, event), cell in DECODE_TABLE.cells.items():
        leaves = (state in attempt and cell.next not in attempt) or event is DecodeEvent.CLAIM
        verified = (state, event) == (DecodeState.VERIFY, DecodeEvent.FIRST)
        if leaves and state is not DecodeState.QUEUE and not verified:
            assert DecodeAction.CLOSE in cell.actions, (state, event)


def test_an_attempt_is_over_for_the_engine_before_there_is_another():
    for (state, event), cell in DECODE_TABLE.cells.items():
        if state in (DecodeState.ATTEMPT, DecodeState.FILL, DecodeState.VERIFY) and cell.next in (
            DecodeState.QUEUE,
            DecodeState.ATTEMPT,
            DecodeState.LOCAL,
        ):
            again = cell.actions and cell.actions[-1] in LEADS_ON
            assert not again or event is DecodeEvent.LOST or DecodeAction.GIVE_UP in cell.actions, (
                state,
                event,
            )


def test_a_claim_ends_once():
    for (state, event), cell in PREFILL_TABLE.cells.items():
        ends = [action for action in cell.actions if action.value.startswith("end")]
        assert len(ends) == (cell.next is PrefillState.ENDED), (state, event)


def test_every_action_is_done_by_somebody():
    assert DECODE_ACTIONS.keys() == set(DecodeAction)
    assert PREFILL_ACTIONS.keys() == set(PrefillAction)


def test_the_page_tells_what_every_reason_means():
    """Of the words that an answer says after `reason=`."""
    places = re.compile(
        r"(?:_refuse\(|_tell_refused\(|_again\(|refuse_all\(|_reason = |return (?:True, |False, )?)"
        r"([^\n]*)"
    )
    packages = ("worker/disagg", "worker/disagg/queue", "router/prefill_queue")
    files = [path for package in packages for path in (ROOT / "pdserve" / package).glob("*.py")]
    lines = [line for path in files for line in places.findall(path.read_text("utf-8"))]
    said = {word for line in lines for word in re.findall(r'"([a-z]+(?:_[a-z]+)+)"', line)}
    assert {"no_worker", "own_rejoin", "attempts_failed", "queue_full"} <= said
    page = PAGE.read_text(encoding="utf-8")
    assert not [word for word in sorted(said) if f"`{word}`" not in page]


def test_the_page_shows_the_tables():
    page = PAGE.read_text(encoding="utf-8")
    shown = page[page.index(BEGIN) + len(BEGIN) : page.index(END)]
    assert shown.strip() == markdown(), "write table.markdown() into the page"

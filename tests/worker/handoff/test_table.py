from __future__ import annotations

import re
from pathlib import Path

import pytest

from pdserve.worker.handoff.prefilling import _PERFORM as PREFILL_ACTIONS
from pdserve.worker.handoff.remote import _PERFORM as DECODE_ACTIONS
from pdserve.worker.handoff.table import (
    DECODE,
    PREFILL,
    Do,
    Event,
    Machine,
    PrefillDo,
    PrefillEvent,
    PrefillState,
    State,
    Table,
    Undefined,
    markdown,
)

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "disaggregation.md"
BEGIN, END = "<!-- tables -->\n", "\n<!-- end of tables -->"
BOTH = [(DECODE, State, Event), (PREFILL, PrefillState, PrefillEvent)]

LEADS_ON = (Do.ENQUEUE, Do.OPEN, Do.ACTIVATE, Do.PREFILL_HERE)
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
        Table("holes", State, Event, State.ADMIT, State.RELEASED, {}, {})


@pytest.mark.parametrize(("table", "states", "events"), BOTH)
def test_an_impossible_event_is_a_bug(table, states, events, monkeypatch, caplog):
    state, event = next(iter(table.impossible))
    machine = Machine(table)
    machine.state = state
    with pytest.raises(Undefined):
        machine.feed(event)
    monkeypatch.setattr(Machine, "strict", False)
    assert machine.feed(event) == ()
    assert machine.state is state
    assert "although" in caplog.text


def test_what_brings_about_the_next_event_is_done_last():
    for cell in DECODE.cells.values():
        assert not any(action in LEADS_ON for action in cell.actions[:-1])


def test_who_cancels_expires_or_fails_is_released_from_every_state():
    for state in set(State) - {State.RELEASED}:
        for event in (Event.CANCEL, Event.ERROR, Event.EXPIRE):
            if (state, event) == (State.ACTIVE, Event.EXPIRE):
                continue  # the engine's own deadline
            cell = DECODE.cells[state, event]
            assert cell.next is State.RELEASED
            assert Do.FORGET in cell.actions
            assert (Do.FREE in cell.actions) == (event is not Event.ERROR)
            assert (Do.FAIL in cell.actions) == (event is not Event.CANCEL)


def test_an_attempt_is_closed_by_whatever_leaves_it():
    attempt = {State.ATTEMPT, State.FILL, State.VERIFY}
    for (state, event), cell in DECODE.cells.items():
        leaves = (state in attempt and cell.next not in attempt) or event is Event.CLAIM
        verified = (state, event) == (State.VERIFY, Event.FIRST)
        if leaves and state is not State.QUEUE and not verified:
            assert Do.CLOSE in cell.actions, (state, event)


def test_an_attempt_is_over_for_the_engine_before_there_is_another():
    for (state, event), cell in DECODE.cells.items():
        if state in (State.ATTEMPT, State.FILL, State.VERIFY) and cell.next in (
            State.QUEUE,
            State.ATTEMPT,
            State.LOCAL,
        ):
            again = cell.actions and cell.actions[-1] in LEADS_ON
            assert not again or event is Event.LOST or Do.GIVE_UP in cell.actions, (state, event)


def test_a_claim_ends_once():
    for (state, event), cell in PREFILL.cells.items():
        ends = [action for action in cell.actions if action.value.startswith("end")]
        assert len(ends) == (cell.next is PrefillState.ENDED), (state, event)


def test_every_action_is_done_by_somebody():
    assert DECODE_ACTIONS.keys() == set(Do)
    assert PREFILL_ACTIONS.keys() == set(PrefillDo)


def test_the_page_tells_what_every_reason_means():
    """Of the words that an answer says after `reason=`."""
    places = re.compile(
        r"(?:_refuse\(|_tell_refused\(|_again\(|refuse_all\(|_reason = |return (?:True, |False, )?)"
        r"([^\n]*)"
    )
    packages = ("worker/handoff", "worker/prefill_queue", "router/prefill")
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

"""No two things under way have the same id, and no id comes back while it could be confused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.wire.limits import MAX_STREAMS
from pdserve.wire.stream_ids import ACCEPTORS, StreamIds


def test_the_two_sides_give_out_different_ids() -> None:
    d, a = StreamIds(dialled=True), StreamIds(dialled=False)
    ours, theirs = d.take(), a.take()
    assert ours & ACCEPTORS == 0
    assert theirs & ACCEPTORS
    assert d.ours(ours)
    assert not d.ours(theirs)
    assert a.ours(theirs)


@given(st.lists(st.booleans(), max_size=300), st.booleans())
def test_ids_under_way_are_distinct_and_a_returned_one_changes(takes, dialled) -> None:
    slots = StreamIds(dialled=dialled)
    used: list[int] = []
    recent: set[int] = set()
    for take in takes:
        if take or not used:
            taken = slots.take()
            assert taken not in used
            assert taken not in recent
            assert slots.ours(taken)
            used.append(taken)
        else:
            returned = used.pop(0)
            slots.give(returned)
            recent.add(returned)


@pytest.mark.parametrize("dialled", [True, False])
def test_a_slot_passes_through_all_its_generations(dialled) -> None:
    slots = StreamIds(dialled=dialled)
    seen = set()
    first = slots.take()
    slots.give(first)
    for _ in range(1 << 15):
        taken = slots.take()
        assert slots.ours(taken)
        assert taken & 0xFFFF == first & 0xFFFF
        seen.add(taken)
        slots.give(taken)
    assert len(seen) == 1 << 15
    assert slots.take() in seen


def test_there_are_so_many_and_no_more() -> None:
    slots = StreamIds(dialled=True)
    for _ in range(MAX_STREAMS - 1):
        slots.take()
    with pytest.raises(IndexError):
        slots.take()

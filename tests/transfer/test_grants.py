"""Slots come back late and in another generation; notifications say enough to tell."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.errors import Overloaded
from pdserve.testing.transfer_support import order
from pdserve.transfer.copy_plan import PlanError
from pdserve.transfer.grants import GrantTable
from pdserve.transfer.rdma.imm_data import IMM_GENERATIONS, ImmData

PATH = cast("Any", SimpleNamespace(remote=3))
SINK = cast("Any", SimpleNamespace())


@given(st.integers(1, 15), st.integers(0, 4095), st.integers(0, 1 << 32), st.integers(0, 4095))
def test_a_word_holds_all_but_the_high_bits_of_the_generation(kind, slot, generation, part) -> None:
    word = ImmData(kind, slot, generation, part).pack()
    assert 0 <= word < 1 << 32
    assert ImmData.unpack(word) == (kind, slot, generation % IMM_GENERATIONS, part)


def test_a_slot_of_an_earlier_use_is_not_found() -> None:
    table = GrantTable(1, slots=1)
    seen: list[int] = []
    for _ in range(IMM_GENERATIONS):
        granted = table.open(PATH, order([0], 4), SINK)
        ticket = granted.ticket
        assert table.find(PATH, ticket.slot, ticket.generation) is granted
        assert table.find(SINK, ticket.slot, ticket.generation) is None, "another path's"
        assert not any(table.find(PATH, 0, earlier) for earlier in seen)
        seen.append(ticket.generation)
        table.close(granted)
        table.close(granted)
        assert table.find(PATH, ticket.slot, ticket.generation) is None
    assert len(table) == 0


def test_slots_are_bounded_and_taken_in_turn() -> None:
    table = GrantTable(1, slots=3)
    held = [table.open(PATH, order([block], 4), SINK) for block in range(3)]
    with pytest.raises(Overloaded):
        table.open(PATH, order([9], 4), SINK)
    table.close(held[1])
    table.close(held[0])
    assert table.open(PATH, order([9], 4), SINK).ticket.slot == held[1].ticket.slot
    assert len(table.of(PATH)) == 2


def test_no_two_grants_share_a_block() -> None:
    table = GrantTable(1)
    held = table.open(PATH, order([1, 2], 8), SINK)
    with pytest.raises(PlanError, match="block 2"):
        table.open(PATH, order([2, 3], 8), SINK)
    table.close(held)
    table.open(PATH, order([2, 3], 8), SINK)

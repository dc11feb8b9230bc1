"""Precedence by example; the lattice by its laws."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.gossip.member_table import MemberTable, merge, precedence
from pdserve.gossip.messages import MemberRecord, MemberState
from pdserve.ids import NodeId
from tests.gossip.strategies import records

A = NodeId("a")
WEAKEST_FIRST = [
    MemberRecord(A, 1, 0, MemberState.ALIVE),
    MemberRecord(A, 1, 0, MemberState.SUSPECT),
    MemberRecord(A, 1, 1, MemberState.ALIVE),
    MemberRecord(A, 1, 1, MemberState.SUSPECT),
    MemberRecord(A, 1, 0, MemberState.DEAD),
    MemberRecord(A, 1, 0, MemberState.LEFT),
    MemberRecord(A, 2, 0, MemberState.ALIVE),
]


def test_records_order_as_documented():
    assert sorted(reversed(WEAKEST_FIRST), key=precedence) == WEAKEST_FIRST


@given(records(), records())
def test_merging_commutes(a, b):
    assert merge(a, b) == merge(b, a)


@given(records(), records(), records())
def test_merging_is_associative(a, b, c):
    assert merge(merge(a, b), c) == merge(a, merge(b, c))


@given(records(), records())
def test_merging_is_idempotent(a, b):
    assert merge(a, a) == a
    assert merge(merge(a, b), b) == merge(a, b)


@given(records(), records())
def test_merging_never_goes_back(a, b):
    merged = merge(a, b)
    assert precedence(merged) == max(precedence(a), precedence(b))
    if a.epoch == merged.epoch:
        assert merged.card >= a.card


@given(records(), st.integers(0, 1 << 40))
def test_no_word_of_an_epoch_beats_its_death(a, incarnation):
    dead = MemberRecord(A, a.epoch, 0, MemberState.DEAD)
    word = MemberRecord(A, a.epoch, incarnation, MemberState.ALIVE)
    assert merge(merge(a, dead), word).state.final


@given(st.lists(records("a", "b", "c"), max_size=12), st.randoms(use_true_random=False))
def test_tables_agree_whatever_the_order_and_however_often(heard, random):
    one, other = MemberTable(), MemberTable()
    for record in heard:
        one.apply(record)
    again = heard * 2
    random.shuffle(again)
    for record in again:
        other.apply(record)
    assert sorted(one, key=lambda r: r.node) == sorted(other, key=lambda r: r.node)
    assert one.present == other.present == sum(not record.state.final for record in one)


def test_a_change_says_what_changed():
    members = MemberTable()
    first = members.apply(WEAKEST_FIRST[0])
    assert first is not None
    assert first.new_life
    assert first.new_state
    assert members.apply(WEAKEST_FIRST[0]) is None
    card = members.apply(MemberRecord(A, 1, card=1))
    assert card is not None
    assert not card.new_state
    assert not card.new_life


def test_only_the_dead_are_forgotten():
    members = MemberTable()
    members.apply(WEAKEST_FIRST[0])
    with pytest.raises(ValueError, match="not dead"):
        members.forget(A)
    members.apply(WEAKEST_FIRST[4])
    members.forget(A)
    assert members.get(A) is None
    assert len(members) == 0
    with pytest.raises(KeyError):
        members.forget(A)

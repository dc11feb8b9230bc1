"""Every envelope comes out of a mailbox exactly once, in order, and no lane outgrows its bound."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.errors import Overloaded
from pdserve.runtime.mailbox import Mailbox, Policy

if TYPE_CHECKING:
    from collections.abc import Hashable


@dataclass(eq=False)
class Note:
    """An envelope."""

    message: int
    place: Hashable = None


def box(bound: int = 3, **policy) -> Mailbox[Note]:
    return Mailbox(Policy(bound=bound, **policy))


def filled(mailbox: Mailbox[Note], count: int) -> list[Note]:
    notes = [Note(number) for number in range(count)]
    for note in notes:
        assert mailbox.put(note) is None
    return notes


def test_reject_keeps_what_waits() -> None:
    mailbox = box()
    notes = filled(mailbox, 3)
    with pytest.raises(Overloaded) as refused:
        mailbox.put(Note(3))
    assert refused.value.retry_after
    assert mailbox.drain() == notes


def test_drop_oldest_hands_back_what_gave_way() -> None:
    mailbox = box(at_bound="drop_oldest")
    notes = filled(mailbox, 3)
    new = Note(3)
    assert mailbox.put(new) is notes[0]
    assert mailbox.displaced == 1
    assert mailbox.drain() == [*notes[1:], new]


def test_conflate_keeps_the_newest_in_the_place_of_the_first() -> None:
    mailbox = box(conflate=lambda message: message % 10)
    first, other, newer = Note(1), Note(2), Note(11)
    assert mailbox.put(first) is None
    assert mailbox.put(other) is None
    assert mailbox.put(newer) is first
    assert not mailbox.withdraw(first), "withdrawing what gave way must not take its successor"
    assert mailbox.drain() == [newer, other]


def test_conflate_takes_the_newest_even_at_the_bound() -> None:
    mailbox = box(bound=1, conflate=lambda message: message % 10)
    assert mailbox.put(Note(1)) is None
    assert mailbox.put(Note(11)) is not None
    with pytest.raises(Overloaded):
        mailbox.put(Note(2))


def test_a_key_is_not_taken_for_a_number_of_the_mailbox() -> None:
    mailbox = box(conflate=lambda message: 1 if message else None)
    plain, keyed = Note(0), Note(1)
    assert mailbox.put(plain) is None
    assert mailbox.put(keyed) is None
    assert mailbox.drain() == [plain, keyed]


def test_the_system_lane_goes_first_and_says_when_it_is_full() -> None:
    mailbox = box(system_bound=2)
    (user,) = filled(mailbox, 1)
    system = [Note(10), Note(11)]
    assert all(mailbox.put_system(note) for note in system)
    assert not mailbox.put_system(Note(12))
    assert mailbox.withdraw_system(system[0])
    assert not mailbox.withdraw_system(system[0])
    assert mailbox.drain() == [system[1], user]
    assert len(mailbox) == 0


def test_lanes_without_room_make_no_sense() -> None:
    with pytest.raises(ValueError, match="at least one"):
        Policy(bound=0)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(0, 5)),
        st.tuples(st.just("system"), st.integers(0, 5)),
        st.tuples(st.just("withdraw"), st.integers(0, 30)),
        st.tuples(st.just("take"), st.just(0)),
    ),
    max_size=60,
)


@given(
    steps=STEPS,
    bound=st.integers(1, 4),
    at_bound=st.sampled_from(["reject", "drop_oldest"]),
    conflating=st.booleans(),
)
def test_like_two_lists(steps, bound, at_bound, conflating) -> None:
    """Against a model of plain lists: the same order, and each envelope accounted for once."""
    policy = Policy(bound, at_bound, (lambda m: m or None) if conflating else None, bound)
    mailbox: Mailbox[Note] = Mailbox(policy)
    system: list[Note] = []
    user: list[Note] = []
    made: list[Note] = []
    for step, value in steps:
        if step == "put":
            note = Note(value)
            made.append(note)
            same = [n for n in user if conflating and value and n.message == value]
            if same:
                assert mailbox.put(note) is same[0]
                user[user.index(same[0])] = note
            elif len(user) < bound:
                assert mailbox.put(note) is None
                user.append(note)
            elif at_bound == "reject":
                with pytest.raises(Overloaded):
                    mailbox.put(note)
            else:
                assert mailbox.put(note) is user.pop(0)
                user.append(note)
        elif step == "system":
            note = Note(value)
            fits = len(system) < bound
            assert mailbox.put_system(note) is fits
            if fits:
                system.append(note)
        elif step == "withdraw" and made:
            note = made[value % len(made)]
            assert mailbox.withdraw(note) is (note in user)
            if note in user:
                user.remove(note)
        elif step == "take":
            expected = system.pop(0) if system else user.pop(0) if user else None
            assert mailbox.take() is expected
        assert len(mailbox) == len(system) + len(user)
    assert mailbox.drain() == system + user

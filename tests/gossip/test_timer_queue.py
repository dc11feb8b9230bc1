"""Appointments: one per key, in order, whatever is moved and cancelled."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdserve.gossip.timer_queue import Key, TimerQueue

KEYS = st.tuples(st.just("k"), st.integers(0, 5))


@given(st.lists(st.tuples(KEYS, st.one_of(st.none(), st.integers(0, 20))), max_size=80))
def test_it_behaves_like_a_dictionary_that_is_sorted(changes):
    agenda = TimerQueue()
    model: dict[Key, int] = {}
    for key, due in changes:
        if due is None:
            agenda.cancel(key)
            model.pop(key, None)
        else:
            agenda.set(key, due)
            model[key] = due
        assert agenda.first == min(model.values(), default=None)
        assert len(agenda) == len(model)
    taken = list(agenda.take(10))
    assert sorted(taken) == sorted(key for key, due in model.items() if due <= 10)
    assert [model[key] for key in taken] == sorted(model[key] for key in taken)


def test_what_is_cancelled_while_taking_does_not_come():
    agenda = TimerQueue()
    agenda.set(("a", ""), 1.0)
    agenda.set(("b", ""), 2.0)
    for key in agenda.take(3.0):
        assert key == ("a", "")
        agenda.cancel(("b", ""))


def test_moving_one_appointment_for_ever_takes_no_memory():
    agenda = TimerQueue()
    agenda.set(("first", ""), 0.0)
    for i in range(10_000):
        agenda.set(("moved", ""), float(i))
    assert len(agenda._heap) < 100

from __future__ import annotations

from dataclasses import replace

from pdserve.planner.changes.ids import change_id
from pdserve.planner.rules.tenure import Tenure
from tests.planner.support import MODEL, life, worker

OURS = change_id(MODEL, "decode", 1, 1, 0)


def test_dwell_and_switches_are_counted_by_life():
    tenure, one = Tenure(3600.0), worker(1, "decode")
    tenure.see(0.0, [one], ())
    assert tenure.dwell(50.0, life(1)) == 50.0
    tenure.see(60.0, [replace(one, mode="prefill")], (life(1),))
    assert tenure.dwell(100.0, life(1)) == 40.0
    assert tenure.switches(100.0, life(1)) == 1
    assert tenure.switches(3660.0, life(1)) == 0
    tenure.see(100.0, [replace(one, mode="prefill", life=life(1, 2))], ())
    assert tenure.dwell(110.0, life(1, 2)) == 10.0
    assert tenure.dwell(110.0, life(1)) == 0.0


def test_what_was_started_by_hand_is_held_for_an_hour():
    tenure, one = Tenure(3600.0), worker(1)
    tenure.see(0.0, [one], ())
    assert tenure.may_remove(3599.0, one) == "w1 was started by hand"
    assert tenure.may_remove(3600.0, one) == ""
    mine = worker(2, change=OURS)
    tenure.see(0.0, [mine], ())
    assert tenure.may_remove(0.0, mine) == ""


def test_a_mode_that_was_set_by_hand_is_held_and_one_of_ours_is_not():
    tenure = Tenure(3600.0)
    before = [worker(1, "decode", change=OURS), worker(2, "decode", change=OURS)]
    tenure.see(0.0, before, ())
    after = [replace(one, mode="prefill") for one in before]
    tenure.see(5.0, after, (life(2),))
    assert tenure.may_switch(3604.0, after[0]) == "the mode of w1 was set by hand"
    assert tenure.may_switch(3605.0, after[0]) == ""
    assert tenure.may_switch(5.0, after[1]) == ""


def test_a_pin_has_no_end():
    tenure, one = Tenure(3600.0), worker(1, change=OURS, pinned=True)
    tenure.see(0.0, [one], ())
    assert tenure.may_remove(1e9, one) == tenure.may_switch(1e9, one) == "w1 is pinned"

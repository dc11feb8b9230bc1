from __future__ import annotations

import pytest

from pdserve.planner.rules.sanity import Sanity, blindness
from tests.planner.support import config, demand, pool

CONFIG = config()


@pytest.mark.parametrize(
    ("view", "says"),
    [
        (None, "no router has reported"),
        (demand(1.0, known=False, faults="router r1 is silent"), "router r1 is silent"),
        (demand(1.0, known=False), "no router has reported"),
        (demand(1.0, poor=True), "predictions have been wrong"),
        (demand(1.0, first_tokens=19), "19 first tokens seen of 20 needed"),
        (demand(float("nan")), "work is not a number"),
        (demand(1.0, held_wait=float("inf")), "held_wait is not a number"),
        (demand(1.0), ""),
        (demand(1.0, faults="router r2 is silent"), ""),
        # No arrivals are data: nothing has to be predicted, so nothing can be predicted badly.
        (demand(0.0, first_tokens=0, poor=True), ""),
        (demand(0.0, known=False), "no router has reported"),
        (demand(0.0, first_tokens=0, held=1), "0 first tokens seen"),
    ],
)
def test_blindness(view, says):
    found = blindness(CONFIG, view)
    assert says in found
    assert bool(found) is bool(says)


def test_waiting_requests_add_on_two_of_three_ticks():
    sanity, target = Sanity(CONFIG), pool(ttft=2.0)
    waits = demand(1.0, poor=True, held=1, held_wait=1.01)
    short = demand(1.0, poor=True, held=1, held_wait=0.99)
    none = demand(1.0, poor=True, held=0, held_wait=9.0)
    views = (waits, short, waits, none, short, waits)
    found = [sanity.look(5.0 * at, target, view).add for at, view in enumerate(views)]
    assert found == [False, False, True, False, False, False]


def test_without_an_objective_nothing_waits_too_long():
    sanity = Sanity(CONFIG)
    waits = demand(1.0, poor=True, held=1, held_wait=1e6)
    assert not any(sanity.look(at, pool(ttft=None), waits).add for at in range(5))


def test_the_alarm_comes_after_a_minute_and_goes_with_its_cause():
    sanity, target = Sanity(CONFIG), pool()
    assert sanity.look(0.0, target, None).alarm == ""
    assert sanity.look(59.0, target, None).alarm == ""
    assert "for 60 s: no router" in sanity.look(60.0, target, None).alarm
    assert sanity.look(61.0, target, demand(1.0)) == ("", "", False, "")
    assert sanity.look(62.0, target, None).alarm == ""


def test_a_silent_router_is_a_doubt_and_no_blindness():
    sight = Sanity(CONFIG).look(0.0, pool(), demand(1.0, faults="r2 is silent"))
    assert (sight.blind, sight.doubt) == ("", "r2 is silent")

from __future__ import annotations

from itertools import permutations

import pytest

from pdserve.messages.planner_orders import PlannerWish
from pdserve.planner.driver.wishes import Wishes


def wish(at: float, until: float, sort: str = "pause", **fields: object) -> PlannerWish:
    return PlannerWish(model="m", sort=sort, at=at, until=until, by="eve", **fields)  # type: ignore[arg-type]


def test_a_pause_holds_until_its_time_and_a_pin_has_its_workers() -> None:
    wishes = Wishes()
    assert wishes.hear(10.0, [wish(10.0, 20.0), wish(10.0, 20.0, "pin", mix={"decode": 2})])
    assert wishes.paused(19.0)["m"].startswith("eve until ")
    assert wishes.pins(19.0) == {"m": {"decode": 2}}
    assert (wishes.paused(20.0), wishes.pins(20.0)) == ({}, {})


def test_the_newest_holds_in_whatever_order_they_come() -> None:
    said = [wish(1.0, 100.0), wish(2.0, 2.0), wish(3.0, 50.0)]
    for order in permutations(said):
        wishes = Wishes()
        for one in order:
            wishes.hear(4.0, [one])
        assert wishes.all == (said[2],)
    resumed = Wishes()
    resumed.hear(4.0, said[:2])
    assert resumed.paused(4.0) == {}


def test_what_is_known_is_no_news_and_an_old_copy_does_not_return() -> None:
    wishes = Wishes()
    assert wishes.hear(4.0, [wish(2.0, 2.0)])
    assert not wishes.hear(4.0, [wish(2.0, 2.0), wish(1.0, 100.0)])
    assert wishes.paused(4.0) == {}
    wishes.hear(4.0 + 3600.0, [])
    assert wishes.all == ()


def test_two_of_the_same_moment_end_alike_on_all_planners() -> None:
    one = PlannerWish(model="m", sort="pause", at=1.0, until=9.0, by="a")
    other = PlannerWish(model="m", sort="pause", at=1.0, until=9.0, by="b")
    for order in ([one, other], [other, one]):
        wishes = Wishes()
        wishes.hear(2.0, order)
        assert wishes.all == (other,)


def test_there_are_only_so_many() -> None:
    wishes = Wishes()
    many = [PlannerWish(model=f"m{i}", sort="pause", at=1.0, until=9.0) for i in range(600)]
    wishes.hear(2.0, many)
    assert len(wishes.all) == 512
    assert wishes.full("m600", "pause")
    assert wishes.full("m0", "pin")
    assert not wishes.full("m0", "pause")
    assert not Wishes().full("m0", "pause")


def said(wishes: Wishes, wall: float, seconds: float = 0.0) -> None:
    wishes.enter(wall, model="m", sort="pause", by="eve", seconds=seconds)


@pytest.mark.parametrize("back", [0.0, 10.0, 86400.0])
def test_the_last_word_holds_on_a_clock_that_is_behind(back: float) -> None:
    """The first word came from a planner whose clock is ahead, or this one has gone back."""
    wishes = Wishes()
    said(wishes, 1e6, 3600.0)
    said(wishes, 1e6 - back)
    assert wishes.paused(1e6 - back) == {}
    said(wishes, 1e6 - back, 60.0)
    assert wishes.paused(1e6 - back + 59.0)
    assert wishes.paused(1e6 - back + 60.0) == {}


def test_one_that_ended_ends_on_a_clock_that_is_behind_too() -> None:
    ahead, behind = Wishes(), Wishes()
    said(ahead, 1e6, 3600.0)
    said(ahead, 1e6 + 1.0)
    assert behind.hear(1e6 - 500.0, ahead.all)
    assert behind.paused(1e6 - 500.0) == {}

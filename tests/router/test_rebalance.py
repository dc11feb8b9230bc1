"""Who is asked to move, from a queue to a worker that would begin it sooner."""

from __future__ import annotations

from random import Random

import pytest
from msgspec.structs import replace

from pdserve.ids import NodeId
from pdserve.messages.request import FirstTokenStats
from pdserve.router.admission_queue import PlacedRequest
from pdserve.router.bookings import Booking, DecisionBasis
from pdserve.router.config import RouterConfig
from pdserve.router.core import RouterCore
from pdserve.router.policies.least_loaded import choose
from pdserve.router.rebalance import (
    RebalanceGroup,
    Rebalancer,
    RebalanceTarget,
    WaitingBooking,
    waiting_bookings,
)
from tests.router.support import facts, life, load, route

F = life("f")
STARTED = FirstTokenStats(0, 0.0, 0.0, 0.0)


def booking(id: int, work: float = 1.0, placed: float = 100.0, **details) -> Booking:
    return Booking(id, life("w1"), 1, 1000, work=round(work * 1e6), placed=placed, **details)


def place(node: str, wait: float = 0.0, room: int = 8, idle: bool = True) -> RebalanceTarget:
    return RebalanceTarget(NodeId(node), wait, room, idle)


def one(id: int, here: float = 5.0, late: float = 0.0, **details) -> WaitingBooking:
    return WaitingBooking(id, NodeId("w1"), here, late, 1000, **details)


IDLE = (place("w2"),)


def group(*those: WaitingBooking, places=IDLE, cost=1.0, **details) -> RebalanceGroup:
    return RebalanceGroup(those, places, lambda node, tokens: cost, **details)


def settled(*those: WaitingBooking, **details) -> list[int]:
    """What is asked for once it has been worth it for long enough."""
    balancer = Rebalancer()
    assert balancer.look(100.0, [group(*those, **details)]) == []
    return balancer.look(100.6, [group(*those, **details)])


# ---------------------------------------------------------------------- how long it waits here


def test_one_waits_for_all_before_it_and_for_itself():
    found = waiting_bookings(100.0, [booking(1), booking(2), booking(3)], 100.0, 3)
    assert [one.here for one in found] == [1.0, 2.0, 3.0]
    assert all(one.late == 0.0 for one in found)


def test_what_has_passed_is_taken_from_the_first_and_never_all_of_it():
    found = waiting_bookings(100.5, [booking(1), booking(2)], 100.0, 2)
    assert [one.here for one in found] == pytest.approx([0.5, 1.5])
    found = waiting_bookings(107.0, [booking(1, placed=107.0), booking(2, placed=107.0)], 100.0, 2)
    assert [one.here for one in found] == pytest.approx([0.1, 1.1])


def test_who_is_late_is_late_for_as_long_again():
    dispatch = DecisionBasis("m", predicted_ttft=0.5)
    (found,) = waiting_bookings(104.0, [booking(1, dispatch=dispatch)], 100.0, 1)
    assert [found.late, found.here] == pytest.approx([3.5, 3.5])


def test_those_that_are_being_computed_stay():
    found = waiting_bookings(100.0, [booking(1), booking(2), booking(3)], 100.0, 2)
    assert [one.booking for one in found] == [2, 3]
    assert waiting_bookings(100.0, [booking(1)], 100.0, 0) == []


# ---------------------------------------------------------------------- who moves


def test_a_move_is_asked_for_when_it_has_been_worth_it_for_a_while():
    balancer = Rebalancer()
    assert balancer.look(100.0, [group(one(1))]) == []
    assert balancer.look(100.25, [group(one(1))]) == []
    assert balancer.look(100.5, [group(one(1))]) == [1]


def test_what_was_not_worth_it_in_between_begins_anew():
    balancer = Rebalancer()
    balancer.look(100.0, [group(one(1))])
    balancer.look(100.25, [group(one(1, here=1.1))])
    assert balancer.look(100.5, [group(one(1))]) == []
    assert balancer.look(101.0, [group(one(1))]) == [1]


@pytest.mark.parametrize(
    ("here", "cost", "moves"),
    [(0.3, 0.06, False), (0.4, 0.1, True), (10.0, 7.5, False), (10.0, 6.5, True)],
)
def test_it_must_save_a_quarter_of_a_second_and_a_third_of_the_time(here, cost, moves):
    assert settled(one(1, here=here), cost=cost) == [1] * moves


def test_nobody_moves_to_where_it_is_or_to_where_no_room_is():
    assert settled(one(1), places=(place("w1"),)) == []
    assert settled(one(1), places=(place("w2", room=0),)) == []
    assert settled(one(1, sequences=3), places=(place("w2", room=2),)) == []
    assert settled(one(1), places=()) == []


def test_each_move_makes_the_place_worse_for_the_next():
    those = [one(id, here=5.0 + id) for id in range(1, 10)]
    assert settled(*those, cost=3.0) == [9, 8]  # 14 > 3, 13 > 6; not 12 > 9


def test_only_a_few_at_a_time_and_those_that_gain_most():
    those = [one(id, here=5.0 + id) for id in range(1, 10)]
    assert settled(*those, cost=0.1) == [9, 8, 7, 6]


def test_the_same_one_is_left_alone_for_a_while():
    balancer = Rebalancer()
    balancer.look(100.0, [group(one(1))])
    assert balancer.look(101.0, [group(one(1))]) == [1]
    for tenths in range(1, 50):
        assert balancer.look(101.0 + tenths / 10, [group(one(1))]) == []
    assert balancer.look(106.0, [group(one(1))]) == [1]


def test_where_predictions_are_poor_only_the_late_move_and_only_to_the_idle():
    poor = {"trusted": False}
    assert settled(one(1, here=9.0), **poor) == []
    assert settled(one(1, here=9.0, late=9.0), **poor) == [1]
    busy = (place("w2", idle=False),)
    assert settled(one(1, late=9.0), places=busy, **poor) == []
    assert settled(one(1, late=9.0), one(2, late=8.0), **poor) == [1]


def test_nothing_is_remembered_of_bookings_that_are_gone():
    balancer = Rebalancer()
    balancer.look(100.0, [group(one(1), one(2))])
    balancer.look(101.0, [group(one(1), one(2))])
    balancer.look(102.0, [])
    assert balancer._since == balancer._told == {}


# ---------------------------------------------------------------------- with a router core


class World:
    """Two workers; all work has been given to the first while the second was away."""

    def __init__(self, uncomputed: int = 0, decode: bool = False, **request) -> None:
        self.now = 100.0
        self.core = RouterCore(
            RouterConfig(hold_work=0.0), choose, Random(1), clock=lambda: self.now
        )
        self.core.worker(self.now, facts("w1", max_sequences=64, decode=decode))
        self.ids = []
        for _ in range(6):
            outcome = self.core.offer(
                self.now, F, replace(route(prompt_tokens=10_000), **request), lambda outcome: None
            )
            assert isinstance(outcome, PlacedRequest)
            self.ids.append(outcome.booking.id)
            self.core.holds(self.now, life("w1"), outcome.booking.id, None)
        report = load(2, waiting=4, uncomputed_tokens=uncomputed)
        self.core.load(life("w1"), report, self.now)
        self.core.worker(self.now, facts("w2", max_sequences=64))

    def moves(self) -> list[int]:
        """Over a second."""
        found = []
        for _ in range(5):
            found += [booking.id for booking in self.core.rebalance(self.now)]
            self.now += 0.25
        self.core.check()
        return found


def test_the_last_ones_in_a_long_queue_move_to_a_worker_that_has_come():
    world = World()
    assert world.moves() == [world.ids[5], world.ids[4]]  # the next would gain too little
    assert world.core.numbers.moves_asked == 2


def test_nobody_moves_without_another_worker_or_without_a_reason():
    world = World()
    world.core.gone(world.now, life("w2"))
    assert world.moves() == []
    world = World()
    world.core.load(life("w1"), load(6, waiting=0), world.now)
    assert world.moves() == []


def test_whom_the_worker_has_not_got_yet_or_has_begun_stays():
    world = World()
    world.core.holds(world.now, life("w1"), world.ids[5], STARTED)
    outcome = world.core.offer(
        world.now, F, replace(route(prompt_tokens=10_000), allowed=("w1",)), lambda outcome: None
    )
    assert isinstance(outcome, PlacedRequest)
    assert not {world.ids[5], outcome.booking.id} & set(world.moves())


def test_who_is_bound_to_its_worker_or_has_moved_enough_stays():
    assert World(allowed=("w1",)).moves() == []
    assert World(attempt=4).moves() == []
    assert World(attempt=3).moves() != []


def test_who_may_wait_for_kv_that_another_worker_sends_stays():
    # The four that wait have 40,000 tokens; what a prefill worker computes is not among those
    # that its decode worker says it has still to compute.
    assert World(decode=True).moves() == []
    assert World(decode=True, uncomputed=39_999).moves() == []
    assert World(decode=True, uncomputed=40_000).moves() != []


def test_a_worker_whose_pool_is_full_is_no_place():
    world = World()
    world.core.load(life("w2"), load(blocks_total=100, blocks_used=95), world.now)
    assert world.moves() == []

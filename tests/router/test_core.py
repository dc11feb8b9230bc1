"""The pure router as its service sees it: short stories over all of its parts."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from pdserve.errors import ConfigError, ModelNotFound, NotReady, NoWorker, Overloaded
from pdserve.router.admission_queue import PlacedRequest
from pdserve.router.bookings import Booking, BookingEnd
from pdserve.router.config import RouterConfig
from pdserve.router.core import RouterCore
from pdserve.router.policies import weighted_round_robin
from pdserve.router.policies.least_loaded import choose
from pdserve.router.worker_table import WorkerFacts
from tests.router.support import booked, facts, life, load, route

if TYPE_CHECKING:
    from pdserve.ids import NodeLife
    from pdserve.messages.routing import RouteRequest

F, W1, W2, R = life("f"), life("w1"), life("w2"), life("r")


def placed(core: RouterCore, now: float, frontend: NodeLife, request: RouteRequest) -> Booking:
    """Of a request that is not held."""
    answer = core.offer(now, frontend, request, lambda _: None)
    assert isinstance(answer, PlacedRequest)
    return answer.booking


class World:
    """A router core with workers, and a clock."""

    def __init__(self, *nodes: str, **changes):
        self.now = 0.0
        self.ends: list[tuple[int, BookingEnd]] = []
        config = RouterConfig(booking_ttl=10.0, gone_model_memory=300.0, hold_work=0, **changes)
        self.core = RouterCore(config, choose, Random(1), self.ended)
        for node in nodes:
            self.core.worker(self.now, facts(node))

    def ended(self, booking: Booking, why: BookingEnd) -> None:
        self.ends.append((booking.id, why))

    def ask(self, model="m", *excluded: str, frontend=F, n=1) -> Booking:
        booking = placed(self.core, self.now, frontend, route(model, *excluded, n=n))
        self.core.bookings.check()
        return booking

    def spread(self, count: int) -> Counter[str]:
        return Counter(self.ask().worker.node for _ in range(count))


def test_a_burst_is_spread_before_anybody_reports():
    assert set(World("w1", "w2", "w3").spread(30).values()) == {10}


def test_a_burst_between_two_reports_is_spread_although_workers_take_at_once():
    """The report is old, and every booking is seen: none may be forgotten in between."""
    world = World("w1", "w2")
    for worker in (W1, W2):
        world.core.load(worker, load())
    placed: Counter[str] = Counter()
    for _ in range(40):
        booking = world.ask()
        world.core.bookings.held(booking.worker, booking.id)
        placed[booking.worker.node] += 1
    assert set(placed.values()) == {20}


def test_idle_workers_take_turns_even_if_each_request_ends_before_the_next():
    world, chosen = World("w1", "w2", "w3"), Counter[str]()
    for _ in range(9):
        booking = world.ask()
        world.core.bookings.release(booking.id)
        chosen[booking.worker.node] += 1
    assert set(chosen.values()) == {3}


def test_work_of_others_and_size_count():
    world = World("w1", "w2")
    world.core.load(W1, load(4))
    world.core.load(W2, load(4, max_sequences=16))
    world.core.bookings.peer_up(R)
    world.core.bookings.peer_placed(R, booked(5, W2, 2))
    assert world.spread(8) == {"w2": 6, "w1": 2}  # 12 of 16, 6 of 8


def test_choices_count_each():
    world = World("w1", "w2")
    first = world.ask(n=6).worker
    assert world.spread(6) == {"w1" if first == W2 else "w2": 6}


def test_a_request_that_is_traced_is_told_what_its_decision_rests_on():
    world = World("w1", "w2")
    world.ask(n=3)
    told = []
    for trace in (True, False):
        asked = replace(route("m"), trace=trace)
        answer = world.core.offer(world.now, F, asked, lambda _: None)
        assert isinstance(answer, PlacedRequest)
        routed = answer.routed
        told.append((routed.candidates, routed.waiting, routed.sequences))
    assert told == [(2, 0, 0), (0, 0, 0)]


def test_a_retry_goes_elsewhere_and_the_last_worker_left_says_so():
    world = World("w1", "w2")
    first = world.ask()
    world.core.bookings.release(first.id)
    second = world.ask("m", first.worker.node)
    assert second.worker != first.worker
    with pytest.raises(NoWorker, match="excludes it, or has failed there"):
        world.ask("m", "w1", "w2")


def test_one_in_doubt_is_asked_only_when_nobody_else_is_left():
    world = World("w1", "w2")
    world.core.worker(0.0, facts("w1", suspect=True))
    assert world.spread(5) == {"w2": 5}
    world.core.load(W2, load(ready=False))
    assert world.spread(2) == {"w1": 2}
    world.core.worker(0.0, facts("w1", draining=True))
    with pytest.raises(NotReady):
        world.ask()


def test_a_model_from_start_to_oblivion():
    world = World()
    with pytest.raises(ModelNotFound):
        world.ask()
    world.core.worker(0.0, WorkerFacts(W1, ()))
    with pytest.raises(ModelNotFound):
        world.ask()
    world.core.worker(0.0, facts("w1"))
    booking = world.ask()
    world.core.gone(0.0, W1)
    assert world.ends == [(booking.id, BookingEnd.WORKER_GONE)]
    with pytest.raises(NoWorker) as caught:
        world.ask()
    assert caught.value.retry_after == RouterConfig().retry_after
    world.now = 300.0
    world.core.sweep(world.now)
    with pytest.raises(ModelNotFound):
        world.ask()


def test_a_full_ledger_is_overload():
    world = World("w1", max_bookings=1)
    booking = world.ask()
    with pytest.raises(Overloaded) as caught:
        world.ask()
    assert caught.value.retry_after is not None
    world.core.bookings.release(booking.id)
    world.ask()


def test_a_worker_that_never_takes_its_requests_is_not_avoided_for_ever():
    world = World("w1", "w2")
    lost = world.ask()
    world.now = 10.0
    world.core.sweep(world.now)
    assert world.ends == [(lost.id, BookingEnd.NEVER_SEEN)]
    assert set(world.spread(2).values()) == {1}


def test_a_new_life_starts_with_nothing():
    world = World("w1")
    world.core.load(W1, load(8))
    old = world.ask()
    world.core.worker(0.0, facts("w1", epoch=2))
    assert world.ends == [(old.id, BookingEnd.WORKER_GONE)]
    assert world.ask().worker == life("w1", 2)
    world.core.gone(0.0, W1)  # late word of the old one
    assert world.ask().worker == life("w1", 2)


def test_whoever_dies_takes_his_bookings_along():
    world = World("w1", "w2")
    other = life("g")
    world.core.bookings.peer_up(R)
    world.core.bookings.peer_placed(R, booked(5, W1))
    mine, theirs = world.ask(frontend=F), world.ask(frontend=other)
    for gone in (F, R):
        world.core.gone(0.0, gone)
    assert world.ends == [(mine.id, BookingEnd.FRONTEND_GONE)]
    assert world.core.bookings.release(theirs.id)
    for worker in (W1, W2):
        assert world.core.bookings.load(worker.node) == (0, 0)


def test_without_reports_all_bookings_count_again():
    world = World("w1", "w2")
    for worker in (W1, W2):
        world.core.load(worker, load())
    for booking in (world.ask("m", "w2"), world.ask("m", "w2")):
        world.core.bookings.held(booking.worker, booking.id)
    world.core.load(W1, load(2))
    world.core.load(W1, None)
    assert world.spread(2) == {"w2": 2}


def test_what_a_policy_raises_leaves_no_booking():
    world = World("w1")

    def broken(request, state, random):
        raise ZeroDivisionError

    world.core = RouterCore(RouterConfig(hold_work=0), broken, Random(1))
    world.core.worker(0.0, facts("w1"))
    with pytest.raises(ConfigError, match="policy ttft failed"):
        world.ask()
    assert len(world.core.bookings) == 0


def test_policies_that_take_turns_by_size_are_told_how_many_there_were():
    """Shares are those of the sizes only if the count moves on."""
    core = RouterCore(RouterConfig(hold_work=0), weighted_round_robin.choose, Random(1))
    for node, size in (("w1", 8), ("w2", 24)):
        core.worker(0.0, facts(node, max_sequences=size))
    shares = Counter(str(placed(core, 0.0, F, route("m")).worker.node) for _ in range(64))
    assert abs(shares["w2"] - 48) <= 2


def test_the_block_with_the_last_token_is_never_believed_to_be_reusable():
    """An engine computes the last token of every prompt, for its logits."""
    core = RouterCore(RouterConfig(), choose, Random(1))
    core.worker(0.0, facts("w1"))
    names = bytes(range(16))
    for tokens, overlap in ((64, 0), (64, 1), (65, 2)):
        request = replace(route("m"), prompt_tokens=tokens, names=names, block_size=32)
        answer = core.offer(0.0, F, request, lambda _: None)
        assert isinstance(answer, PlacedRequest)
        assert answer.routed.overlap_blocks == overlap

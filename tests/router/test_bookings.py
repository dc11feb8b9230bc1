"""The ledger: each way a booking ends, once; what counts when; and a machine against a model."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import TYPE_CHECKING, NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pdserve.messages.request import FirstTokenStats
from pdserve.messages.routing import BookingRecord
from pdserve.router.bookings import (
    BookedLoad,
    Booking,
    BookingEnd,
    Bookings,
    LaneBytes,
    PendingPrefills,
)
from pdserve.router.config import RouterConfig
from tests.router.support import booked, life
from tests.support.seeds import is_long

if TYPE_CHECKING:
    from pdserve.ids import NodeLife

W, V, F, G, R = life("w"), life("v"), life("f"), life("g"), life("r")
TTL = 10.0
NOTHING = BookedLoad(0, 0)


class Ledger(Bookings):
    """One with a worker, a frontend and another router; it remembers what ended."""

    def __init__(self, **changes):
        self.heard: list[tuple[int, BookingEnd]] = []
        config = RouterConfig(booking_ttl=TTL, **changes)
        super().__init__(
            config, Random(1), lambda booking, why: self.heard.append((booking.id, why))
        )
        self.worker_up(W)
        self.peer_up(R)

    def book(self, now=0.0, worker=W, frontend=F, sequences=1, tokens=100) -> int:
        return self.place(now, worker, frontend, sequences, tokens).id


@pytest.fixture
def ledger():
    made = Ledger()
    yield made
    made.check()


# ------------------------------------------------------------------ what counts


def test_a_decision_counts_at_once_one_sequence_per_choice(ledger):
    ledger.book(sequences=3, tokens=500)
    ledger.book(sequences=1, tokens=70)
    assert ledger.load(W.node) == (4, 570)


def test_without_a_report_what_was_seen_counts_too(ledger):
    ledger.held(W, ledger.book())
    assert ledger.load(W.node) == (1, 100)


def test_a_report_contains_what_the_worker_holds_and_nothing_else(ledger):
    seen, _placed = ledger.book(tokens=1), ledger.book(tokens=2)
    ledger.held(W, seen)
    ledger.reported(W)
    assert ledger.load(W.node) == (1, 2)


def test_taken_between_two_reports_it_counts_until_the_second(ledger):
    ledger.reported(W)
    ledger.held(W, ledger.book())
    assert ledger.load(W.node) == (1, 100)
    ledger.reported(W)
    assert ledger.load(W.node) == NOTHING


def test_when_the_reports_stop_everything_counts_again(ledger):
    ledger.held(W, ledger.book())
    ledger.reported(W)
    ledger.report_lost(W)
    assert ledger.load(W.node) == (1, 100)
    ledger.reported(W)
    assert ledger.load(W.node) == NOTHING


def test_nobody_knows_a_worker_that_is_not_up(ledger):
    assert ledger.load(V.node) == NOTHING
    with pytest.raises(ValueError, match="v cannot be booked"):
        ledger.book(worker=V)
    with pytest.raises(ValueError, match="w cannot be booked"):
        ledger.book(worker=life("w", 2))


def test_a_full_ledger_says_so():
    ledger = Ledger(max_bookings=2)
    ledger.book()
    assert not ledger.full
    first = ledger.book()
    assert ledger.full
    with pytest.raises(ValueError, match="cannot be booked"):
        ledger.book()
    ledger.release(first)
    ledger.book()


def test_ids_are_63_bits_never_zero_and_differ_between_routers():
    ids = [Bookings(RouterConfig(), Random(seed)) for seed in range(3)]
    made = []
    for ledger in ids:
        ledger.worker_up(W)
        made += [ledger.place(0.0, W, F, 1, 1).id for _ in range(3)]
    assert len(set(made)) == 9
    assert all(0 < id < 1 << 63 for id in made)


def test_an_id_in_use_is_not_given_again_when_the_counter_comes_round(ledger):
    first = ledger.book()
    ledger._count = (1 << 32) - 1
    ids = [ledger.book() for _ in range(3)]
    assert len({first, *ids}) == 4


def test_an_id_that_another_router_uses_is_not_given(ledger):
    taken = ledger.book() + 1
    ledger.peer_placed(R, booked(taken, W))
    assert ledger.book() != taken
    assert ledger.load(W.node) == (3, 300)


def test_touched_names_the_workers_whose_load_may_have_changed(ledger):
    ledger.worker_up(V)
    ledger.touched.clear()
    id = ledger.book(worker=V)
    assert ledger.touched == {V.node}
    ledger.touched.clear()
    ledger.release(id)
    assert ledger.touched == {V.node}


# ------------------------------------------------------------------ how it ends


def test_the_worker_lets_it_go(ledger):
    id = ledger.book()
    ledger.held(W, id)
    ledger.let_go(W, id)
    ledger.let_go(W, id)
    assert not ledger.release(id)
    assert ledger.heard == [(id, BookingEnd.LET_GO)]
    assert ledger.load(W.node) == NOTHING


@pytest.mark.parametrize("report", [False, True])
@pytest.mark.parametrize("held", [False, True])
def test_the_frontend_releases_it(ledger, held, report):
    id = ledger.book()
    if held:
        ledger.held(W, id)
    if report:
        ledger.reported(W)
    assert ledger.release(id)
    assert not ledger.release(id)
    assert ledger.heard == [(id, BookingEnd.RELEASED)]
    assert ledger.load(W.node) == NOTHING


def test_a_late_word_of_the_worker_revives_nothing(ledger):
    id = ledger.book()
    ledger.release(id)
    for _ in range(2):
        ledger.held(W, id)
        assert ledger.load(W.node) == NOTHING
        ledger.reported(W)
        ledger.expire(1e9)
        ledger.let_go(W, id)
    assert ledger.heard == [(id, BookingEnd.RELEASED)]


def test_the_worker_is_gone(ledger):
    ids = [ledger.book(), ledger.book()]
    ledger.held(W, ids[0])
    ledger.reported(W)
    ledger.worker_gone(W)
    assert Counter(ledger.heard) == Counter((id, BookingEnd.WORKER_GONE) for id in ids)
    assert ledger.load(W.node) == NOTHING


def test_a_new_life_of_the_worker_ends_what_the_old_one_had(ledger):
    id = ledger.book()
    ledger.worker_up(life("w", 2))
    assert ledger.heard == [(id, BookingEnd.WORKER_GONE)]
    ledger.worker_up(W)
    ledger.held(W, id)
    ledger.worker_gone(W)
    ledger.book(worker=life("w", 2))
    assert len(ledger) == 1


def test_its_frontend_is_gone(ledger):
    mine, other = ledger.book(frontend=F), ledger.book(frontend=G)
    ledger.frontend_gone(F)
    assert ledger.heard == [(mine, BookingEnd.FRONTEND_GONE)]
    assert ledger.release(other)


def test_never_seen_it_runs_out(ledger):
    first, later = ledger.book(now=0.0), ledger.book(now=1.0)
    assert ledger.expire(TTL - 0.001) == 0
    assert ledger.expire(TTL) == 1
    assert ledger.heard == [(first, BookingEnd.NEVER_SEEN)]
    ledger.release(later)
    assert ledger.expire(1e9) == 0


def test_once_seen_it_never_runs_out(ledger):
    id = ledger.book()
    ledger.held(W, id)
    ledger.report_lost(W)
    assert ledger.expire(1e9) == 0
    ledger.let_go(W, id)


def test_after_a_gap_the_worker_says_all_that_it_holds(ledger):
    ended, missed, placed = ledger.book(), ledger.book(), ledger.book()
    ledger.held(W, ended)
    ledger.reported(W)
    ledger.holds(W, [missed, 12345])
    assert ledger.heard == [(ended, BookingEnd.LET_GO)]
    assert ledger.expire(TTL) == 1  # only what no one has seen
    assert ledger.heard[1:] == [(placed, BookingEnd.NEVER_SEEN)]
    assert ledger.load(W.node) == (1, 100)


def test_each_end_is_counted(ledger):
    a, b = ledger.book(), ledger.book()
    ledger.release(a)
    ledger.expire(TTL)
    assert ledger.ended == {BookingEnd.RELEASED: 1, BookingEnd.NEVER_SEEN: 1}
    assert ledger.placed == 2
    assert [id for id, _ in ledger.heard] == [a, b]


# ------------------------------------------------------------------ other routers


def test_bookings_of_another_router_count(ledger):
    ledger.peer_placed(R, booked(5, W, 2, 300))
    ledger.peer_placed(R, booked(5, W, 2, 300))
    assert ledger.load(W.node) == (2, 300)
    assert len(ledger) == 0


def test_they_end_by_their_owners_word_only(ledger):
    ledger.peer_placed(R, booked(5, W))
    assert not ledger.release(5)
    assert ledger.expire(1e9) == 0
    ledger.frontend_gone(F)
    assert ledger.load(W.node) == (1, 100)
    ledger.peer_ended(R, 5)
    ledger.peer_ended(R, 5)
    assert ledger.load(W.node) == NOTHING
    assert ledger.heard == []


def test_or_with_their_owner(ledger):
    ledger.peer_placed(R, booked(5, W))
    ledger.peer_gone(R)
    assert ledger.load(W.node) == NOTHING
    ledger.peer_placed(R, booked(6, W))
    assert ledger.load(W.node) == NOTHING


def test_what_its_worker_let_go_counts_no_more_even_if_the_owner_repeats_it(ledger):
    ledger.peer_placed(R, booked(5, W))
    ledger.held(W, 5)
    ledger.let_go(W, 5)
    ledger.peer_placed(R, booked(5, W))
    assert ledger.load(W.node) == NOTHING


def test_a_worker_may_be_faster_than_the_other_router(ledger):
    ledger.held(W, 5)
    ledger.peer_placed(R, booked(5, W))
    assert ledger.load(W.node) == (1, 100)
    ledger.held(W, 6)
    ledger.reported(W)
    ledger.peer_placed(R, booked(6, W))
    assert ledger.load(W.node) == NOTHING


def test_a_worker_that_is_not_known_yet_is_charged_when_it_comes(ledger):
    ledger.peer_placed(R, booked(5, V))
    ledger.peer_placed(R, booked(6, life("v", 2)))
    ledger.worker_up(V)
    assert ledger.load(V.node) == (1, 100)
    ledger.worker_gone(V)
    ledger.peer_ended(R, 5)
    assert ledger.load(V.node) == NOTHING


def test_an_id_of_ours_in_anothers_mouth_changes_nothing(ledger):
    id = ledger.book()
    ledger.peer_placed(R, booked(id, W, 50))
    ledger.peer_ended(R, id)
    assert ledger.load(W.node) == (1, 100)


def test_an_own_booking_as_others_hear_of_it(ledger):
    booking = ledger.place(0.0, W, F, 2, 30)
    assert booking.record == BookingRecord(booking.id, W.node, 1, 2, 30)


# ------------------------------------------------------------------ machine


class Entry(NamedTuple):
    """A booking in the model: facts only, every load computed from scratch."""

    id: int
    worker: NodeLife
    frontend: NodeLife | None
    owner: NodeLife | None
    charge: BookedLoad
    runs_out: float


NODES = ("w1", "w2")
PEERS = (life("r1"), life("r2"))
FRONTENDS = (life("f1"), life("f1", 2), life("f2"))
indexes = st.integers(0, 1 << 16)
workers = st.builds(life, st.sampled_from(NODES), st.integers(1, 2))
charges = st.builds(BookedLoad, st.integers(0, 5), st.integers(0, 1000))


class LedgerMachine(RuleBasedStateMachine):
    """News in any order, against sets and dicts that anybody can read."""

    def __init__(self):
        super().__init__()
        self.ends: list[tuple[int, BookingEnd]] = []
        self.ledger = Bookings(RouterConfig(booking_ttl=TTL), Random(3), self.heard)
        self.now = 0.0
        self.up: set[NodeLife] = set()
        self.peers: set[NodeLife] = set()
        self.open: dict[int, Entry] = {}
        self.expected: list[tuple[int, BookingEnd]] = []
        self.dropped: set[int] = set()
        """Of other routers: no longer charged, although the owner still has it."""
        self.holding: dict[NodeLife, set[int]] = {}
        self.in_report: dict[NodeLife, set[int]] = {}
        self.foreign = 0
        self.every: list[int] = [1]
        for node in NODES:
            self.worker_up(life(node))
        for router in PEERS:
            self.peer_up(router)

    def pick(self, at: int, stale: bool) -> tuple[NodeLife, int]:
        """Where and what news is about: mostly something that is open, as in life."""
        if stale or not self.open:
            worker = sorted(self.up)[at % len(self.up)] if self.up else life("w1")
            return worker, self.every[at % len(self.every)]
        entry = sorted(self.open.values())[at % len(self.open)]
        return entry.worker, entry.id

    def heard(self, booking: Booking, why: BookingEnd) -> None:
        self.ends.append((booking.id, why))

    # ---- the model

    def finish(self, ids, why: BookingEnd) -> None:
        for id in list(ids):
            del self.open[id]
            self.expected.append((id, why))

    def own(self, **where):
        return [
            e.id
            for e in self.open.values()
            if e.owner is None and all(getattr(e, name) == value for name, value in where.items())
        ]

    def model_gone(self, worker: NodeLife) -> None:
        self.finish(self.own(worker=worker), BookingEnd.WORKER_GONE)
        self.dropped |= {e.id for e in self.open.values() if e.worker == worker}
        self.up.discard(worker)
        self.holding.pop(worker, None)
        self.in_report.pop(worker, None)

    def model_let_go(self, worker: NodeLife, id: int) -> None:
        entry = self.open.get(id)
        if entry and entry.worker == worker and id not in self.dropped:
            if entry.owner is None:
                self.finish([id], BookingEnd.LET_GO)
            else:
                self.dropped.add(id)
        self.holding[worker].discard(id)
        self.in_report[worker].discard(id)

    def model_forget(self, id: int) -> None:
        self.open.pop(id, None)
        self.dropped.discard(id)

    def load(self, worker: NodeLife) -> BookedLoad:
        counted = [
            e.charge
            for e in self.open.values()
            if e.worker == worker
            and e.id not in self.dropped
            and e.id not in self.in_report[worker]
        ]
        return BookedLoad(sum(c.sequences for c in counted), sum(c.prompt_tokens for c in counted))

    # ---- members

    def worker_up(self, worker):
        self.ledger.worker_up(worker)
        lives = [one for one in self.up if one.node == worker.node]
        if any(one.epoch >= worker.epoch for one in lives):
            return
        for one in lives:
            self.model_gone(one)
        self.up.add(worker)
        self.holding[worker], self.in_report[worker] = set(), set()
        self.dropped -= {e.id for e in self.open.values() if e.worker == worker}

    def worker_gone(self, worker):
        self.ledger.worker_gone(worker)
        if worker in self.up:
            self.model_gone(worker)

    def frontend_gone(self, frontend):
        self.ledger.frontend_gone(frontend)
        self.finish(self.own(frontend=frontend), BookingEnd.FRONTEND_GONE)

    def peer_up(self, router):
        self.ledger.peer_up(router)
        self.peers.add(router)

    def peer_gone(self, router):
        self.ledger.peer_gone(router)
        self.peers.discard(router)
        for id in [e.id for e in self.open.values() if e.owner == router]:
            self.model_forget(id)

    @rule(worker=workers, up=st.booleans())
    def worker_comes_or_goes(self, worker, up):
        (self.worker_up if up else self.worker_gone)(worker)

    @rule(router=st.sampled_from(PEERS), up=st.booleans())
    def router_comes_or_goes(self, router, up):
        (self.peer_up if up else self.peer_gone)(router)

    @rule(frontend=st.sampled_from(FRONTENDS))
    def frontend_goes(self, frontend):
        self.frontend_gone(frontend)

    # ---- decisions

    @rule(at=indexes, frontend=st.sampled_from(FRONTENDS), charge=charges)
    def place(self, at, frontend, charge):
        if not self.up:
            return
        worker = sorted(self.up)[at % len(self.up)]
        lanes: LaneBytes = (("h2d", 100 * at), ("disk_read", 10 * at)) if at % 2 else ()
        booking = self.ledger.place(
            self.now, worker, frontend, charge[0], charge[1], at, 0.1 * at, lanes=lanes
        )
        assert booking.id not in self.every
        self.every.append(booking.id)
        entry = Entry(booking.id, worker, frontend, None, charge, self.now + TTL)
        self.open[booking.id] = entry

    @rule(at=indexes, stale=st.booleans())
    def release(self, at, stale):
        _, id = self.pick(at, stale)
        ours = id in self.own()
        assert self.ledger.release(id) == ours
        if ours:
            self.finish([id], BookingEnd.RELEASED)

    @rule(seconds=st.sampled_from((0.0, 1.0, TTL / 2, TTL)))
    def pass_time(self, seconds):
        self.now += seconds
        ids = [
            e.id
            for e in self.open.values()
            if e.owner is None and e.runs_out <= self.now and e.id not in self.holding[e.worker]
        ]
        assert self.ledger.expire(self.now) == len(ids)
        self.finish(ids, BookingEnd.NEVER_SEEN)

    # ---- what workers say

    @rule(at=indexes, stale=st.booleans(), started=st.booleans())
    def held(self, at, stale, started):
        worker, id = self.pick(at, stale)
        self.ledger.held(worker, id, FirstTokenStats(0, 0.0, 0.0, 0.0) if started else None)
        if worker in self.up:
            self.holding[worker].add(id)

    @rule(at=indexes, stale=st.booleans())
    def let_go(self, at, stale):
        worker, id = self.pick(at, stale)
        self.ledger.let_go(worker, id)
        if worker in self.up:
            self.model_let_go(worker, id)

    @rule(at=indexes, chosen=st.sets(indexes, max_size=3), keep=st.booleans())
    def holds(self, at, chosen, keep):
        worker, _ = self.pick(at, False)
        ids = {self.pick(one, True)[1] for one in chosen}
        if keep:
            ids |= self.holding.get(worker, set())
        self.ledger.holds(worker, ids)
        if worker in self.up:
            for id in self.holding[worker] - ids:
                self.model_let_go(worker, id)
            self.holding[worker] |= ids

    @rule(worker=workers, there=st.booleans())
    def report(self, worker, there):
        if there:
            self.ledger.reported(worker)
        else:
            self.ledger.report_lost(worker)
        if worker in self.up:
            self.in_report[worker] = set(self.holding[worker]) if there else set()

    # ---- other routers

    def model_peer_placed(self, router: NodeLife, record: BookingRecord) -> None:
        if router in self.peers and record.booking not in self.open:
            worker = life(record.worker, record.epoch)
            charge = BookedLoad(record.sequences, record.prompt_tokens)
            self.open[record.booking] = Entry(record.booking, worker, None, router, charge, 0.0)

    @rule(router=st.sampled_from(PEERS), worker=workers, charge=charges, early=st.booleans())
    def peer_placed(self, router, worker, charge, early):
        self.foreign += 1  # the lower bits of a router of its own
        if early and worker in self.up:  # the worker's word came first
            self.ledger.held(worker, self.foreign)
            self.holding[worker].add(self.foreign)
        record = booked(self.foreign, worker, *charge)
        self.ledger.peer_placed(router, record)
        self.ledger.peer_placed(router, record)
        self.model_peer_placed(router, record)
        self.every.append(record.booking)

    @rule(router=st.sampled_from(PEERS), at=indexes, stale=st.booleans())
    def peer_ended(self, router, at, stale):
        _, id = self.pick(at, stale)
        self.ledger.peer_ended(router, id)
        if id in self.open and self.open[id].owner == router:
            self.model_forget(id)

    # ---- what always holds

    @invariant()
    def it_adds_up(self):
        self.ledger.check()
        assert len(self.ledger) == len(self.own())

    @invariant()
    def loads_are_as_in_the_model(self):
        for node in NODES:
            lives = [one for one in self.up if one.node == node]
            expected = self.load(lives[0]) if lives else NOTHING
            assert self.ledger.load(life(node).node) == expected

    @invariant()
    def each_ends_once_for_the_right_reason(self):
        assert Counter(self.ends) == Counter(self.expected)
        assert len({id for id, _ in self.ends}) == len(self.ends)

    def teardown(self):
        for router in PEERS:
            self.peer_gone(router)
        for worker in sorted(self.up):
            self.worker_gone(worker)
        assert len(self.ledger) == 0
        assert self.ledger.expire(1e9) == 0
        assert all(self.ledger.prefills(life(node).node) == PendingPrefills() for node in NODES)
        self.each_ends_once_for_the_right_reason()
        self.ledger.check()


TestLedgerMachine = pytest.mark.timeout(900)(LedgerMachine.TestCase)
TestLedgerMachine.settings = settings(
    max_examples=1500 if is_long() else 100, stateful_step_count=40, deadline=None
)

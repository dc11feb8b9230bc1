"""What bookings weigh until their first token: work, its head, and what peers are believed."""

from __future__ import annotations

from random import Random

import pytest

from pdserve.messages.request import FirstTokenStats
from pdserve.messages.routing import BookingRecord
from pdserve.router.bookings import Bookings, DecisionBasis, LaneBytes, PendingPrefills
from pdserve.router.config import RouterConfig
from tests.router.support import booked, life

W, F, R, S = life("w"), life("f"), life("r"), life("s")
STARTED = FirstTokenStats(0, 0.0, 0.0, 0.0)


class Ledger(Bookings):
    """One worker, two other routers, a clock; a prompt takes a millisecond per token."""

    def __init__(self) -> None:
        self.now = 10.0
        super().__init__(
            RouterConfig(),
            Random(1),
            predict=lambda worker, prompt, cached: 0.001 * (prompt - cached),
            clock=lambda: self.now,
        )
        self.worker_up(W)
        self.peer_up(R)
        self.peer_up(S)

    def book(self, work: float = 0.1, tokens: int = 100, cached: int = 0, n: int = 1) -> int:
        dispatch = DecisionBasis("m", "ttft", work)
        return self.place(self.now, W, F, n, tokens, cached, work, dispatch).id

    @property
    def there(self) -> PendingPrefills:
        self.check()
        return self.prefills(W.node)

    @property
    def sums(self) -> tuple[int, int, float]:
        return self.there.requests, self.there.tokens, self.there.work


@pytest.fixture
def ledger():
    return Ledger()


def test_a_prompt_weighs_until_its_first_token(ledger):
    first, second = ledger.book(0.2, 100, 60), ledger.book(0.1, 50)
    assert ledger.sums == (2, 90, pytest.approx(0.3))
    ledger.held(W, first)
    assert ledger.sums == (2, 90, pytest.approx(0.3))
    assert ledger.held(W, first, STARTED).id == first
    assert ledger.sums == (1, 50, pytest.approx(0.1))
    assert ledger.load(W.node).sequences == 2
    ledger.release(second)
    assert ledger.sums == (0, 0, 0.0)


def test_a_first_token_counts_once(ledger):
    id = ledger.book()
    ledger.held(W, id, STARTED)
    assert ledger.held(W, id, STARTED) is None
    ledger.reported(W)
    ledger.let_go(W, id)
    assert ledger.sums == (0, 0, 0.0)


def test_a_prompt_that_is_all_cached_still_has_its_last_token(ledger):
    ledger.book(0.01, 64, 64)
    assert ledger.there.tokens == 1


def test_the_head_is_the_one_that_came_first_and_for_how_long_it_is(ledger):
    first = ledger.book(0.2)
    ledger.now = 11.0
    second = ledger.book(0.1)
    assert (ledger.there.head, ledger.there.as_of) == (0.2, 10.0)
    ledger.now = 12.0
    ledger.held(W, first, STARTED)
    assert (ledger.there.head, ledger.there.as_of) == (0.1, 12.0)
    ledger.now = 13.0
    ledger.held(W, ledger.book(0.4), STARTED)  # out of turn: the head stays
    assert (ledger.there.head, ledger.there.as_of) == (0.1, 12.0)
    ledger.release(second)
    assert ledger.there.head == 0.0


def test_bookings_of_others_weigh_alike(ledger):
    ledger.peer_placed(R, BookingRecord(7, W.node, W.epoch, 1, 300, 100))
    assert ledger.sums == (1, 200, pytest.approx(0.2))
    assert ledger.held(W, 7, STARTED) is None  # not ours to learn from
    assert ledger.sums == (0, 0, 0.0)
    assert ledger.load(W.node).sequences == 1


def test_a_first_token_may_be_heard_before_the_booking(ledger):
    """Workers and routers speak on streams of their own."""
    ledger.held(W, 7, STARTED)
    ledger.held(W, 8)
    assert ledger.there.strangers == 1
    ledger.peer_placed(R, booked(7, W))
    ledger.peer_placed(R, booked(8, W))
    assert (ledger.there.requests, ledger.there.strangers) == (1, 0)


def test_whom_nobody_booked_is_a_stranger_until_its_first_token(ledger):
    ledger.held(W, 7)
    ledger.held(W, 8)
    assert (ledger.there.strangers, ledger.occupied(W.node)) == (2, 2)
    ledger.held(W, 7, STARTED)
    ledger.let_go(W, 8)
    assert (ledger.there.strangers, ledger.occupied(W.node)) == (0, 0)


def test_a_stranger_remains_of_what_its_frontend_gave_back(ledger):
    """The worker has not heard of it yet, and still computes."""
    id = ledger.book()
    ledger.held(W, id)
    ledger.release(id)
    assert (ledger.there.requests, ledger.there.strangers) == (0, 1)
    ledger.let_go(W, id)
    assert ledger.there.strangers == 0


def test_what_has_left_since_the_report_is_known(ledger):
    first, second = ledger.book(n=2), ledger.book()
    ledger.held(W, first)
    ledger.reported(W)
    ledger.held(W, second)
    ledger.let_go(W, first)
    ledger.let_go(W, second)  # no report contains it
    assert ledger.there.left == 2
    ledger.reported(W)
    assert ledger.there.left == 0


def test_times_to_first_tokens_are_averaged(ledger):
    for took, mean in ((1.0, 1.0), (2.0, 1.1), (0.1, 1.0)):
        id = ledger.book()
        ledger.now += took
        ledger.held(W, id, STARTED)
        assert ledger.there.ttft == pytest.approx(mean)


def test_work_of_the_last_minutes_slides_away(ledger):
    for _ in range(6):
        ledger.release(ledger.book(1.0))
        ledger.now += 30.0
    assert ledger.there.window == pytest.approx(6.0)
    ledger.touched.clear()
    ledger.pass_to(ledger.now + 60.0)
    assert ledger.touched == {W.node}
    assert 3.0 <= ledger.there.window <= 5.0
    ledger.pass_to(ledger.now + 1000.0)
    assert ledger.there.window == 0.0


def test_a_silent_router_is_believed_less_and_less(ledger):
    """What it placed is taken to be what we placed."""
    ledger.book(0.4, 400)
    ledger.peer_placed(R, booked(7, W, prompt_tokens=100))
    ledger.peer_beat(10.0, R, True)
    ledger.peer_beat(10.0, S, True)
    ledger.judge_peers(10.2)
    assert ledger.sums == (2, 500, pytest.approx(0.5))
    ledger.peer_beat(10.6, S, True)
    ledger.judge_peers(10.65)
    assert ledger.silent_peers == ["r"]
    assert ledger.sums == (2, 650, pytest.approx(0.65))
    ledger.judge_peers(11.2)  # R's word is worth nothing; S still owns what it said, which is none
    requests, tokens, work = ledger.sums
    assert (requests, tokens) == (2, 400 + 400 + round(3 / 7 * 400))
    assert work == pytest.approx(0.8 + 0.4 * 3 / 7, abs=1e-5)
    ledger.touched.clear()
    ledger.peer_beat(11.3, R, True)
    ledger.peer_beat(11.3, S, False)
    assert ledger.sums == (2, 500, pytest.approx(0.5))
    assert ledger.touched == {W.node}
    ledger.judge_peers(99.0)
    assert ledger.silent_peers == ["r"]
    ledger.peer_gone(R)
    assert ledger.silent_peers == []
    assert ledger.sums == (1, 400, pytest.approx(0.4))


def test_an_idle_router_may_be_silent(ledger):
    ledger.peer_beat(10.0, R, False)
    ledger.judge_peers(500.0)
    assert ledger.silent_peers == []


# ---------------------------------------------------------------------- bytes in lanes


def bring_up(ledger: Ledger, size: int) -> int:
    lanes: LaneBytes = (("h2d", size), ("disk_read", size // 2))
    return ledger.place(ledger.now, W, F, 1, 100, lanes=lanes).id


def lanes_of(ledger: Ledger) -> dict[str, int]:
    ledger.check()
    return {lane: size for lane, size in ledger.reserved(W.node).items() if size}


def test_bytes_count_from_the_decision_to_the_report_that_contains_them(ledger):
    assert lanes_of(ledger) == {}
    first = bring_up(ledger, 100)
    assert lanes_of(ledger) == {"h2d": 100, "disk_read": 50}
    ledger.reported(W)  # written before the request was there
    second = bring_up(ledger, 1000)
    assert lanes_of(ledger) == {"h2d": 1100, "disk_read": 550}
    ledger.held(W, first)
    assert lanes_of(ledger) == {"h2d": 1100, "disk_read": 550}
    ledger.reported(W)
    assert lanes_of(ledger) == {"h2d": 1000, "disk_read": 500}
    ledger.report_lost(W)
    ledger.held(W, second)
    ledger.reported(W)
    assert lanes_of(ledger) == {}


def test_bytes_do_not_outlive_their_booking_nor_its_first_token(ledger):
    first, second, third = (bring_up(ledger, size) for size in (1, 10, 100))
    ledger.held(W, first, STARTED)
    assert lanes_of(ledger)["h2d"] == 110
    ledger.release(second)
    assert lanes_of(ledger)["h2d"] == 100
    ledger.let_go(W, third)
    assert lanes_of(ledger) == {}
    bring_up(ledger, 5)
    ledger.worker_gone(W)
    assert lanes_of(ledger) == {}

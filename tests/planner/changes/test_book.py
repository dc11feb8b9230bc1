"""Changes move on by what the lists show, and by nothing else."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest

from pdserve.planner.changes.book import ChangeBook, Ended, Step, Underway
from pdserve.planner.changes.ids import change_id
from pdserve.planner.changes.table import Action, ChangeState
from pdserve.planner.changes.times import KindHealth, StartTimes
from pdserve.planner.config import PlannerConfig
from pdserve.planner.tick import PlannerInput, Refusal
from tests.planner.support import KINDS, MODEL, instance, life, worker

S = ChangeState
NAME = change_id(MODEL, "decode", 1, 1, 0)


@dataclass
class Books:
    config: PlannerConfig = field(default_factory=PlannerConfig)
    now: float = 0.0

    def __post_init__(self) -> None:
        self.times = StartTimes(self.config)
        self.health = KindHealth(self.config)
        self.book = ChangeBook(self.config, self.times, self.health)

    def begin(self, step: Step) -> Underway:
        one = Underway.new(step, NAME, MODEL, 1, self.now)
        self.book.enter(one)
        return one

    def start(self) -> Underway:
        return self.begin(Step(action=Action.START, reason="r", kind="gpu", mode="decode"))

    def stop(self, **more) -> Underway:
        return self.begin(Step(action=Action.STOP, reason="r", kind="gpu", life=life(1), **more))

    def switch(self) -> Underway:
        return self.begin(Step(action=Action.SWITCH, reason="r", mode="prefill", life=life(1)))

    def see(self, *workers, instances=(), seconds: float = 5.0, **more) -> list[Ended]:
        self.now += seconds
        seen = PlannerInput(
            wall=0.0, workers=workers, instances=tuple(instances), kinds=KINDS, **more
        )
        ended = self.book.advance(self.now, MODEL, seen)
        self.book.adopt(self.now, MODEL, seen)
        return ended


def state_of(one: Underway) -> ChangeState:
    return one.state


@pytest.fixture
def books() -> Books:
    return Books()


def joined(**more):
    return worker(1, **{"mode": "decode", "change": NAME, "kind": "gpu", **more})


def running(state: str = "running", **more):
    return [instance(NAME, state, **more)]


# ---------------------------------------------------------------------- starts


def test_a_start_from_the_order_to_a_worker_that_serves(books):
    one = books.start()
    states = []
    for seen in (
        {},
        {"instances": running("pending")},
        {"instances": running("booting")},
        {"instances": running("booting"), "seconds": 20.0},
    ):
        books.see(**seen)
        states.append(one.state)
    books.see(joined(state="loading"), instances=running())
    states.append(one.state)
    (ended,) = books.see(joined(), instances=running(), seconds=7.0)
    assert states == [S.ASKED, S.PENDING, S.BOOTING, S.BOOTING, S.JOINED]
    assert (ended.state, ended.seconds) == (S.DONE, 47.0)
    assert books.times.p90("start", "gpu") == 47.0
    assert books.times.p90("boot", "gpu") == 32.0
    assert books.book.of(MODEL) == ()


def test_a_start_that_nobody_runs_is_given_up_and_its_kind_left_alone(books):
    one = books.start()
    books.see(instances=running("pending"))
    books.see(instances=running("pending"), seconds=590.0)
    assert state_of(one) is S.PENDING
    books.see(instances=running("pending"), seconds=5.0)
    assert state_of(one) is S.ENDING
    assert books.health.blocked("gpu", books.now + 599)
    assert not books.health.blocked("gpu", books.now + 600)
    assert books.health.disabled() == {}
    books.see()
    (ended,) = books.see()
    assert ended.state is S.GIVEN_UP


def test_a_start_that_no_list_ever_shows_is_given_up(books):
    """Its order is refused each time, by an actuator that answers."""
    one, refusals = books.start(), {NAME: Refusal("transient", "its disk is full")}
    books.see(refusals=refusals)
    books.see(refusals=refusals)
    books.see(refusals=refusals, seconds=580.0)
    assert state_of(one) is S.ASKED
    books.see(refusals=refusals, seconds=10.0)
    assert state_of(one) is S.ENDING
    assert books.health.blocked("gpu", books.now)
    (ended,) = books.see()
    assert ended.state is S.GIVEN_UP


def test_a_start_is_not_lost_while_nothing_of_the_cluster_is_seen(books):
    """It is this planner that is alone, and not the host."""
    one = books.start()
    books.see(worker(9), instances=running("booting"))
    for _ in range(5):
        books.see(instances=running("unknown"), seconds=300.0)
    books.see(worker(9), instances=running("unknown"), seconds=300.0)
    assert state_of(one) is S.BOOTING
    books.see(worker(9), instances=running("unknown"), seconds=400.0)
    assert state_of(one) is S.ENDING


def test_a_worker_that_never_becomes_ready_is_ended_and_counts_as_a_failure(books):
    for _ in range(20):
        books.times.add("boot", "gpu", 30.0)
    one = books.start()
    books.see(instances=running("booting"))
    books.see(joined(state="loading"), instances=running(), seconds=60.0)
    assert state_of(one) is S.JOINED
    books.see(joined(state="loading"), instances=running(), seconds=30.0)
    assert state_of(one) is S.ENDING  # three times the p90 after its process began
    assert "was not ready 90 s after" in books.health.blocked("gpu", books.now)
    assert books.times.p90("boot", "gpu") == 30.0
    (ended,) = books.see(instances=running("failed", reason="killed"))
    assert "was not ready 90 s after" in ended.change.reason, "it was killed because of that"


def test_a_kind_that_starts_fast_has_time_for_a_busy_moment(books):
    for _ in range(20):
        books.times.add("boot", "gpu", 2.0)
    one = books.start()
    books.see(joined(state="loading"), instances=running())
    books.see(joined(state="loading"), instances=running(), seconds=14.0)
    assert state_of(one) is S.JOINED
    books.see(joined(state="loading"), instances=running(), seconds=1.0)
    assert state_of(one) is S.ENDING
    assert "was not ready 15 s after" in books.health.blocked("gpu", books.now)


@pytest.mark.parametrize("state", ["pending", "booting"])
def test_a_start_on_a_host_that_is_silent_is_given_up_and_its_kind_not_blamed(books, state):
    """The host is at fault, and its kind may start elsewhere."""
    for _ in range(20):
        books.times.add("boot", "gpu", 10.0)
    one = books.start()
    books.see(worker(9), instances=running(state))
    books.see(worker(9), instances=running("unknown"))
    books.see(worker(9), instances=running("unknown"), seconds=10.0)
    books.see(worker(9), instances=running(state))
    assert state_of(one) is not S.ENDING, "it has answered meanwhile"
    books.see(worker(9), instances=running("unknown"), seconds=1.0)
    books.see(worker(9), instances=running("unknown"), seconds=31.0)
    assert state_of(one) is S.ENDING
    assert "its host has not answered for 31 s" in one.failure
    assert not books.health.blocked("gpu", books.now)
    assert books.health.disabled() == {}


def test_three_failures_disable_the_kind(books):
    for _ in range(3):
        books.start()
        books.see(instances=running("pending"))
        (ended,) = books.see(instances=running("failed", reason="no such image"))
        assert ended.change.reason == "no such image"
    assert books.health.disabled() == {"gpu": "no such image"}


def test_a_worker_of_another_mode_is_found_out_and_its_kind_disabled(books):
    books.start()
    books.see(instances=running("booting"))
    (ended,) = books.see(joined(mode="prefill", state="loading"), instances=running())
    assert (ended.state, ended.wrong) == (S.FAILED, life(1))
    assert "asked for decode" in books.health.blocked("gpu", 1e9)


def test_an_instance_that_vanishes_is_gone_at_the_second_look(books):
    one = books.start()
    books.see(instances=running("booting"))
    books.see()
    assert state_of(one) is S.BOOTING
    (ended,) = books.see()
    assert ended.state is S.FAILED


def test_an_actuator_that_does_not_answer_loses_nothing(books):
    one = books.start()
    books.see(instances=running("booting"))
    for _ in range(10):
        assert books.see(down={"fake": "connection refused"}) == []
    assert state_of(one) is S.BOOTING


@pytest.mark.parametrize(
    ("refusal", "disabled", "free_after"),
    [
        (Refusal("denied", "not in the group"), False, 60.0),
        (Refusal("exhausted", "quota"), False, 60.0),
        (Refusal("exhausted", "quota", retry_in=300.0), False, 300.0),
    ],
)
def test_a_refused_start_backs_off_in_the_actuators_words(books, refusal, disabled, free_after):
    books.start()
    (ended,) = books.see(refusals={NAME: refusal})
    assert (ended.state, ended.change.reason) == (S.FAILED, refusal.reason)
    assert refusal.reason in books.health.blocked("gpu", books.now + free_after - 1)
    assert not books.health.blocked("gpu", books.now + free_after)


def test_what_may_pass_is_tried_again(books):
    one = books.start()
    assert books.see(refusals={NAME: Refusal("transient", "timeout")}) == []
    assert state_of(one) is S.ASKED


def test_a_withdrawn_start_is_no_failure(books):
    one = books.start()
    books.see(instances=running("pending"))
    books.book.withdraw(books.now, one, "the load has gone")
    books.see(instances=running("ending"))
    books.see()
    (ended,) = books.see()
    assert (ended.state, ended.change.reason) == (S.GIVEN_UP, "the load has gone")
    assert not books.health.blocked("gpu", books.now)


# ---------------------------------------------------------------------- stops


def test_a_stop_drains_and_learns_how_long_that_takes(books):
    one = books.stop()
    books.see(joined())
    assert state_of(one) is S.ORDERED
    books.see(joined(state="draining"))
    assert state_of(one) is S.DRAINING
    (ended,) = books.see(seconds=2.0)
    assert ended.state is S.DONE
    assert books.times.p90("drain", "gpu") == 12.0


def test_a_drain_that_takes_too_long_is_ended_by_the_actuator(books):
    one = books.stop()
    books.see(joined(state="draining"))
    books.see(joined(state="draining"), seconds=59.0)
    assert state_of(one) is S.DRAINING
    books.see(joined(state="draining"), seconds=1.0)
    assert (state_of(one), one.instance) == (S.STOPPING, NAME)


@pytest.mark.parametrize("left", [0.0, 20.0, 45.0])
def test_a_worker_whose_own_limit_is_shorter_has_the_planners(books, left):
    one = books.stop()
    books.see(joined(state="draining", drain_left=left))
    books.see(joined(state="draining", drain_left=0.0), seconds=59.0)
    assert state_of(one) is S.DRAINING
    books.see(joined(state="draining", drain_left=0.0), seconds=1.0)
    assert state_of(one) is S.STOPPING


def test_a_worker_whose_own_limit_is_longer_is_not_ended_before(books):
    one = books.stop()
    books.see(joined(state="draining", drain_left=120.0))
    assert books.book.draining(books.now, MODEL) == {"w1": 120.0}
    books.see(joined(state="draining", drain_left=60.0), seconds=60.0)
    assert books.book.draining(books.now, MODEL) == {"w1": 60.0}
    books.see(joined(state="draining"), seconds=74.0)  # its last report was lost
    assert state_of(one) is S.DRAINING
    books.see(joined(state="draining"), seconds=1.0)
    assert (state_of(one), one.instance) == (S.STOPPING, NAME)


def test_a_worker_that_promises_an_end_for_ever_does_not_drain_for_ever(books):
    one = books.stop()
    for _ in range(9):
        books.see(joined(state="draining", drain_left=120.0), seconds=15.0)
        assert state_of(one) is S.DRAINING
    books.see(joined(state="draining", drain_left=120.0), seconds=15.0)
    assert state_of(one) is S.STOPPING


def test_a_drain_without_an_end_is_given_a_day(books):
    one = books.stop()
    books.see(joined(state="draining", drain_left=1e12))
    books.see(joined(state="draining", drain_left=1e12), seconds=86_400.0)
    assert state_of(one) is S.DRAINING
    books.see(joined(state="draining", drain_left=1e12), seconds=15.0)
    assert state_of(one) is S.STOPPING


def test_a_planner_that_finds_a_drain_keeps_to_the_workers_limit(books):
    books.see(joined(state="draining", ordered=True, drain_left=90.0))
    books.see(joined(state="draining", ordered=True, drain_left=30.0), seconds=60.0)
    (one,) = books.book.of(MODEL)
    books.see(joined(state="draining", ordered=True, drain_left=0.0), seconds=29.0)
    assert state_of(one) is S.DRAINING
    books.see(joined(state="draining", ordered=True, drain_left=0.0), seconds=16.0)
    assert state_of(one) is S.STOPPING


def test_a_worker_that_cannot_be_told_is_not_ended(books):
    books.stop()
    assert books.see(joined(), seconds=14.0) == []
    (ended,) = books.see(joined(), seconds=1.0)
    assert ended.state is S.GIVEN_UP


def test_an_undone_drain_is_waited_for_as_long_as_a_worker_may_answer(books):
    """It answers within 20 s, and its card may come 15 s later."""
    one = books.begin(Step(action=Action.UNDO, reason="r", life=life(1)))
    draining = worker(1, state="draining")
    books.see(draining, seconds=34.0)
    assert state_of(one) is S.ORDERED
    books.see(draining, seconds=1.0)
    assert state_of(one) is S.GIVEN_UP


def test_a_veto_and_an_undone_drain_give_the_stop_up(books):
    books.stop()
    refused = Refusal("vetoed", "no other ready worker takes requests")
    (ended,) = books.see(joined(), refusals={NAME: refused})
    assert (ended.state, ended.change.reason) == (S.GIVEN_UP, refused.reason)
    books.stop()
    books.see(joined(state="draining"))
    (ended,) = books.see(joined())
    assert ended.state is S.GIVEN_UP


def test_a_stop_that_was_taken_back_may_be_ordered_again(books):
    books.stop()
    books.see(joined(state="draining"))
    (ended,) = books.see(joined())
    assert ended.state is S.GIVEN_UP
    assert books.book.may_order(books.now, Action.STOP, life(1))
    one = books.stop()
    books.see(joined(), refusals={one.id: Refusal("vetoed", "it is needed")})
    assert not books.book.may_order(books.now + 299, Action.STOP, life(1))


def test_another_life_of_the_worker_is_another_worker(books):
    books.stop()
    books.see(joined(state="draining"))
    (ended,) = books.see(replace(joined(), life=life(1, 2)))
    assert ended.state is S.DONE


# ---------------------------------------------------------------------- switches


def test_a_switch_from_the_order_to_the_new_mode(books):
    one = books.switch()
    states = []
    for seen in (
        joined(),
        joined(state="leaving", target="prefill"),
        joined(mode="prefill", state="proving", target="prefill"),
    ):
        books.see(seen)
        states.append(one.state)
    (ended,) = books.see(joined(mode="prefill"))
    assert states == [S.ORDERED, S.LEAVING, S.PROVING]
    assert ended.state is S.DONE
    assert books.book.may_order(books.now, Action.SWITCH, life(1))


def test_a_switch_that_did_not_happen_is_not_tried_again_at_once(books):
    books.switch()
    books.see(joined(state="leaving", target="prefill"))
    (ended,) = books.see(joined(failed="streams were left after 60 s"))
    assert (ended.state, ended.change.reason) == (S.GIVEN_UP, "streams were left after 60 s")
    assert not books.book.may_order(books.now + 299, Action.SWITCH, life(1))
    assert books.book.may_order(books.now + 300, Action.SWITCH, life(1))
    assert books.book.may_order(books.now, Action.SWITCH, life(2))


def test_a_switch_that_was_given_up_may_still_happen_and_is_nobody_elses(books):
    books.switch()
    assert books.book.switching(books.now) == {life(1)}
    (ended,) = books.see(joined(), seconds=20.0)
    assert ended.state is S.GIVEN_UP
    assert books.book.switching(books.now + 299) == {life(1)}
    assert books.book.switching(books.now + 300) == set()


def test_a_switch_has_a_deadline(books):
    one = books.switch()
    books.see(joined(state="leaving", target="prefill"))
    books.see(joined(state="leaving", target="prefill"), seconds=74.0)
    assert state_of(one) is S.LEAVING
    (ended,) = books.see(joined(state="leaving", target="prefill"), seconds=1.0)
    assert ended.state is S.GIVEN_UP


# ---------------------------------------------------------------------- after a restart


def test_everything_under_way_is_found_again(books):
    other = [change_id(MODEL, "decode", 9, 9, number) for number in range(4)]
    books.see(
        worker(1, state="loading", change=other[0], mode="decode"),
        worker(2, state="leaving", mode="decode", target="prefill"),
        worker(3, state="draining", ordered=True),
        worker(4, change=other[3], mode="decode"),
        instances=[
            instance(other[0], "running"),
            instance(other[1], "pending"),
            instance(other[2], "booting"),
            instance(other[3], "running"),
        ],
    )
    found = {(one.action, one.state, one.step.mode) for one in books.book}
    assert found == {
        (Action.START, S.JOINED, "decode"),
        (Action.START, S.PENDING, "decode"),
        (Action.START, S.BOOTING, "decode"),
        (Action.SWITCH, S.LEAVING, "prefill"),
        (Action.STOP, S.DRAINING, ""),
    }
    assert {one.id for one in books.book if one.action is Action.START} == {*other[:3]}


def test_what_is_found_is_followed_and_not_learnt(books):
    books.see(instances=running("booting"))
    (ended,) = books.see(joined(), instances=running())
    assert ended.state is S.DONE
    assert books.times.p90("start", "gpu") == 120.0


def test_a_worker_that_has_left_is_no_start_while_its_instance_is_listed(books):
    books.see(joined(), instances=running())
    assert not books.see(instances=running())
    assert not books.book.of(MODEL)
    assert not books.see(instances=running("ended"))
    assert not books.health.disabled()
    books.see()  # nothing lists it any more
    books.see(instances=running())
    assert [one.action for one in books.book.of(MODEL)] == [Action.START]


def test_an_operators_drain_is_no_change(books):
    books.see(joined(state="draining"))
    assert books.book.of(MODEL) == ()


def test_a_change_of_ones_own_is_not_found_twice(books):
    one = books.stop()
    books.see(joined(state="draining", ordered=True))
    books.see(joined(state="draining", ordered=True))
    assert books.book.of(MODEL) == (one,)
    start = replace(one.step, action=Action.START, mode="decode", life=None)
    books.book.forget(MODEL)
    mine = books.begin(start)
    books.see(instances=running("pending"))
    assert books.book.of(MODEL) == (mine,)

"""The router core when workers have enough to do: who waits, who goes; nobody is forgotten."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from pdserve.errors import (
    ConfigError,
    DeadlineExceeded,
    Draining,
    NoWorker,
    Overloaded,
    PdserveError,
)
from pdserve.messages.request import FirstTokenStats
from pdserve.perf_model.latency_model import LatencyModel
from pdserve.router.admission_queue import PlacedRequest, QueuedRequest
from pdserve.router.config import RouterConfig
from pdserve.router.core import RouterCore
from pdserve.router.policies.least_loaded import choose
from tests.router.support import booked, facts, life, load, route

if TYPE_CHECKING:
    from pdserve.ids import NodeLife
    from pdserve.messages.routing import RouteRequest
    from pdserve.router.policies.base import RoutingState, WorkerView

F, G, R = life("f"), life("g"), life("r")
WORK = LatencyModel().prefill(1000)
"""Of one request below: about 0.12 s, so that one closes a worker."""
STARTED = FirstTokenStats(0, 0.0, 0.0, 0.0)


class World:
    """A router core with workers of eight sequences, a clock, and the outcome of every request."""

    def __init__(self, *nodes: str, policy: Any = choose, **changes: Any) -> None:
        self.now = 100.0
        self.outcomes: dict[str, list[PlacedRequest | PdserveError]] = {}
        self.items: dict[str, QueuedRequest] = {}
        self.asked = 0
        config = RouterConfig(**{"hold_work": 0.1, **changes})
        self.core = RouterCore(config, policy, Random(1), clock=lambda: self.now)
        for node in nodes:
            self.worker(node)

    def worker(self, node: str, **changes: Any) -> None:
        self.core.worker(self.now, facts(node, max_sequences=8, **changes))

    def ask(self, frontend: NodeLife = F, prompt_tokens: int = 1000, **wants: Any) -> str:
        self.asked += 1
        name = f"q{self.asked}"
        request: RouteRequest = replace(
            route(prompt_tokens=prompt_tokens), request_id=name, **wants
        )
        told = self.outcomes[name] = []
        try:
            outcome = self.core.offer(self.now, frontend, request, told.append)
        except PdserveError as error:
            told.append(error)
        else:
            if isinstance(outcome, QueuedRequest):
                self.items[name] = outcome
            else:
                told.append(outcome)
        self.core.check()
        return name

    def look(self) -> None:
        self.core.look(self.now)
        self.core.check()

    def placed(self, name: str) -> PlacedRequest:
        (outcome,) = self.outcomes[name]
        assert isinstance(outcome, PlacedRequest), outcome
        return outcome

    def placed_at_once(self, name: str) -> bool:
        return isinstance(self.outcomes[name][0], PlacedRequest)

    def waits(self, *names: str) -> bool:
        return all(not self.outcomes[name] for name in names)

    def error(self, name: str) -> PdserveError:
        (outcome,) = self.outcomes[name]
        assert isinstance(outcome, PdserveError)
        return outcome

    def start(self, name: str) -> None:
        """Its first token comes."""
        booking = self.placed(name).booking
        self.core.holds(self.now, booking.worker, booking.id, STARTED)
        self.core.check()

    def end(self, name: str) -> None:
        booking = self.placed(name).booking
        self.core.let_go(booking.worker, booking.id)
        self.core.check()

    def pass_to(self, when: float) -> None:
        """Live until then by the core's own timer alone."""
        while (due := self.core.next_look(self.now)) is not None and due <= when:
            self.now = due
            self.look()
        self.now = when


def test_one_goes_to_each_worker_and_the_rest_waits_for_first_tokens():
    world = World("w1", "w2")
    first = [world.ask(), world.ask()]
    assert {world.placed(name).booking.worker.node for name in first} == {"w1", "w2"}
    third, fourth = world.ask(), world.ask()
    assert world.waits(third, fourth)
    assert world.core.held == 2
    world.now += 0.01
    world.start(first[0])
    assert world.core.stirred
    world.look()
    held = world.placed(third)
    assert held.booking.worker == world.placed(first[0]).booking.worker
    assert held.routed.held == pytest.approx(0.01)
    assert world.waits(fourth)


def test_the_end_of_a_booking_lets_the_next_one_go_too():
    world = World("w1")
    first, second = world.ask(), world.ask()
    world.end(first)
    world.look()
    world.placed(second)


def test_nobody_is_forgotten_when_nothing_happens():
    """No event comes at all: the predicted moment does."""
    world = World("w1")
    world.ask()
    waiting = world.ask()
    world.pass_to(100.0 + 0.9 * (WORK - 0.1))
    assert world.waits(waiting)
    world.pass_to(100.0 + WORK)
    world.placed(waiting)


def test_a_deadline_passes_although_nothing_happens():
    world = World("w1", booking_ttl=1000.0)
    for _ in range(3):
        world.ask(prompt_tokens=100_000)
    waiting = world.ask(deadline=5.0)
    world.pass_to(104.9)
    assert world.waits(waiting)
    world.pass_to(105.1)
    error = world.error(waiting)
    assert isinstance(error, DeadlineExceeded)
    assert "waited 5.0 s in the router" in error.message
    assert world.core.numbers.expired == 1


def test_several_whose_time_has_come_expire_together_and_none_of_them_is_placed():
    """The worker is free just when their time runs out."""
    world = World("w1", booking_ttl=1000.0)
    running = world.ask(prompt_tokens=100_000)
    names = [world.ask(deadline=5.0) for _ in range(20)]
    patient = world.ask(deadline=60.0)
    world.now += 5.0 - WORK / 2  # enough for nobody's first token
    world.end(running)
    world.look()
    assert world.waits(*names)
    world.placed(patient)
    world.pass_to(105.1)
    assert all(isinstance(world.error(name), DeadlineExceeded) for name in names)
    assert (world.core.numbers.expired, world.core.held) == (20, 0)


def test_who_comes_without_time_is_placed_nowhere():
    world = World("w1")
    for deadline in (0.0, -1.0):
        assert isinstance(world.error(world.ask(deadline=deadline)), DeadlineExceeded)
    assert len(world.core.bookings) == 0


def test_who_has_a_place_is_not_held_but_refused_while_nobody_else_is_open():
    world = World("w1", "w2")
    here = world.placed(world.ask()).booking.worker.node
    there = "w2" if here == "w1" else "w1"
    moved = world.placed(world.ask(hold=False, excluded=(here,)))
    assert moved.booking.worker.node == there
    for excluded in ((here,), ()):
        error = world.error(world.ask(hold=False, excluded=excluded))
        assert isinstance(error, Overloaded)
        assert error.retry_after is not None
    assert isinstance(world.error(world.ask(hold=False, excluded=(here, there))), NoWorker)
    assert world.core.held == 0


def test_who_has_a_place_goes_to_an_open_worker_even_if_the_policy_likes_another():
    def first(request, state, random):
        return state.workers[0]

    world = World("w1", "w2", policy=first)
    world.placed(world.ask())
    assert world.placed(world.ask(hold=False)).booking.worker.node == "w2"


def test_who_has_a_place_does_not_overtake_those_who_have_none():
    world = World("w1", "w2", booking_ttl=1000.0)
    world.ask(prompt_tokens=100_000, allowed=("w1",))
    waiting = world.ask(allowed=("w1",))
    assert isinstance(world.error(world.ask(hold=False)), Overloaded)
    assert world.waits(waiting)


def test_where_nobody_is_held_a_full_worker_is_still_no_place_to_move_to():
    world = World("w1", hold_work=0.0)
    for _ in range(8):
        world.ask()
    assert isinstance(world.error(world.ask(hold=False)), Overloaded)


def test_zero_means_that_nobody_waits():
    world = World("w1", hold_work=0.0)
    for _ in range(20):
        world.placed(world.ask())


def test_a_worker_without_a_free_sequence_is_closed():
    world = World("w1")
    for _ in range(8):
        world.start(world.ask(prompt_tokens=1))
    waiting = world.ask(prompt_tokens=1)
    assert world.waits(waiting)
    world.end("q3")
    world.look()
    world.placed(waiting)


def test_short_ones_go_first_and_priority_before_them():
    world = World("w1")
    running = world.ask()
    long, short, urgent = world.ask(), world.ask(prompt_tokens=1), world.ask(priority=3)
    for name in (urgent, short, long):
        world.start(running)
        world.look()
        world.placed(name)
        running = name
    assert world.core.held == 0


def test_a_new_worker_takes_those_who_wait():
    world = World("w1")
    world.ask()
    waiting = world.ask()
    world.worker("w2")
    world.look()
    assert world.placed(waiting).booking.worker.node == "w2"


def test_work_of_other_routers_closes_a_worker():
    world = World("w1")
    world.core.bookings.peer_up(R)
    world.core.bookings.peer_placed(R, booked(77, life("w1"), prompt_tokens=1000))
    waiting = world.ask()
    assert world.waits(waiting)
    world.core.holds(world.now, life("w1"), 77, STARTED)
    world.look()
    world.placed(waiting)


def test_whoever_may_go_elsewhere_is_not_blocked_by_who_may_not():
    world = World("w1", "w2")
    world.ask(allowed=("w1",))
    pinned, free = world.ask(allowed=("w1",)), world.ask()
    world.look()
    assert world.waits(pinned)
    assert world.placed(free).booking.worker.node == "w2"
    world.start("q1")
    world.look()
    assert world.placed(pinned).booking.worker.node == "w1"


def test_whom_nobody_can_take_any_more_hears_it():
    world = World("w1", "w2")
    world.ask()
    world.ask()
    pinned, free = world.ask(allowed=("w1",)), world.ask()
    world.core.gone(world.now, life("w1"))
    world.look()
    assert isinstance(world.error(pinned), NoWorker)
    assert world.waits(free)
    world.core.load(life("w2"), load(ready=False))
    world.look()
    assert world.error(free).http_status == 503


def test_a_bound_is_a_refusal_with_the_time_until_it_is_over():
    world = World("w1", hold_limit=2)
    for _ in range(3):
        world.ask(prompt_tokens=50_000)
    error = world.error(world.ask(prompt_tokens=50_000))
    assert isinstance(error, Overloaded)
    work = LatencyModel().prefill(50_000)
    assert error.retry_after == pytest.approx(3 * work)
    world.placed("q1")
    assert world.waits("q2", "q3")


def test_at_a_bound_the_least_important_makes_room():
    world = World("w1", hold_limit=2)
    names = [world.ask(prompt_tokens=1000 + n) for n in range(3)]
    urgent = world.ask(priority=1)
    assert isinstance(world.error(names[2]), Overloaded)
    assert world.waits(urgent, names[1])


def test_bytes_are_bounded_too():
    world = World("w1", hold_bytes=4000)
    world.ask()
    for _ in range(2):
        world.ask(names=bytes(8 * 300), block_size=3)
    assert isinstance(world.error(world.ask()), Overloaded)


def test_who_turns_away_is_gone_without_a_trace():
    world = World("w1")
    world.ask()
    name = world.ask()
    assert world.core.withdraw(world.items[name])
    assert not world.core.withdraw(world.items[name])
    world.core.check()
    world.start("q1")
    world.look()
    assert world.waits(name)
    assert world.core.numbers.withdrawn == 1
    assert world.core.next_look(world.now) is None


def test_a_frontend_that_dies_takes_its_questions_along():
    world = World("w1")
    world.ask()
    mine, other = world.ask(F), world.ask(G)
    world.core.gone(world.now, F)
    world.core.check()
    world.look()
    assert world.waits(mine)
    assert world.core.numbers.withdrawn == 1
    world.placed(other)


def test_a_router_that_leaves_answers_and_holds_nobody():
    world = World("w1")
    world.ask()
    name = world.ask()
    world.core.close()
    assert isinstance(world.error(name), Draining)
    assert isinstance(world.error(world.ask()), Draining)
    world.end("q1")
    world.placed(world.ask())  # what can be decided at once still is


def test_a_policy_that_fails_costs_one_question():
    calls = []

    def fragile(request, state, random):
        calls.append(request.request_id)
        if len(calls) == 2:
            raise ZeroDivisionError
        return state.workers[0]

    world = World("w1", policy=fragile)
    first, second, third = world.ask(), world.ask(), world.ask()
    world.start(first)
    world.look()
    assert "policy ttft failed" in world.error(second).message
    world.placed(third)


def test_a_bug_costs_one_question_that_had_waited(monkeypatch):
    """It is answered, so that its frontend can ask another router."""
    world = World("w1")
    first, second, third = world.ask(), world.ask(), world.ask()
    place, calls = world.core._place, []

    def fragile(*args, **kwargs):
        calls.append(args)
        if len(calls) == 1:
            raise KeyError("sk-secret")
        return place(*args, **kwargs)

    monkeypatch.setattr(world.core, "_place", fragile)
    world.start(first)
    world.look()
    assert type(world.error(second)) is PdserveError
    assert "secret" not in world.error(second).message
    world.placed(third)


def test_who_waits_is_sent_away_from_a_broken_router():
    world = World("w1")
    world.ask()
    waiting = [world.ask() for _ in range(3)]
    world.core.send_away()
    world.core.check()
    assert {type(world.error(name)) for name in waiting} == {PdserveError}


def test_bad_predictions_hold_nobody():
    world = World("w1")
    world.ask()
    waiting = world.ask()
    world.core.predictor.poor = lambda model: "it is off"  # type: ignore[method-assign]
    world.look()
    assert world.placed(waiting).routed.policy == "ttft (tokens)"
    world.placed(world.ask())


@pytest.mark.parametrize(
    ("hold_work", "poor", "told"), [(0.3, "", 0.3), (0.0, "", 0.0), (0.3, "off", 0.0)]
)
def test_a_policy_hears_which_workers_are_open(hold_work: float, poor: str, told: float):
    heard: list[float] = []

    def policy(request: RouteRequest, state: RoutingState, random: Random) -> WorkerView:
        heard.append(state.open_work)
        return state.workers[0]

    world = World("w1", "w2", policy=policy, hold_work=hold_work)
    world.core.predictor.poor = lambda model: poor or None  # type: ignore[method-assign]
    world.placed(world.ask())
    assert heard == [told]


# ------------------------------------------------------------------------ limits of the client's


def learnt(world: World) -> None:
    """The predictor has seen enough to speak of probabilities: about as predicted."""
    for n in range(60):
        world.now += 1.0
        name = world.ask(prompt_tokens=1000 + n)
        booking = world.placed(name).booking
        took = LatencyModel().prefill(1000 + n)
        world.core.holds(world.now, booking.worker, booking.id, FirstTokenStats(0, 0.0, took, took))
        world.end(name)


def test_what_cannot_come_in_time_is_refused_at_once():
    world = World("w1")
    world.placed(world.ask(slo_ttft=0.001))  # too little is known to say no
    world.end("q1")
    learnt(world)
    error = world.error(world.ask(slo_ttft=0.001))
    assert isinstance(error, Overloaded)
    assert error.retry_after is not None
    assert error.retry_after >= RouterConfig().retry_after
    world.placed(world.ask(slo_ttft=10.0))
    assert world.waits(world.ask(slo_ttft=10.0))
    error = world.error(world.ask(slo_ttft=10.0, waited=9.99))
    assert isinstance(error, Overloaded)
    told = world.core.explain(world.now, replace(route("m"), slo_ttft=0.001))
    assert (told.worker, "no worker can produce a first token" in told.refusal) == (None, True)
    world.core.check()


def test_who_states_no_limit_is_never_refused_for_it():
    world = World("w1")
    learnt(world)
    for _ in range(30):
        world.ask(prompt_tokens=100_000)
    assert not any(isinstance(o, PdserveError) for told in world.outcomes.values() for o in told)


# ------------------------------------------------------------------------ explaining


def test_an_explanation_changes_nothing():
    world = World("w1", "w2")
    world.worker("w3", draining=True)
    request = replace(route("m", "w2"), request_id="x")
    before = world.core.numbers.offered
    told = world.core.explain(world.now, request)
    assert (told.worker, told.refusal, told.held) == ("w1", "", 0)
    assert [(c.worker, c.standing, c.chosen) for c in told.candidates] == [
        ("w1", "sound", True),
        ("w2", "excluded by the request", False),
        ("w3", "draining", False),
    ]
    assert told.predicted_ttft == pytest.approx(LatencyModel().prefill(100))
    world.core.check()
    assert world.core.numbers.offered == before
    world.ask(allowed=("w1",))
    waiting = world.ask(allowed=("w1",))
    told = world.core.explain(world.now, replace(request, excluded=("w2",)))
    assert told.worker is None
    assert "held" in told.refusal
    assert told.held == 1
    assert world.waits(waiting)
    assert "not served" in world.core.explain(world.now, route("unknown")).refusal


# ------------------------------------------------------------------------ whatever happens


@pytest.mark.parametrize("seed", range(30))
def test_every_question_ends_once_and_nothing_is_left(seed):
    random = Random(seed)
    hold_work = random.choice((0.0, 0.01, 0.1))
    world = World("w1", "w2", "w3", hold_work=hold_work, hold_limit=random.choice((3, 50)))
    core, ids, epoch = world.core, 1, 1
    core.bookings.peer_up(R)
    held: dict[str, NodeLife] = {}
    for _ in range(400):
        world.now += random.choice((0.0, 0.001, 0.05, 0.4))
        placed = [n for n, told in world.outcomes.items() if told and _open(world, told[0])]
        what = random.random()
        if what < 0.35:
            world.ask(
                random.choice((F, G)),
                prompt_tokens=random.choice((1, 500, 5000)),
                tenant=random.choice("ab"),
                priority=random.choice((0, 0, 2)),
                allowed=random.choice(((), (), ("w1",), ("w9",))),
                deadline=random.choice((None, 0.3, 5.0)),
                slo_ttft=random.choice((None, None, 0.05)),
            )
        elif what < 0.55 and placed:
            world.start(random.choice(placed))
        elif what < 0.7 and placed:
            world.end(random.choice(placed))
        elif what < 0.75 and placed:
            core.bookings.release(world.placed(random.choice(placed)).booking.id)
        elif what < 0.8 and world.items:
            core.withdraw(world.items[random.choice(list(world.items))])
        elif what < 0.84:
            ids += 1
            worker = life(random.choice(("w1", "w2")), epoch)
            core.bookings.peer_placed(R, booked(ids, worker))
            held[str(ids)] = worker
        elif what < 0.88 and held:
            id = random.choice(list(held))
            core.holds(world.now, held[id], int(id), random.choice((None, STARTED)))
        elif what < 0.91:
            core.bookings.peer_beat(world.now, R, random.random() < 0.5)
            core.bookings.judge_peers(world.now + random.choice((0.0, 0.5, 2.0)))
        elif what < 0.95:
            worker = life(random.choice(("w1", "w2", "w3")), epoch)
            reported = random.choice((None, load(random.randrange(9)), load(ready=False)))
            core.load(worker, reported, world.now)
        elif what < 0.97:
            epoch += 1
            for node in ("w1", "w2", "w3"):
                world.worker(node, epoch=epoch)
        else:
            core.gone(world.now, random.choice((F, R)))
            core.bookings.peer_up(R)
        core.sweep(world.now)
        world.look()
        core.check()
    _finish(world, epoch)


def _open(world: World, outcome: PlacedRequest | PdserveError) -> bool:
    return isinstance(outcome, PlacedRequest) and outcome.booking.id in world.core.bookings._own


def _finish(world: World, epoch: int) -> None:
    core = world.core
    for node in ("w1", "w2", "w3"):
        world.worker(node, epoch=epoch)
        core.load(life(node, epoch), load(), world.now)
    core.gone(world.now, R)
    for _ in range(500):
        world.pass_to(world.now + 0.5)
        for told in list(world.outcomes.values()):
            if told and _open(world, told[0]):
                assert isinstance(told[0], PlacedRequest)
                core.bookings.release(told[0].booking.id)
        if not core.held:
            break
    core.check()
    assert core.held == 0
    assert len(core.bookings) == 0
    for node in ("w1", "w2", "w3"):
        core.bookings.holds(life(node, epoch), ())
        prefills = core.bookings.prefills(life(node).node)
        assert (prefills.requests, prefills.tokens, prefills.work) == (0, 0, 0.0)
        assert prefills.strangers == 0
        assert core.bookings.load(life(node).node) == (0, 0)
    core.check()
    ends = {name: len(told) for name, told in world.outcomes.items()}
    assert max(ends.values()) == 1
    silent = [name for name, count in ends.items() if not count]
    assert len(silent) == core.numbers.withdrawn


def test_idle_workers_do_not_keep_the_timer_busy():
    """Who waits for a certain worker is not looked at all the time because others are idle."""
    world = World("w1", "w2", booking_ttl=1000.0)
    world.ask(prompt_tokens=100_000, allowed=("w1",))
    pinned = world.ask(allowed=("w1",))
    looks = 0
    while (due := world.core.next_look(world.now)) is not None and due < 105.0:
        world.now, looks = due, looks + 1
        world.look()
    assert world.waits(pinned)
    assert looks <= 21  # four times a second


def test_an_answer_that_makes_others_go_away_is_no_trouble():
    """A link that breaks while it is written to takes all of its requests along."""
    world = World("w1", booking_ttl=1000.0)
    world.core.worker(world.now, facts("x", "n", max_sequences=1))
    for model in "mn":
        world.ask(prompt_tokens=100_000, model=model)
    names = [world.ask(deadline=1.0, model=model) for model in "mmn"]
    told = []

    def answer(error):
        told.append(error)
        for name in names:
            world.core.withdraw(world.items[name])

    for name in names:
        world.items[name].answer = answer
    world.now += 2.0
    world.look()
    assert len(told) == 1
    assert (world.core.numbers.expired, world.core.numbers.withdrawn) == (1, 2)


@pytest.mark.parametrize("held", [False, True])
def test_a_policy_may_only_choose_who_was_offered(held):
    seen = []

    def stubborn(request, state, random):
        seen.extend(state.workers)
        return seen[0]

    world = World("w1", "w2", policy=stubborn)
    if held:
        world.ask(prompt_tokens=100_000)
        world.core.load(life("w2"), load(waiting=8))
        name = world.ask(allowed=("w2",))
        world.core.load(life("w2"), load())
        world.look()
    else:
        world.ask()
        name = world.ask(allowed=("w2",))
    error = world.error(name)
    assert isinstance(error, ConfigError)
    assert "not offered" in str(error.__cause__)
    world.core.check()
    assert len(world.core.bookings) == 1


def test_equal_wishes_are_looked_up_once(monkeypatch):
    """Thousands may wait for certain workers; what they cost is not to grow with the workers."""
    world = World("w1", "w2", "w3", booking_ttl=1000.0)
    names = [world.ask(prompt_tokens=100_000, allowed=(node,)) for node in ("w1", "w2")]
    names += [world.ask(excluded=("w3",)) for _ in range(100)]
    asked = []
    among = world.core._among

    def counted(request, view):
        asked.append(request)
        return among(request, view)

    monkeypatch.setattr(world.core, "_among", counted)
    world.look()
    assert world.waits(*names[2:])
    assert len(asked) <= 3  # the second of `names` was held for a moment, and decided once more


def test_who_has_waited_too_long_is_refused_when_its_turn_comes():
    world = World("w1")
    learnt(world)
    first = world.ask()
    late, patient = world.ask(slo_ttft=0.5), world.ask()
    world.now += 0.45  # what is left is less than its prompt takes
    world.start(first)
    world.look()
    assert "no worker can produce a first token" in world.error(late).message
    assert isinstance(world.error(late), Overloaded)
    world.placed(patient)


def test_what_a_client_cannot_bear_ends_its_waiting_with_a_time_to_come_back():
    world = World("w1")
    learnt(world)
    world.ask(prompt_tokens=100_000)
    short, long = world.ask(slo_ttft=1.0, deadline=9.0), world.ask(slo_ttft=60.0, deadline=2.0)
    world.pass_to(world.now + 1.5)
    error = world.error(short)
    assert isinstance(error, Overloaded)
    assert error.retry_after is not None
    assert world.waits(long)
    world.pass_to(world.now + 1.0)
    assert isinstance(world.error(long), DeadlineExceeded)


def test_so_many_are_held_that_they_come_in_time():
    """However many ask: those that are let in do not wait until all of them are late."""
    world = World("w1")
    learnt(world)
    names = [world.ask(slo_ttft=1.0, prompt_tokens=1000 + n) for n in range(50)]
    let_in = [name for name in names if not world.outcomes[name] or world.placed_at_once(name)]
    assert 3 <= len(let_in) <= 1.0 / WORK
    for name in let_in:
        if world.waits(name):
            world.look()
        assert not isinstance(world.outcomes[name][0], Overloaded)
        world.now += WORK
        world.end(name)
        world.look()


def test_another_tenants_waiting_keeps_nobody_out():
    world = World("w1")
    learnt(world)
    for _ in range(40):
        world.ask(tenant="heavy")
    assert isinstance(world.error(world.ask(tenant="heavy", slo_ttft=2.0)), Overloaded)
    assert world.waits(world.ask(tenant="light", slo_ttft=2.0))
    assert world.waits(world.ask(tenant="heavy", slo_ttft=2.0, priority=1))


def test_who_would_wait_for_most_of_its_time_is_refused_at_once():
    world = World("w1")
    learnt(world)
    for _ in range(40):
        world.ask(deadline=600.0)
    assert isinstance(world.error(world.ask(deadline=4.0)), Overloaded)
    assert world.waits(world.ask(deadline=60.0))
    assert world.waits(world.ask(deadline=4.0, tenant="another"))
    assert world.waits(world.ask(deadline=4.0, attempt=1)), "it was let in before"


def test_who_was_let_in_before_is_not_sent_away_for_want_of_room():
    world = World("a", hold_limit=2)
    world.ask()
    first, again = world.ask(), world.ask(attempt=1)
    full = world.ask()
    (refusal,) = world.outcomes[full]
    assert isinstance(refusal, Overloaded)
    third = world.ask(attempt=2)
    assert world.outcomes[third] == []
    world.ask(priority=5)
    world.ask(priority=5, attempt=1)
    (refusal,) = world.outcomes[first]
    assert isinstance(refusal, Overloaded)
    assert world.outcomes[again] == world.outcomes[third] == []


def test_those_that_were_let_in_go_only_for_those_that_were_not_more_important():
    world = World("a", hold_limit=1)
    world.ask()
    again = world.ask(attempt=1)
    important = world.ask(priority=5)
    (refusal,) = world.outcomes[important]
    assert isinstance(refusal, Overloaded), "there is nobody who may be sent away"
    assert world.outcomes[again] == []

"""How a request may end in a world, and that each way which may not be is complained of."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from pdserve.errors import DeadlineExceeded, NoWorker, Overloaded, PdserveError, WorkerLost
from pdserve.messages.request import GenerateRequest, SamplingParams
from pdserve.router.config import RouterConfig
from pdserve.sim.engine import VirtualTimeEngine
from pdserve.token_ids import token_ids
from tests.worlds.faults import Fault
from tests.worlds.load_clients import Placed, TrackedRequest
from tests.worlds.oracle.outcomes import OutcomeOracle, _serves
from tests.worlds.roles import MAX_WAITING, NodeSettings, Worker

if TYPE_CHECKING:
    from pdserve.ids import NodeId, Seconds
    from pdserve.messages.handoff import WorkerMode

HOLD = 16


class World:
    """A router, a frontend and two workers, who have heard of each other for long; 100 s old."""

    def __init__(self, pace: Seconds = 0.02, mode: WorkerMode = "aggregated") -> None:
        self.now = 100.0
        self.loop = SimpleNamespace(time=lambda: self.now)
        self.accounts: list[object] = []
        self.active: dict[Fault, None] = {}
        self.outcomes: Counter[str] = Counter()
        self.complaints: list[str] = []
        settings = NodeSettings(pace=pace, mode=mode, router=RouterConfig(hold_limit=HOLD))
        self.hosts = {name: _host(name, settings) for name in ("r0", "w0", "w1", "f0")}
        self.judge = OutcomeOracle(cast("Any", self))
        self.judge._fit = {("f0", "w0"): 0.0}
        self.judge._look = lambda: None  # type: ignore[method-assign]  # it sees processes

    def of_role(self, role: str) -> list[SimpleNamespace]:
        return [host for host in self.hosts.values() if host.name[0] == role[0]]

    def complain(self, what: str) -> None:
        self.complaints.append(what)

    def call_later(self, *call: object) -> None:
        """Nobody waits."""

    def fault(self, kind: str, a: str, since: Seconds, until: Seconds) -> None:
        fault = Fault(kind, since, until - since, a)
        self.judge.causes.begins(fault, since)
        self.judge.causes.ends(fault, until)

    def crowd(self, count: int, steps: int = 12) -> None:
        """So many others have not ended."""
        self.accounts = [SimpleNamespace(steps=steps)] * count

    def said(self, error: PdserveError, *, lasted: Seconds = 1.0, **fields: Any) -> str:
        """What is said of a request that ends so, now; empty: nothing."""
        account = _account(self.now - lasted, self.complain, **fields)
        account.error = error
        account.outcome = f"failed {type(error).__name__}"
        self.complaints.clear()
        self.judge.ended(cast("Any", self.hosts["f0"]), account)
        self.judge.causes._ends.pop()  # as if it had not been there
        return " ".join(self.complaints)


def _host(name: str, settings: NodeSettings) -> SimpleNamespace:
    return SimpleNamespace(name=name, settings=settings, busy=False)


def _account(
    began: Seconds,
    complain: Any,
    *,
    deadline: Seconds | None = None,
    overdue: bool = False,
    placed: str = "",
    answer: int = 10,
) -> TrackedRequest:
    sampling = SamplingParams(max_tokens=answer, ignore_eos=True, seed=1)
    request = GenerateRequest(
        request_id="f0.1",
        model="model",
        prompt=token_ids([5] * 9),
        sampling=sampling,
        deadline=deadline,
    )
    account = TrackedRequest("f0.1", request, began, complain)
    account.overdue = overdue
    if placed:
        account.placed.append(Placed(cast("NodeId", placed), 0, began))
        account.stage = "opened"
    return account


LATE = DeadlineExceeded("late")


def test_a_deadline_is_not_early():
    assert "time left" in World().said(LATE, lasted=1.0, deadline=5.0)
    assert "time left" in World().said(LATE, lasted=1.0)


def test_what_could_be_served_in_time_has_to_be():
    world = World()
    assert "was not served" in world.said(LATE, lasted=4.0, deadline=4.0)
    assert not world.said(LATE, lasted=1.5, deadline=1.5), "12 steps of 20 ms, at leisure"
    assert not world.said(LATE, lasted=4.0, deadline=4.0, answer=90)
    world.crowd(4)
    assert not world.said(LATE, lasted=4.0, deadline=4.0), "others were before it"
    world.crowd(0)
    world.judge._fit = {("f0", "w0"): 97.0}
    assert not world.said(LATE, lasted=4.0, deadline=4.0), "nobody was there for long enough"
    assert not World(mode="prefill").said(LATE, lasted=3.5, deadline=3.5), "it is handed over"


def test_a_suspect_may_wait_in_vain_while_others_are_tried():
    world = World()
    another = NoWorker("no other worker took it: another suspect request is being tried")
    world.judge._deaths["w0"] = [94.5]
    assert "could have served" in world.said(another, placed="w0"), "there is no other one"
    world.judge._tried.clear()
    world.accounts.append(_account(99.0, world.complain, placed="w0"))
    assert not world.said(another, placed="w0")
    assert "could have served" in world.said(NoWorker("full"), placed="w0")
    assert "could have served" in world.said(another), "it is no suspect"


@pytest.mark.parametrize("overdue", [False, True])
@pytest.mark.parametrize(
    ("kind", "host", "until", "excused"),
    [
        ("crash", "w1", 96.0, True),
        ("crash", "w1", 92.9, False),
        ("pause", "f0", 100.0, True),
        ("pause", "f1", 100.0, False),
        ("partition", "f1", 100.0, True),
    ],
)
def test_only_faults_of_its_hosts_and_of_its_time_excuse_a_deadline(
    overdue, kind, host, until, excused
):
    world = World()
    world.fault(kind, host, 90.0, until)
    assert bool(world.said(LATE, lasted=4.0, deadline=4.0, overdue=overdue)) is not excused


def test_somebody_else_than_the_frontend_ends_it():
    assert "in time" in World().said(LATE, lasted=2.1, deadline=1.0, overdue=True)


def test_a_request_that_a_worker_hands_over_is_ended_in_time_elsewhere():
    world = World()
    world.fault("drain", "w1", 90.0, 100.0)
    assert not world.said(LATE, lasted=4.0, deadline=4.0), "it took longer"
    assert "in time" in world.said(LATE, lasted=5.0, deadline=4.0, overdue=True)


FULL = Overloaded("full")


def test_a_refusal_needs_as_many_others_as_the_bound_says():
    world = World()
    assert "0 others" in world.said(FULL)
    world.crowd(HOLD // 4)
    assert f"{HOLD // 4} others are not the {HOLD}" in world.said(FULL)
    world.crowd(HOLD)
    assert not world.said(FULL)
    assert f"not the {MAX_WAITING}" in world.said(FULL, placed="w0"), "an engine has another bound"
    world.crowd(MAX_WAITING)
    assert not world.said(FULL, placed="w0")


def test_requests_that_ended_lately_may_have_been_in_the_way():
    world = World()
    world.crowd(HOLD - 4)
    for _ in range(4):
        world.judge.causes.request_ended(98.0)
    assert not world.said(FULL)
    world.now = 102.0
    assert world.said(FULL)


def test_who_has_a_deadline_need_not_wait_for_others():
    world = World()
    assert world.said(FULL, deadline=5.0), "there are none"
    world.crowd(1)
    assert not world.said(FULL, deadline=3.0), "12 steps of 20 ms, at leisure, are half of it"
    assert world.said(FULL, deadline=5.0)
    world.crowd(1, steps=90)
    assert not world.said(FULL, deadline=5.0)
    world.crowd(0)
    world.judge.causes.request_ended(98.0, steps=90)
    assert not world.said(FULL, deadline=5.0)


def test_with_faults_one_other_is_enough_for_a_refusal():
    world = World()
    world.crowd(1)
    world.fault("slow-worker", "w0", 90.0, 97.0)
    assert not world.said(FULL, deadline=9.0)
    assert world.said(FULL), "without a deadline nothing is different"


def test_no_worker_and_a_lost_one_need_that_none_is_fit():
    world = World()
    assert "could have served" in world.said(NoWorker("none"))
    assert "no reason" in world.said(WorkerLost("gone"), placed="w0")
    world.judge._fit = {}
    assert not world.said(NoWorker("none"))
    assert "no reason" in world.said(WorkerLost("gone"), placed="w0")


def test_who_died_and_came_back_between_two_looks_was_not_fit_all_the_time():
    world = World()
    world.judge.died("w1")
    assert "w0 could have served" in world.said(NoWorker("none")), "another one's death"
    world.judge.died("w0")
    assert not world.said(NoWorker("none"))


class Engine(VirtualTimeEngine):
    """It knows nothing but whether it is full."""

    full = False

    def __init__(self) -> None:
        pass


def test_who_has_no_room_is_not_fit():
    engine, part = Engine(), Worker.__new__(Worker)
    part.engine = cast("Any", engine)
    part.service = cast("Any", SimpleNamespace(mode="decode", unready_reason=lambda: None))
    process = SimpleNamespace(paused=False)
    host = cast("Any", SimpleNamespace(up=True, ready=True, process=process, part=part))
    assert _serves(host)
    engine.full = True
    assert not _serves(host)


@pytest.mark.parametrize(
    ("kind", "lasts", "wrong"),
    [("pause", 2.5, True), ("pause", 5.0, False), ("delay", 9.0, True), ("crash", 9.0, True)],
)
def test_who_was_silent_for_a_moment_is_not_held_for_dead(kind, lasts, wrong):
    world = World()
    process = SimpleNamespace(paused=False)
    node = SimpleNamespace(epoch=7)
    world.hosts["w0"] = SimpleNamespace(
        name="w0", up=True, ready=True, process=process, part=SimpleNamespace(node=node)
    )
    world.fault(kind, "w0", 95.0 - lasts, 95.0)
    host = cast("Any", world.hosts["f0"])
    world.judge.held_for_dead(host, "w0", 6)
    assert not world.complaints, "another life of it"
    world.judge.held_for_dead(host, "w0", 7)
    assert bool(world.complaints) is wrong
    world.complaints.clear()
    process.paused = True
    world.judge.held_for_dead(host, "w0", 7)
    assert not world.complaints

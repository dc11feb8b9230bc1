"""What a router counts of the demand: by itself, in its core, and as planners receive it."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from pdserve.errors import EngineError, NoWorker, Overloaded
from pdserve.ids import NodeId, NodeLife
from pdserve.messages.demand import (
    DEMAND,
    RECENT_LIMIT,
    Arrival,
    DemandReport,
    EndedRequest,
    FinishedRequest,
    ModelDemand,
)
from pdserve.messages.node import NodeCard
from pdserve.messages.routing import ReleaseBooking
from pdserve.perf_model.latency_model import LatencyModel
from pdserve.planner.demand_reader import DemandReader
from pdserve.router import core as core_module
from pdserve.router.core import RouterCore
from pdserve.router.demand import MAX_MODELS, DemandCounters, HeldDemand, LearntTimes
from pdserve.runtime.rpc_methods import RELEASE
from pdserve.runtime.topics.service import Topics
from pdserve.wire.codec import decoder, encode
from tests.frontend.fake_cluster import Sink, request
from tests.net.world import virtually
from tests.router.test_core_queueing import World as CoreWorld
from tests.router.test_service import World, world

NAMES = b"".join(number.to_bytes(8, "big") for number in range(1, 61))
"""Of the full blocks of a prompt."""


def reported(counters: DemandCounters, now: float = 10.0) -> DemandReport:
    return counters.report(now, 7, lambda model: HeldDemand(), lambda model: LearntTimes())


def only(counters: DemandCounters) -> ModelDemand:
    (demand,) = reported(counters).models
    return demand


class TestCounters:
    def test_an_arrival(self) -> None:
        counters = DemandCounters()
        counters.arrived(1.0, "m", 100, 64, 2, 0.5)
        counters.arrived(2.0, "m", 50, 0, 1, 0.25)
        demand = only(counters)
        assert (demand.arrivals, demand.work, demand.work_squared) == (2, 0.75, 0.3125)
        assert demand.recent == (Arrival(1.0, 100, 64, 2, 0.5), Arrival(2.0, 50, 0, 1, 0.25))
        assert demand.began == 1.0

    def test_absurd_figures_do_not_spoil_the_sums(self) -> None:
        """A sum that is no number any more makes every planner blind until the router restarts."""
        counters = DemandCounters()
        for decode, tokens in ((float("inf"), 5), (1e308, 10**6), (1.0, 2**62), (1.0, 2**62)):
            counters.ended(1.0, EndedRequest("m", 1, 0, tokens, decode, True))
        counters.arrived(1.0, "m", 100, 0, 1, float("inf"))
        counters.arrived(1.0, "m", 100, 0, 1, 0.5)
        demand = only(counters)
        assert (demand.arrivals, demand.work, demand.output_tokens) == (2, 0.5, 0)
        assert demand.kv_token_seconds == 0.0
        assert encode(reported(counters))

    def test_a_request_that_ended(self) -> None:
        counters = DemandCounters()
        kept = EndedRequest(
            "m", 100, 64, 20, 2.0, complete=True, verdicts=(("ttft", ""), ("both", ""))
        )
        late = EndedRequest("m", verdicts=(("ttft", "held"), ("both", "held")))
        cut = EndedRequest("m", 100, 0, 5, 1.0)
        for told in (kept, late, cut):
            counters.ended(1.0, told)
        demand = only(counters)
        assert (demand.kept, demand.missed) == (
            {"ttft": 1, "both": 1},
            {"ttft": {"held": 1}, "both": {"held": 1}},
        )
        assert (demand.finished, demand.output_tokens) == (1, 25)
        assert demand.ended == (FinishedRequest(100, 64, 20),)
        assert demand.kv_token_seconds == 20 * 2.0 / 2 + 5 * 1.0 / 2

    def test_single_requests_are_bounded(self) -> None:
        counters = DemandCounters()
        for number in range(RECENT_LIMIT + 10):
            counters.arrived(float(number), "m", 1, 0, 1, 0.0)
            counters.ended(1.0, EndedRequest("m", 1, 0, number, complete=True))
        demand = only(counters)
        assert [one.at for one in demand.recent] == [10.0 + n for n in range(RECENT_LIMIT)]
        assert demand.ended[-1].output_tokens == demand.arrivals - 1

    def test_words_of_frontends_are_bounded(self) -> None:
        counters = DemandCounters()
        for number in range(100):
            counters.ended(1.0, EndedRequest("m", verdicts=(("both", f"cause {number}"),)))
            counters.ended(1.0, EndedRequest("m", verdicts=((f"objective {number}", ""),)))
        demand = only(counters)
        assert sum(demand.missed["both"].values()) == 100
        assert len(demand.missed["both"]) <= 17
        assert len(demand.kept) <= 17

    def test_the_model_without_news_for_longest_is_forgotten(self) -> None:
        counters = DemandCounters()
        for number in range(MAX_MODELS):
            counters.arrived(float(number), f"m{number}", 1, 0, 1, 0.0)
        counters.arrived(100.0, "m0", 1, 0, 1, 0.0)
        counters.arrived(101.0, "new", 1, 0, 1, 0.0)
        names = {demand.model for demand in reported(counters).models}
        assert len(names) == MAX_MODELS
        assert {"m0", "new"} < names
        assert "m1" not in names
        counters.arrived(102.0, "m1", 1, 0, 1, 0.0)
        again = next(demand for demand in reported(counters).models if demand.model == "m1")
        assert (again.arrivals, again.began) == (1, 102.0)
        assert again.count > MAX_MODELS  # a reader takes it for a new count

    def test_reports_are_numbered_and_say_since_when(self) -> None:
        counters = DemandCounters()
        assert not counters.changed
        counters.refused(3.0, "m")
        counters.first_token(4.0, "m")
        assert counters.changed
        first, second = reported(counters, 5.0), reported(counters, 6.0)
        assert (first.number, first.since, first.process) == (1, 3.0, 7)
        assert (second.number, second.since) == (2, 6.0)
        assert not counters.changed

    def test_a_report_carries_what_waits_and_what_is_learnt(self) -> None:
        counters = DemandCounters()
        counters.refused(1.0, "m")
        held, learnt = HeldDemand(3, 1.5, 0.25), LearntTimes(speeds={NodeId("w"): 2.0}, poor=True)
        (demand,) = counters.report(1.0, 7, lambda model: held, lambda model: learnt).models
        assert (demand.held, demand.held_work, demand.held_oldest) == (3, 1.5, 0.25)
        assert (demand.speeds, demand.prediction_poor) == ({"w": 2.0}, True)


# ---------------------------------------------------------------------- the core


def counted(core: RouterCore) -> ModelDemand:
    return core.demand.totals()["m"]


def test_placed_held_and_refused_requests_arrive_once_each() -> None:
    made = CoreWorld("w1", hold_limit=1)
    work = LatencyModel().prefill(1000)
    first, second, third = made.ask(), made.ask(), made.ask()
    made.placed(first)
    assert made.waits(second)
    assert isinstance(made.error(third), Overloaded)
    demand = counted(made.core)
    assert (demand.arrivals, demand.refused) == (3, 1)
    assert demand.work == pytest.approx(3 * work)
    made.end(first)
    made.look()
    made.placed(second)
    assert counted(made.core).arrivals == 3


def test_a_request_that_expires_while_it_is_held_is_refused() -> None:
    made = CoreWorld("w1", booking_ttl=1000.0)
    made.ask(prompt_tokens=100_000)
    made.ask(deadline=5.0)
    assert made.core.held_demand(made.now + 2.0, "m").oldest == pytest.approx(2.0)
    made.pass_to(made.now + 10.0)
    demand = counted(made.core)
    assert (demand.arrivals, demand.refused) == (2, 1)
    assert made.core.held_demand(made.now, "m") == HeldDemand()


def test_a_request_that_is_routed_again_is_no_arrival() -> None:
    made = CoreWorld("w1", "w2", hold_work=0)
    made.ask()
    made.ask(attempt=1)
    made.ask(attempt=2, hold=False)
    made.ask(asked=1)
    assert counted(made.core).arrivals == 1


def test_a_request_without_any_worker_is_an_arrival_and_not_refused() -> None:
    """Its frontend asks another router; one that knows workers perhaps."""
    made = CoreWorld("w1")
    name = made.ask(allowed=(NodeId("w9"),))
    assert isinstance(made.error(name), NoWorker)
    demand = counted(made.core)
    assert (demand.arrivals, demand.refused) == (1, 0)


def test_an_unknown_model_is_no_demand() -> None:
    made = CoreWorld("w1")
    made.ask(model="typo")
    assert made.core.demand.totals() == {}


def test_cached_tokens_are_no_work() -> None:
    made = CoreWorld("w1", "w2", hold_work=0)
    made.ask(names=NAMES, block_size=16)
    made.ask(names=NAMES, block_size=16)
    _, second = reported(made.core.demand).models[0].recent
    assert (second.prompt_tokens, second.cached_tokens) == (1000, 960)
    assert second.work == pytest.approx(LatencyModel().prefill(1000, 960))


def test_cached_tokens_of_a_refused_request_are_no_work_either() -> None:
    made = CoreWorld("w1", hold_limit=1)
    asked = [made.ask(names=NAMES, block_size=16) for _ in range(3)]
    assert isinstance(made.error(asked[-1]), Overloaded)
    recent = reported(made.core.demand).models[0].recent
    assert [one.cached_tokens for one in recent] == [0, 960, 960]


def test_a_booking_counts_its_kv_and_its_first_token() -> None:
    made = CoreWorld("w1")
    name = made.ask()
    made.now += 3.0
    made.start(name)
    made.now += 2.0
    made.end(name)
    demand = counted(made.core)
    assert demand.first_tokens == 1
    assert demand.kv_token_seconds == pytest.approx(5000.0)


def test_what_is_learnt_is_reported() -> None:
    made = CoreWorld("w1")
    learnt, default = made.core.learnt_times("m"), LatencyModel()
    assert (learnt.times.base, learnt.times.fitted) == (default.base, False)
    assert learnt.times.step_token == default.step_token
    assert not learnt.poor


# ---------------------------------------------------------------------- the service


class Planner:
    """A node that follows the demand."""

    def __init__(self, node: Any) -> None:
        self.node = node
        self.reader = DemandReader(node.now())
        self.reports: list[tuple[float, DemandReport]] = []
        self.topics = Topics(node, node.timers)
        self.topics.subscribe_state(DEMAND, decoder(DemandReport), self._take)
        node.publish_card(NodeCard(role="planner"), {})

    def _take(self, member: Any, report: DemandReport) -> None:
        now = self.node.now()
        self.reports.append((now, report))
        self.reader.watch(now, [member.node])
        self.reader.reported(now, NodeLife(member.node, member.epoch), report)


async def _with_planner(w: World) -> Planner:
    made = Planner(await w.nodes.add("p", role="planner"))
    await w.nodes.until(lambda: bool(made.reports))
    return made


@virtually
async def test_a_planner_gets_a_report_at_once_and_each_second_while_there_is_demand() -> None:
    async with world() as w:
        router, worker, backend = await w.router("r"), await w.worker("a"), await w.frontend("f")
        await w.settled()
        await asyncio.sleep(30.0)
        began = router.node.now()
        planner = await _with_planner(w)
        assert router.node.now() - began < 1.0
        assert planner.reports[-1][1].models == ()
        assert planner.reader.series(planner.node.now(), "tiny").health.known
        await asyncio.sleep(30.0)
        before = len(planner.reports)
        await backend.open(request(), Sink())
        await asyncio.sleep(10.0)
        assert 9 <= len(planner.reports) - before <= 11  # a booking is open
        assert not planner.reports[-1][1].resting
        worker.end(1)
        await asyncio.sleep(5.0)
        assert planner.reports[-1][1].resting
        series = planner.reader.series(planner.node.now(), "tiny")
        assert series.total is not None
        assert series.total.arrivals == 1
        assert series.total.kv_token_seconds == pytest.approx(30, rel=0.1)
        before = len(planner.reports)
        await asyncio.sleep(60.0)
        assert 4 <= len(planner.reports) - before <= 8  # it rests
        assert planner.reader.health(planner.node.now()).known
        planner.topics.close()


@virtually
async def test_without_a_planner_nothing_is_made() -> None:
    async with world() as w:
        router, _, backend = await w.router("r"), await w.worker("a"), await w.frontend("f")
        await w.settled()
        await backend.open(request(), Sink())
        await asyncio.sleep(5.0)
        assert router.service.core.demand.totals()["tiny"].arrivals == 1
        assert router.service._demand.value is None
        assert reported(router.service.core.demand).number == 1  # the first that was made


@virtually
async def test_how_a_request_ended_comes_with_its_last_release() -> None:
    told = EndedRequest("tiny", 3, 0, 1, 0.0, complete=True, verdicts=(("ttft", ""), ("both", "")))
    async with world() as w:
        router, worker, backend = await w.router("r"), await w.worker("a"), await w.frontend("f")
        await w.settled()
        sink, answers = Sink(), iter((told,))
        await backend.open(request(), sink, ended=lambda: next(answers) if sink.ends else None)
        worker.end(1)
        await w.nodes.until(lambda: len(router.bookings) == 0)
        await asyncio.sleep(1.0)
        demand = router.service.core.demand.totals()["tiny"]
        assert (demand.finished, demand.kept) == (1, {"ttft": 1, "both": 1})


@virtually
async def test_what_ended_by_an_error_comes_with_its_release_too() -> None:
    told = EndedRequest("tiny", verdicts=(("both", "error"),))
    async with world() as w:
        router, worker, backend = await w.router("r"), await w.worker("a"), await w.frontend("f")
        await w.settled()
        sink = Sink()
        await backend.open(request(), sink, ended=lambda: told if sink.errors else None)
        worker.service.engine.sinks[1].on_error(EngineError("broken"))
        await w.nodes.until(lambda: len(router.bookings) == 0)
        await asyncio.sleep(1.0)
        assert router.service.core.demand.totals()["tiny"].missed == {"both": {"error": 1}}


@virtually
async def test_a_request_without_a_booking_is_counted_and_no_release() -> None:
    async with world() as w:
        router, _, backend = await w.router("r"), await w.worker("a"), await w.frontend("f")
        await w.settled()
        backend.note_ended(EndedRequest("tiny", verdicts=(("both", "held"),)))
        await asyncio.sleep(1.0)
        assert router.service.core.demand.totals()["tiny"].missed == {"both": {"held": 1}}
        assert router.service.released == 0


@virtually
async def test_a_frontend_of_the_release_before_tells_no_verdicts() -> None:
    async with world() as w:
        router, worker, _ = await w.router("r"), await w.worker("a"), await w.frontend("f")
        await w.settled()
        decision = await w.ask("f", "r")
        link = await w.nodes.nodes["f"].link(NodeId("r"), timeout=1.0)
        link.tell(RELEASE.id, encode([decision.booking, "finished"]))
        await w.nodes.until(lambda: len(router.bookings) == 0)
        demand = router.service.core.demand.totals()["tiny"]
        assert (demand.arrivals, demand.kept, demand.missed) == (1, {}, {})
        assert worker.service is not None


@virtually
async def test_a_router_that_dies_takes_no_arrival_twice() -> None:
    async with world() as w:
        routers = [await w.router("r1"), await w.router("r2")]
        await w.worker("a")
        backend = await w.frontend("f")
        await w.settled()
        first, second = sorted(routers, key=lambda r: r.node.id != backend.routers.order[0])
        first.service.core.close()  # it drains, and its card does not say so yet
        await backend.open(request(), Sink())
        counts = [router.service.core.demand.totals() for router in (first, second)]
        arrivals = [count["tiny"].arrivals if count else 0 for count in counts]
        assert arrivals == [1, 0]


# ---------------------------------------------------------------------- the wire


class _OldRelease(msgspec.Struct, frozen=True, array_like=True):
    """`ReleaseBooking` of the release before."""

    booking: int
    outcome: str


def test_a_release_is_read_by_the_release_before_and_its_own_by_this_one() -> None:
    told = EndedRequest("m", 3, 2, 1, 0.5, complete=True, verdicts=(("both", "decode"),))
    new = encode(ReleaseBooking(5, "finished", told))
    assert msgspec.msgpack.decode(new, type=_OldRelease) == _OldRelease(5, "finished")
    assert decoder(ReleaseBooking)(new).ended == told
    old = encode(_OldRelease(5, "finished"))
    assert decoder(ReleaseBooking)(old) == ReleaseBooking(5, "finished")


def test_a_report_travels() -> None:
    counters = DemandCounters()
    counters.arrived(1.0, "m", 100, 64, 2, 0.5)
    counters.ended(
        2.0, EndedRequest("m", 100, 64, 20, 2.0, complete=True, verdicts=(("itl", "x"),))
    )
    report = reported(counters)
    assert decoder(DemandReport)(encode(report)) == report


# ---------------------------------------------------------------------- planted bugs


def held_requests_are_not_counted(patch: pytest.MonkeyPatch) -> None:
    whole = RouterCore._hold

    def hold(self: RouterCore, *given: Any) -> Any:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(self, "_arrived", lambda *args: None)
            return whole(self, *given)

    patch.setattr(RouterCore, "_hold", hold)


def refused_requests_are_not_counted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RouterCore, "_least_work", lambda self, now, request: (0, 0.0))
    patch.setattr(core_module, "ModelNotFound", Exception)


def a_rerouted_request_counts_twice(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(core_module, "_is_new", lambda request: True)


def refusals_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RouterCore, "_note_refusal", lambda *args: None)


def a_worker_without_its_first_block_counts_as_best(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(core_module, "_most_cached", lambda request, state: 0)


def kv_is_not_given_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DemandCounters, "kv_held", lambda *args: None)


@pytest.mark.parametrize(
    ("plant", "test"),
    [
        (held_requests_are_not_counted, test_placed_held_and_refused_requests_arrive_once_each),
        (refused_requests_are_not_counted, test_placed_held_and_refused_requests_arrive_once_each),
        (a_rerouted_request_counts_twice, test_a_request_that_is_routed_again_is_no_arrival),
        (refusals_are_forgotten, test_a_request_that_expires_while_it_is_held_is_refused),
        (a_worker_without_its_first_block_counts_as_best, test_cached_tokens_are_no_work),
        (kv_is_not_given_back, test_a_booking_counts_its_kv_and_its_first_token),
    ],
)
def test_a_planted_bug_is_found(plant: Any, test: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, ValueError, IndexError)):
        test()

"""A planner's life among nodes: what it sees, orders and tells."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import pytest

from pdserve.errors import ActuatorDenied
from pdserve.ids import NodeId
from pdserve.messages.mode import SetMode
from pdserve.messages.status import DrainOrder, NodeReport, UndoDrain
from pdserve.planner.config import PoolConfig, WorkerModeName
from pdserve.planner.core import owner_of
from pdserve.planner.driver.actuator_watch import ActuatorWatch
from pdserve.planner.driver.decision_log import DecisionLog
from tests.net.world import virtually
from tests.planner.driver.site import MODEL, site

if TYPE_CHECKING:
    from pathlib import Path

    from pdserve.messages.planner import Instance


@virtually
async def test_it_starts_workers_for_a_load_and_drains_them_when_it_has_gone() -> None:
    async with site(rate=0.5) as made:
        planner = await made.planner()
        await asyncio.sleep(60.0)
        assert (made.starts.started, made.serving()) == ([], 1)
        made.router.rate = 2.5
        await made.until(lambda: made.serving() >= 3)
        await asyncio.sleep(60.0)
        assert made.serving() == 3
        assert planner.report.plans[0].present == {"aggregated": 3}
        made.router.rate = 0.1
        await made.until(lambda: made.serving() == 1, 600.0)
        drained = [one for one in planner.service.lines if "stop" in one]
        assert drained
        await asyncio.sleep(60.0)
        assert made.serving() == 1
        assert not planner.degradations.reasons()


@virtually
async def test_workers_that_are_not_told_their_change_are_known_by_their_names() -> None:
    async with site(rate=2.5) as made:
        made.starts.pods = True
        planner = await made.planner()
        await made.until(lambda: made.serving() == 3)
        await asyncio.sleep(600.0)
        assert made.starts.stopped == []
        assert planner.report.plans[0].changes == ()
        assert len(made.starts.started) == 2


@virtually
async def test_with_advise_it_says_what_it_would_do_and_does_nothing() -> None:
    async with site(rate=2.5) as made:
        planner = await made.planner(mode="advise")
        await made.until(lambda: bool(planner.report.plans and planner.report.plans[0].changes))
        await asyncio.sleep(30.0)
        assert planner.report.plans[0].target == {"aggregated": 3}
        assert made.starts.started == []
        assert any("start gpu" in line for line in planner.service.lines)


@virtually
async def test_switched_off_it_decides_nothing() -> None:
    async with site(rate=2.5) as made:
        planner = await made.planner(mode="off")
        await asyncio.sleep(30.0)
        assert (planner.report.plans, planner.report.mode) == ((), "off")
        assert made.starts.started == []


@virtually
async def test_a_drain_is_taken_back_when_the_load_returns() -> None:
    async with site(rate=0.1, workers=2) as made:
        await made.planner()
        for worker in made.workers.values():
            worker.stays = 30.0
        await made.until(lambda: made.serving() == 1, 300.0)
        drained = next(one for one in made.workers.values() if one.card.draining)
        made.router.rate = 2.5
        await made.until(lambda: made.serving() == 2, 30.0)
        assert isinstance(drained.orders[-1], UndoDrain)
        assert drained.node.id in made.workers


@pytest.mark.parametrize(("limit", "ended"), [(20.0, True), (150.0, False)])
@virtually
async def test_a_worker_drains_for_as_long_as_its_own_limit_says(limit: float, ended: bool) -> None:
    """It needs 120 s; the planner's limit is 45 s."""
    async with site(rate=2.5) as made:
        await made.planner()
        await made.until(lambda: made.serving() == 3)
        for worker in made.workers.values():
            worker.stays, worker.limit = 120.0, limit
        made.router.rate = 0.1
        await made.until(lambda: made.serving() < 3, 300.0)
        drained = next(one for one in made.workers.values() if one.card.draining)
        await asyncio.sleep(100.0)
        assert bool(made.starts.stopped) == ended
        told = "by its own limit" in made.planners["p"].binding
        assert told == (not ended), "the plan says what it waits for"
        await asyncio.sleep(30.0)
        assert drained.node.id not in made.workers


@virtually
async def test_a_worker_that_cannot_be_reached_is_named_and_serves_on_once_it_can_be() -> None:
    """A pin of two stops one of three. Its planner does not reach it, and another one is drained by
    hand meanwhile: then the first is needed."""
    async with site(rate=0.1, workers=3) as made:
        planner = await made.planner()
        await made.until(lambda: bool(planner.report.plans))
        victim = made.workers["w0"]
        victim.stays = 30.0
        made.nodes.world.partition("p", "w0")
        await planner.asked("pin", model=MODEL, mix={"aggregated": 2}, seconds=3600.0)
        await made.until(lambda: "waits for w0 to answer" in planner.binding, 60.0)
        made.workers["w1"].tell(draining=True)
        await asyncio.sleep(3.0)
        made.nodes.world.heal()
        await made.until(lambda: bool(victim.orders), 30.0)
        await made.until(lambda: not victim.card.draining and made.serving() == 2, 20.0)
        await asyncio.sleep(10.0)
        assert "to answer" not in planner.binding
        assert made.starts.started == [], "nothing is bought for it"


@virtually
async def test_a_planner_that_dies_changes_nothing_and_its_successor_finds_all() -> None:
    async with site(rate=2.5) as made:
        made.starts.boot = 20.0
        await made.planner("p")
        await made.until(lambda: len(made.starts.started) == 2)
        await made.crash("p")
        await asyncio.sleep(5.0)
        successor = await made.planner("q")
        await made.until(lambda: made.serving() == 3)
        await asyncio.sleep(60.0)
        assert len(made.starts.started) == 2
        assert successor.report.plans[0].present == {"aggregated": 3}


@virtually
async def test_of_two_planners_one_decides_and_the_other_takes_over() -> None:
    async with site(rate=2.5) as made:
        one, other = await made.planner("p"), await made.planner("q")
        await made.until(lambda: made.serving() == 3)
        owners = [planner for planner in (one, other) if planner.report.owner]
        assert len(owners) == 1
        (owner,) = owners
        name = str(owner.node.id)
        survivor = other if owner is one else one
        await made.crash(name)
        await made.until(lambda: survivor.report.owner, 60.0)
        made.router.rate = 4.5
        await made.until(lambda: made.serving() >= 5)


@virtually
async def test_an_older_planner_that_takes_over_is_obeyed() -> None:
    names = [NodeId("p"), NodeId("q")]
    older, newer = sorted(names, key=lambda one: one == owner_of(MODEL, names, budget=0.0))
    async with site(rate=0.3, workers=3) as made:
        modes: tuple[WorkerModeName, ...] = ("aggregated", "prefill", "decode")
        pool = PoolConfig(model=MODEL, ttft=1.0, max=6, min=3, modes=modes)
        survivor = await made.planner(older, pools=(pool,))
        await asyncio.sleep(10.0)
        owner = await made.planner(newer, pools=(pool,))
        await made.until(lambda: owner.report.owner and not survivor.report.owner)
        await asyncio.sleep(100.0)
        await owner.asked("pin", model=MODEL, mix={"prefill": 1, "decode": 2}, seconds=3600.0)
        await made.until(lambda: made.modes() == ["decode", "decode", "prefill"], 400.0)
        await made.crash(newer)
        await made.until(lambda: survivor.report.owner, 60.0)
        await asyncio.sleep(100.0)
        await survivor.asked("pin", model=MODEL, mix={"aggregated": 3}, seconds=3600.0)
        await made.until(lambda: made.modes() == ["aggregated"] * 3, 400.0)


@virtually
async def test_an_actuator_that_does_not_answer_is_named_and_nothing_is_started_twice() -> None:
    async with site(rate=0.5) as made:
        made.starts.down = "slurmctld: connection refused"
        planner = await made.planner()
        await made.until(lambda: bool(planner.report.plans))
        made.router.rate = 2.5
        await asyncio.sleep(60.0)
        assert made.starts.started == []
        reason = planner.degradations.reasons()["planner_actuator_down"]
        assert "fake: slurmctld: connection refused" in reason
        made.starts.down = ""
        await made.until(lambda: made.serving() == 3)
        await asyncio.sleep(10.0)
        assert "planner_actuator_down" not in planner.degradations.reasons()


@virtually
async def test_what_an_actuator_denies_is_told_in_its_words() -> None:
    async with site(rate=2.5) as made:
        made.starts.start_error = ActuatorDenied("user is not in the account")
        planner = await made.planner()
        await asyncio.sleep(400.0)
        reasons = planner.degradations.reasons()
        assert "user is not in the account" in reasons["planner_kind_failing"]
        assert planner.metrics.planner_orders.labels("start", "denied").value >= 3
        made.starts.start_error = None
        assert not (await planner.asked("enable", kind="gpu")).refused
        await made.until(lambda: made.serving() == 3)


@virtually
async def test_without_routers_it_is_blind_and_says_so_after_a_minute() -> None:
    async with site(rate=0.5, workers=3) as made:
        planner = await made.planner()
        await asyncio.sleep(30.0)
        await made.nodes.crash("r")
        await made.nodes.add("f", role="frontend")
        await asyncio.sleep(200.0)
        assert "planner_blind" in planner.degradations.reasons()
        assert made.serving() >= 1
        assert planner.report.plans[0].blind


@virtually
async def test_a_worker_that_refuses_is_heard() -> None:
    async with site(rate=0.1, workers=2) as made:
        for worker in made.workers.values():
            worker.refused = "no other ready worker takes requests"
        planner = await made.planner()
        refused = planner.metrics.planner_orders.labels("stop", "vetoed")
        await made.until(lambda: refused.value > 0, 300.0)
        await asyncio.sleep(10.0)
        assert made.serving() == 2
        assert any("no other ready worker" in line for line in planner.service.lines)


@virtually
async def test_workers_that_have_obeyed_a_planner_with_a_clock_ahead_obey_again() -> None:
    async with site(rate=0.1, workers=2) as made:
        for worker in made.workers.values():
            worker.fence.obeyed(10**16, 5)
        await made.planner()
        await made.until(lambda: made.serving() == 1, 900.0)


@virtually
async def test_a_decision_that_takes_too_long_is_told_until_it_ends() -> None:
    async with site(rate=0.5) as made:
        planner = await made.planner()
        await made.until(lambda: bool(planner.report.plans))
        usual, ends = planner.service._offload, asyncio.Event()

        async def slow(work):
            await ends.wait()
            return await usual(work)

        planner.service._offload = slow
        await asyncio.sleep(70.0)
        assert (
            "decision has taken more than 60 s" in planner.degradations.reasons()["planner_failed"]
        )
        ends.set()
        await asyncio.sleep(10.0)
        assert "planner_failed" not in planner.degradations.reasons()


@virtually
async def test_after_a_standstill_workers_that_serve_by_now_are_not_taken_for_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with site(rate=0.5) as made:
        planner = await made.planner()
        await made.until(lambda: bool(planner.report.plans))
        made.router.rate = 1.5
        await made.until(lambda: bool(made.starts.started))
        await made.until(lambda: "booting" in str(planner.report.plans[0].changes), 10.0)
        # It stands still for 100 s, and sees what there was before for another second.
        service, resumes = planner.service, planner.node.now() + 100.0
        members, listed = service.sight._members, service.sight._members()
        lists, started = made.starts.list, await made.starts.list()

        async def still(nodes: object) -> dict[NodeId, NodeReport]:
            await asyncio.sleep(max(0.0, resumes - planner.node.now()))
            return {}

        async def old_list() -> list[Instance]:
            return started if blind() else await lists()

        def blind() -> bool:
            return planner.node.now() < resumes + 1.0

        monkeypatch.setattr(service, "_reports", still)
        monkeypatch.setattr(service.sight, "_members", lambda: listed if blind() else members())
        monkeypatch.setattr(made.starts, "list", old_list)
        await made.until(lambda: planner.node.now() > resumes + 30.0, 140.0)
        assert not made.starts.stopped
        assert made.serving() >= 2


@virtually
async def test_a_decision_of_before_it_was_taken_for_dead_is_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with site(rate=0.5) as made:
        planner = await made.planner()
        await made.until(lambda: bool(planner.report.plans))
        usual, orders = planner.service._offload, made.starts.started

        async def meanwhile(work):
            output = await usual(work)
            if output.orders:
                planner.service._offload = usual
                planner.node._epoch += 1000
                monkeypatch.setattr(
                    planner.service.orders, "carry_out", lambda given: orders.append("old")
                )
            return output

        planner.service._offload = meanwhile
        made.router.rate = 2.5
        await made.until(lambda: planner.service._offload is usual, 60.0)
        await asyncio.sleep(1.0)
        assert "old" not in orders


@virtually
async def test_a_planner_that_has_drained_knows_nothing_of_before() -> None:
    """Others have decided meanwhile: a start that it had asked for is no longer wanted."""
    async with site(rate=0.5) as made:
        planner = await made.planner()
        await made.until(lambda: bool(planner.report.plans))
        core, term = planner.service._core, planner.term
        planner.service.drain()
        await asyncio.sleep(20.0)
        planner.service.undo_drain()
        await made.until(lambda: bool(planner.report.plans), 30.0)
        assert planner.service._core is not core
        assert planner.term > term


@virtually
async def test_orders_have_the_term_of_the_planners_life() -> None:
    async with site(rate=0.1, workers=2) as made:
        planner = await made.planner()
        everyone = list(made.workers.values())
        await made.until(lambda: any(one.orders for one in everyone), 300.0)
        order = next(one.orders[0] for one in everyone if one.orders)
        assert isinstance(order, DrainOrder)
        assert (order.term, order.stay, order.last) == (planner.term, False, False)
        assert order.term >= planner.node.epoch
        assert order.number > 0


@virtually
async def test_modes_are_switched_for_a_pin() -> None:
    async with site(rate=0.3, workers=3) as made:
        pool = PoolConfig(
            model=MODEL, ttft=1.0, min=3, max=6, modes=("aggregated", "prefill", "decode")
        )
        planner = await made.planner(pools=(pool,))
        await made.until(lambda: bool(planner.report.plans))
        await asyncio.sleep(100.0)
        answer = await planner.asked("pin", model=MODEL, mix={"prefill": 1, "decode": 2})
        assert not answer.refused
        await made.until(
            lambda: (
                sorted(one.card.mode for one in made.workers.values())
                == ["decode", "decode", "prefill"]
            ),
            400.0,
        )
        orders = [one for worker in made.workers.values() for one in worker.orders]
        assert any(isinstance(one, SetMode) and one.term == planner.term for one in orders)
        assert planner.report.pins == {MODEL: {"prefill": 1, "decode": 2}}


@virtually
async def test_a_pause_reaches_all_planners_and_outlives_the_one_that_heard_it() -> None:
    async with site(rate=0.5) as made:
        one, other = await made.planner("p"), await made.planner("q")
        await asyncio.sleep(10.0)
        assert not (await one.asked("pause", model=MODEL, by="eve")).refused
        await made.until(lambda: MODEL in other.report.paused, 5.0)
        await made.crash("p")
        made.router.rate = 4.0
        await asyncio.sleep(60.0)
        assert (made.starts.started, made.serving()) == ([], 1)
        assert "paused by eve" in other.binding
        third = await made.planner("s")
        await made.until(lambda: MODEL in third.report.paused, 10.0)
        await third.asked("resume")
        await made.until(lambda: made.serving() >= 4)


@virtually
async def test_an_order_that_makes_no_sense_is_refused_with_what_would(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with site(rate=0.5) as made:
        planner = await made.planner()
        await made.until(lambda: made.serving() == 1)
        for verb, fields, says in (
            ("enable", {"kind": "gpuu"}, "nothing starts a kind 'gpuu'; there are gpu"),
            ("pause", {"seconds": 0.0}, "must hold for more than 0 s"),
            ("pause", {"seconds": 1e18}, "and for 31536000 s at most"),
            ("pin", {"model": MODEL, "mix": {"decod": 1}}, "for each of aggregated, prefill"),
        ):
            assert says in (await planner.asked(verb, **fields)).refused
        assert not (await planner.asked("enable", kind="gpu")).refused
        monkeypatch.setattr("pdserve.planner.driver.wishes._MOST", 1)
        assert not (await planner.asked("pause", model=MODEL)).refused
        assert "as many pauses and pins" in (await planner.asked("pause")).refused
        assert not (await planner.asked("resume", model=MODEL)).refused
        assert (planner.report.paused, planner.report.pins) == ({}, {})


@virtually
async def test_a_plan_is_explained_by_its_number() -> None:
    async with site(rate=2.5) as made:
        planner = await made.planner()
        await made.until(lambda: made.serving() == 3)
        newest = await planner.asked("explain")
        assert [one.model for one in newest.plans] == [MODEL]
        first = await planner.asked("explain", number=1)
        assert first.plans[0].number == 1
        assert first.log
        assert "#1:" in first.log[0]
        assert (
            "is not kept here; there are: 1 to"
            in (await planner.asked("explain", number=999)).refused
        )


@virtually
async def test_a_planner_that_drains_leaves_its_models_to_others() -> None:
    async with site(rate=0.5) as made:
        one, other = await made.planner("p"), await made.planner("q")
        await asyncio.sleep(15.0)
        owner, rest = (one, other) if one.report.owner else (other, one)
        owner.service.drain()
        assert (owner.report.owner, owner.report.plans) == (False, ())
        await made.until(lambda: rest.report.owner, 20.0)
        assert "draining" in (owner.service.unready_reason() or "")
        owner.service.undo_drain()
        await made.until(lambda: not rest.report.owner, 20.0)


@virtually
async def test_a_defect_in_a_decision_ends_no_later_ones() -> None:
    async with site(rate=2.5) as made:
        planner = await made.planner()
        core = planner.service._core_of_this_life()
        whole, core.tick = core.tick, lambda now, seen: 1 / 0  # type: ignore
        await asyncio.sleep(20.0)
        assert "ZeroDivisionError" in planner.degradations.reasons()["planner_failed"]
        core.tick = whole  # type: ignore[method-assign]
        await made.until(lambda: made.serving() == 3)
        assert "planner_failed" not in planner.degradations.reasons()


@virtually
async def test_its_end_has_a_deadline_and_no_failure_keeps_the_rest_from_ending() -> None:
    async with site() as made:
        planner = await made.planner()
        closed: list[str] = []

        class Stuck:
            name = "stuck"

            async def close(self) -> None:
                closed.append("stuck")
                await asyncio.Event().wait()

        class Broken:
            name = "broken"

            async def close(self) -> None:
                closed.append("broken")
                raise ActuatorDenied("no")

        class Last:
            name = "last"

            async def close(self) -> None:
                closed.append("last")

        ends: list[Any] = [Stuck(), Broken(), Last()]
        planner.service.watches = tuple(ActuatorWatch(one) for one in ends)
        began = made.nodes.loop.time()
        await planner.service.close()
        assert closed == ["stuck", "broken", "last"]
        assert made.nodes.loop.time() - began <= 20.0


async def test_the_decision_log_is_written_beside_the_loop_and_its_trouble_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that does not answer holds up no decision, and the rest comes at the end."""
    async with site() as made:
        planner = await made.planner()
        service = planner.service
        go, path = threading.Event(), tmp_path / "decisions"
        service._log = DecisionLog(lambda: 0.0, path)
        write = service._log.write
        monkeypatch.setattr(service._log, "write", lambda: go.wait(30.0) and write())
        monkeypatch.setattr("pdserve.planner.service._SLOW_DISK", 0.05)
        service._log.add("one")
        service._write_log()
        service._log.add("two")
        service._write_log()
        await made.until(lambda: "planner_log" in planner.degradations.reasons())
        assert not path.exists()
        go.set()
        await service.close()
        assert [line.split()[1] for line in path.read_text().splitlines()] == ["one", "two"]
        assert "planner_log" not in planner.degradations.reasons()

"""Workers that come, go and change their modes while a trace is replayed."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from pdserve.errors import ActuatorDenied, ActuatorExhausted
from pdserve.messages.mode import SetMode
from pdserve.messages.status import DrainOrder
from pdserve.runtime.rpc_methods import DRAIN, MODE
from pdserve.runtime.tasks import Tasks
from pdserve.sim.replay.config import ReplayConfig
from pdserve.sim.replay.run import ReplayResult, replay
from pdserve.sim.replay.virtual_actuator import StartUp, VirtualActuator
from pdserve.sim.workloads.generate import Unique

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from pdserve.ids import Seconds
    from pdserve.sim.replay.cluster import ReplayCluster

CONFIG = ReplayConfig(workers=2, block_size=64, kv_tokens=64_000, seed=1, scaling=True)
LOAD = Unique(requests=120, rate=2.0, input=2000, output=200)
"""A minute."""
FIVE_SECONDS = StartUp(median=5.0, p90=5.0)


@dataclass
class Script:
    """Runs one coroutine beside the trace."""

    act: Callable[[ReplayCluster, VirtualActuator], Coroutine[Any, Any, None]]
    start_up: StartUp = FIVE_SECONDS
    slots: int = 0
    said: dict[str, Any] = field(default_factory=dict)

    async def begin(self, cluster: ReplayCluster, now: Callable[[], Seconds]) -> None:
        self.actuator = VirtualActuator(cluster, Random(1), self.start_up, slots=self.slots)
        self.tasks = Tasks("script")
        self.task = self.tasks.spawn(self.act(cluster, self.actuator), "script")

    async def end(self) -> None:
        if self.task.done():
            self.task.result()
        await self.tasks.close()
        self.listed = await self.actuator.list()
        await self.actuator.close()

    def summary(self) -> dict[str, Any]:
        return self.said


def run(script: Script, config: ReplayConfig = CONFIG) -> ReplayResult:
    result = replay(config, iter(LOAD), scaler=script)
    assert {record.outcome for record in result.records} == {"completed"}
    assert sum(w["finished"] for w in result.workers) >= LOAD.requests
    return result


def test_a_worker_comes_and_serves() -> None:
    async def act(cluster: ReplayCluster, actuator: VirtualActuator) -> None:
        await asyncio.sleep(10)
        assert (await actuator.start("sim", "aggregated", "one")).state == "pending"
        assert (await actuator.start("sim", "aggregated", "one")).change == "one"

    script = Script(act, StartUp(median=5.0, p90=5.0, pending=3.0))
    result = run(script)
    stay = script.actuator.stays["one"]
    assert len(script.actuator.stays) == 3
    assert stay.booted - stay.asked == pytest.approx(3.0)
    assert stay.ready - stay.booted == pytest.approx(5.0, abs=0.2)
    counters = {worker["worker"]: worker for worker in result.workers}
    assert counters["w-one"]["finished"] > 0
    assert [one.state for one in script.listed] == ["running"] * 3


@pytest.mark.parametrize("way", ["ordered", "stopped"])
def test_a_worker_leaves_under_load_and_nothing_is_lost(way: str) -> None:
    async def act(cluster: ReplayCluster, actuator: VirtualActuator) -> None:
        await actuator.start("sim", "aggregated", "one")
        await asyncio.sleep(20)
        worker = actuator.stays["one"].worker
        assert worker is not None
        if way == "ordered":
            router = cluster.routers[0].node
            state = await router.ref(worker.node.id, worker.node.epoch).ask(
                DRAIN, DrainOrder(), timeout=1.0
            )
            assert not state.refused
        else:
            await actuator.stop("one", 30.0)
            await actuator.stop("one", 30.0)
        await worker.gone.wait()

    script = Script(act)
    result = run(script)
    assert [one.state for one in script.listed] == ["running", "running", "ended"]
    stay = script.actuator.stays["one"]
    assert 20 < stay.ended < 55
    assert stay.paid(100.0) == pytest.approx(stay.ended - stay.booted)
    counters = {worker["worker"]: worker for worker in result.workers}
    assert counters["w-one"]["finished"] > 0
    assert len(result.workers) == 3


def test_a_worker_changes_its_mode_under_load() -> None:
    async def act(cluster: ReplayCluster, actuator: VirtualActuator) -> None:
        await asyncio.sleep(10)
        first, router = cluster.workers[0].node, cluster.routers[0].node
        ref = router.ref(first.id, first.epoch)
        report = await ref.ask(MODE, SetMode(mode="prefill"), timeout=1.0)
        assert not report.refused
        other = cluster.workers[1].node
        await asyncio.sleep(10)
        await router.ref(other.id, other.epoch).ask(MODE, SetMode(mode="decode"), timeout=1.0)

    result = run(Script(act))
    assert sorted(worker["mode"] for worker in result.workers) == ["decode", "prefill"]
    assert result.summary["transfers"]["bytes"] > 0


def test_starts_that_come_to_nothing() -> None:
    async def act(cluster: ReplayCluster, actuator: VirtualActuator) -> None:
        for number in range(20):
            await actuator.start("sim", "aggregated", f"c{number}")

    script = Script(act, StartUp(median=2.0, p90=4.0, stuck=0.3, failing=0.3))
    run(script)
    states = [one.state for one in script.listed]
    assert set(states) == {"pending", "failed", "running"}
    assert all(one.reason for one in script.listed if one.state != "running")
    for one in script.listed[2:]:
        paid = script.actuator.stays[one.change].paid(60.0)
        assert (paid == 0) == (one.state == "pending")


def test_what_it_refuses() -> None:
    async def act(cluster: ReplayCluster, actuator: VirtualActuator) -> None:
        await actuator.start("sim", "aggregated", "one")
        for kind, mode, change, error in (
            ("gpu", "aggregated", "two", ActuatorDenied),
            ("sim", "both", "two", ActuatorDenied),
            ("sim", "decode", "two", ActuatorExhausted),
        ):
            with pytest.raises(error):
                await actuator.start(kind, mode, change)
        await actuator.stop("nobody", 1.0)
        await actuator.stop("one", 1.0)
        assert (await actuator.list())[-1].state == "ended"
        assert (await actuator.start("sim", "aggregated", "one")).state == "ended"

    script = Script(act, slots=3)
    result = run(script)
    assert len(result.workers) == 2


def test_workers_of_the_beginning_can_be_taken_away() -> None:
    async def act(cluster: ReplayCluster, actuator: VirtualActuator) -> None:
        await asyncio.sleep(20)
        first = cluster.workers[0]
        await actuator.stop(first.change, 30.0)
        await first.gone.wait()

    script = Script(act)
    assert len(run(script).workers) == 2
    assert [one.state for one in script.listed] == ["ended", "running"]


def test_a_replay_with_changes_is_the_same_again() -> None:
    async def act(cluster: ReplayCluster, actuator: VirtualActuator) -> None:
        await actuator.start("sim", "aggregated", "one")
        await asyncio.sleep(30)
        await actuator.stop("one", 10.0)

    noisy = replace(CONFIG, noise=0.3)
    one, two = (run(Script(act), noisy).plain() for _ in range(2))
    assert one == two

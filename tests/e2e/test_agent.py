"""An agent with real workers: they outlive it, and the next one finds them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from typing import TYPE_CHECKING

import pytest

from pdserve.errors import ActuatorExhausted
from pdserve.launch.cluster.addresses import ClusterConfig
from pdserve.launch.cluster.node_factory import NodeFactory
from pdserve.planner.actuators.agents import AgentsActuator
from pdserve.testing.actuators.suite import ActuatorSuite
from tests.chaos.cluster import Cluster, Node, eventually
from tests.e2e.agent_workers import kill_workers, pids
from tests.e2e.commands import pdserve

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Collection, Mapping
    from pathlib import Path

    from pdserve.messages.planner import Instance
    from pdserve.planner.actuators.base import Actuator
    from pdserve.runtime.node import Node as ClusterNode

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(sys.platform != "linux", reason="an agent reads /proc"),
]
ENDED = ("ended", "failed")


class RealLab:
    """A real agent with two slots, and a planner's node in this process."""

    kind = "cpu"
    up = "running"
    deadline = 10.0
    patience = 60.0
    pause = 0.2
    cannot: Mapping[str, str] = {
        "never_ready": "a real worker joins as soon as it runs",
        "deny": "an agent denies only what it does not know",
    }
    actuator: Actuator
    planner: ClusterNode

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.agent = self.start_agent()

    def start_agent(self) -> Node:
        flags = ("--agent-slots", "cpu=x2", "--agent-dir", str(self.cluster.home / "agent"))
        broken = ("--agent-worker", "cpu/broken=--model=/nowhere")
        engine = ("--engine", "sim", "--engine-option", "blocks=64")
        where = ("--listen", self.cluster.address)
        agent = self.cluster.start("agent", "agent-of-test", *flags, *broken, *engine, *where)
        agent.wait_ready()
        return agent

    async def restart_agent(self) -> None:
        self.agent = await asyncio.to_thread(self.start_agent)

    async def open(self) -> None:
        home = {
            "HOME": str(self.cluster.home),
            "XDG_CONFIG_HOME": str(self.cluster.home / "config"),
        }
        config = ClusterConfig(join=(self.cluster.address,))
        self.planner = NodeFactory(config, private=False, environ=home).node("planner")
        await self.planner.start()
        self.actuator = await self.reopen()

    async def close(self) -> None:
        """Ends every worker, whoever started it."""
        kill_workers(self.cluster.address)
        await self.planner.leave()
        await self.planner.close()

    def pids(self) -> dict[str, int]:
        """The workers that really run, by change."""
        return pids(self.cluster.address)

    async def find(self, change: str) -> Instance:
        (found,) = [one for one in await self.actuator.list() if one.change == change]
        return found

    async def until(self, change: str, states: Collection[str]) -> Instance:
        async with asyncio.timeout(self.patience):
            while (found := await self.find(change)).state not in states:  # noqa: ASYNC110
                await asyncio.sleep(self.pause)
        return found

    # ------------------------------------------------------------------ the suite's lab

    async def reopen(self) -> Actuator:
        return AgentsActuator(self.planner, deadline=self.deadline)

    async def processes(self, change: str) -> int:
        return int(change in self.pids())

    async def die(self, change: str) -> None:
        os.kill(self.pids()[change], signal.SIGKILL)

    async def never_ready(self) -> None:
        raise NotImplementedError

    async def start_fails(self) -> None:
        self.kind = "cpu/broken"

    async def deny(self) -> None:
        raise NotImplementedError

    async def silence(self) -> None:
        self.agent.process.send_signal(signal.SIGSTOP)


@pytest.fixture
async def lab(tmp_path: Path) -> AsyncIterator[RealLab]:
    with Cluster(tmp_path) as cluster:
        made = RealLab(cluster)
        try:
            await made.open()
            yield made
        finally:
            with contextlib.suppress(ProcessLookupError):
                made.agent.process.send_signal(signal.SIGCONT)
            await made.close()


async def test_workers_outlive_their_agent(lab: RealLab) -> None:
    await lab.actuator.start("cpu", "aggregated", "c1")
    await asyncio.to_thread(lab.agent.kill)
    _forget_pid(lab.cluster.home / "agent/c1.json")
    pid = lab.pids()["c1"]
    await lab.restart_agent()
    found = await lab.until("c1", ("running",))
    assert found.ref.endswith(f"pid {pid}")
    assert found.node is not None
    assert (await lab.actuator.start("cpu", "aggregated", "c1")).ref == found.ref
    await _fill_slots(lab)
    await _show(lab)
    await lab.die("c1")
    failed = await lab.until("c1", ENDED)
    assert failed.state == "failed"
    assert "left no exit status" in failed.reason
    assert await asyncio.to_thread(lab.agent.end) == 0, "an agent may go at any time"
    assert list(lab.pids()) == ["c3"]
    await lab.restart_agent()
    await lab.until("c3", ("running",))
    await lab.actuator.stop("c3", 30.0)
    ended = await lab.until("c3", ENDED)
    assert (ended.state, lab.pids()) == ("ended", {})


def _forget_pid(path: Path) -> None:
    """As if the agent had been killed between the start and its note of it."""
    record = json.loads(path.read_bytes())
    assert record["pid"]
    path.write_text(json.dumps(record | {"pid": 0, "begun": 0}))


@pytest.mark.parametrize("away", [True, False], ids=["while it was away", "after its return"])
async def test_a_later_agent_tells_an_end_in_order_from_a_crash(lab: RealLab, away: bool) -> None:
    for change in ("c1", "c2"):
        await lab.actuator.start("cpu", "aggregated", change)
        await lab.until(change, ("running",))
    await asyncio.to_thread(lab.agent.kill)
    if not away:
        await lab.restart_agent()
        await lab.until("c1", ("running",))
    os.kill(lab.pids()["c1"], signal.SIGTERM)
    await lab.die("c2")
    await asyncio.to_thread(eventually, lambda: not lab.pids(), "the workers end", lab.patience)
    if away:
        await lab.restart_agent()
    ended, failed = await lab.until("c1", ENDED), await lab.until("c2", ENDED)
    assert (ended.state, ended.reason) == ("ended", "ended with status 0")
    assert failed.state == "failed"
    assert failed.reason.startswith("left no exit status")


async def _fill_slots(lab: RealLab) -> None:
    await lab.actuator.start("cpu", "prefill", "c2")
    with pytest.raises(ActuatorExhausted):
        await lab.actuator.start("cpu", "aggregated", "c3")
    await lab.actuator.stop("c2", 0.0)
    assert (await lab.until("c2", ENDED)).state == "ended", "ended while it was booting"
    await lab.actuator.start("cpu", "decode", "c3")
    await lab.until("c3", ("running",))
    modes = {one.card.change: one.card.mode for one in lab.planner.registry if one.card}
    async with asyncio.timeout(lab.patience):
        while modes.get("c3") != "decode":
            await asyncio.sleep(lab.pause)
            modes = {one.card.change: one.card.mode for one in lab.planner.registry if one.card}


async def _show(lab: RealLab) -> None:
    """`pdserve status` names kinds, workers and their logs."""
    page = (await asyncio.to_thread(pdserve, lab.cluster, "status")).stdout
    assert "0 of 2" in page
    (line,) = [line for line in page.splitlines() if " c1 " in line]
    assert "running" in line
    assert str(lab.cluster.home / "agent/c1.log") in line


@pytest.mark.long(one_in=5)
class TestRealAgent(ActuatorSuite):
    @pytest.fixture
    async def lab(self, tmp_path: Path) -> AsyncIterator[RealLab]:
        with Cluster(tmp_path) as cluster:
            made = RealLab(cluster)
            try:
                await made.open()
                yield made
            finally:
                with contextlib.suppress(ProcessLookupError):
                    made.agent.process.send_signal(signal.SIGCONT)
                await made.close()

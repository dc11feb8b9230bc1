"""Agents of several hosts behind one actuator: by the suite, and where hosts get lost."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from pdserve.errors import ActuatorDenied, ActuatorExhausted, ActuatorTransient
from pdserve.ids import NodeId
from pdserve.messages.agent import AgentReport
from pdserve.messages.planner import Instance, Kind
from pdserve.planner.actuators import agents
from pdserve.planner.actuators.agents import AgentsActuator, choose_agent, merge_kinds
from pdserve.testing.actuators.suite import ActuatorSuite
from tests.planner.actuators.agent_lab import AgentLab, agent_lab

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

A, B = NodeId("a"), NodeId("b")


def report(free: int, slots: int = 4, *changes: str) -> AgentReport:
    instances = tuple(Instance(change=one, kind="gpu") for one in changes)
    return AgentReport(
        kinds=(Kind(name="gpu", slots=slots),), free={"gpu": free}, instances=instances
    )


def test_the_emptiest_agent_is_chosen() -> None:
    assert choose_agent("gpu", {A: report(1), B: report(2)}, [], {}) == B
    assert choose_agent("gpu", {B: report(2), A: report(2)}, [], {}) == A
    assert choose_agent("gpu", {A: report(1), B: report(2)}, [B, B], {}) == A
    assert choose_agent("gpu", {A: report(1), B: report(2)}, [], {B: "it drains"}) == A


def test_a_host_where_workers_fail_is_chosen_last() -> None:
    """It is always the emptiest one, and three failures in a row would disable the kind."""
    failed = Instance(change="c", kind="gpu", state="failed")
    broken = replace(report(4), instances=(failed,))
    assert choose_agent("gpu", {A: broken, B: report(1)}, [], {}) == B
    assert choose_agent("gpu", {A: broken, B: report(0)}, [], {}) == A
    other = replace(report(4), instances=(replace(failed, kind="cpu"),))
    assert choose_agent("gpu", {A: other, B: report(1)}, [], {}) == A


def test_no_room_and_no_kind_are_told_apart() -> None:
    reports = {A: report(0), B: report(1)}
    with pytest.raises(ActuatorExhausted, match="on any of 2 agents"):
        choose_agent("gpu", reports, [B], {})
    with pytest.raises(ActuatorExhausted, match="of 2 agents; b: its disk is full"):
        choose_agent("gpu", reports, [], {B: "its disk is full"})
    with pytest.raises(ActuatorDenied, match="they have gpu"):
        choose_agent("cpu", reports, [], {})
    with pytest.raises(ActuatorDenied, match="there are none"):
        choose_agent("cpu", {}, [], {})


def test_kinds_of_all_hosts_count_together() -> None:
    other = AgentReport(kinds=(Kind(name="cpu", slots=8), Kind(name="gpu", slots=1)))
    found = merge_kinds({A: report(0), B: other})
    assert [(one.name, one.slots, one.actuator) for one in found] == [
        ("cpu", 8, "agents"),
        ("gpu", 5, "agents"),
    ]


@pytest.fixture
async def lab(tmp_path: Path) -> AsyncIterator[AgentLab]:
    async with agent_lab(tmp_path) as made:
        yield made


class TestAgents(ActuatorSuite):
    @pytest.fixture
    async def lab(self, tmp_path: Path) -> AsyncIterator[AgentLab]:
        async with agent_lab(tmp_path) as made:
            yield made


async def states(lab: AgentLab) -> dict[str, str]:
    return {one.change: one.state for one in await lab.actuator.list()}


async def start(lab: AgentLab, *changes: str) -> list[str]:
    """Starts workers at the same time; returns their agents."""
    found = await asyncio.gather(*(lab.actuator.start("gpu", "aggregated", one) for one in changes))
    return sorted(one.ref.split()[0] for one in found)


async def test_workers_spread_over_hosts(lab: AgentLab) -> None:
    await lab.add_agent("agent-b", {"gpu": ("0", "1")})
    await lab.until_known("agent-b")
    assert await start(lab, "x1", "x2") == ["agent-a", "agent-b"]
    assert await start(lab, "x3", "x4") == ["agent-a", "agent-b"]
    with pytest.raises(ActuatorExhausted):
        await start(lab, "x5")


async def test_no_agents_have_no_kinds_and_no_workers(lab: AgentLab) -> None:
    await lab.crash_agent("agent-a")
    async with asyncio.timeout(lab.patience):
        while lab.planner().registry.get(NodeId("agent-a")):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    assert not await lab.actuator.kinds()
    assert not await lab.actuator.list()
    with pytest.raises(ActuatorDenied, match="there are none"):
        await start(lab, "x1")


async def test_a_lost_agents_workers_may_run(lab: AgentLab) -> None:
    await start(lab, "x1")
    await lab.crash_agent("agent-a")
    (found,) = await _list_when_it_answers(lab)
    assert (found.state, found.node) == ("unknown", "a-gpu-0")
    assert "agent agent-a has not answered" in found.reason
    await lab.add_agent("agent-a", {"gpu": ("0", "1")})
    await lab.until_known("agent-a")
    assert await states(lab) in ({"x1": "running"}, {"x1": "booting"})
    assert await lab.processes("x1") == 1


async def test_a_lost_agents_workers_take_no_slot_of_the_others(lab: AgentLab) -> None:
    await start(lab, "x1")
    await lab.crash_agent("agent-a")
    await lab.add_agent("agent-b", {"gpu": ("0", "1")})
    await lab.until_known("agent-b")
    (gpu,) = await lab.actuator.kinds()
    listed = await _list_when_it_answers(lab)
    assert gpu.slots - len(listed) == 2
    assert await start(lab, "x2", "x3") == ["agent-b", "agent-b"]


async def _list_when_it_answers(lab: AgentLab) -> list[Instance]:
    async with asyncio.timeout(lab.patience):
        while True:
            try:
                return list(await lab.actuator.list())
            except ActuatorTransient:
                await asyncio.sleep(0.05)


async def test_a_host_that_is_lost_with_its_workers_is_given_up(
    lab: AgentLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    await lab.never_ready()
    await start(lab, "x1")
    await states(lab)
    await lab.crash_agent("agent-a")
    assert [one.state for one in await _list_when_it_answers(lab)] == ["unknown"]
    async with asyncio.timeout(lab.patience):
        while lab.planner().registry.get(NodeId("agent-a")):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    assert await states(lab) == {"x1": "unknown"}
    monkeypatch.setattr(agents, "_LOST", 0.0)
    assert await states(lab) == {}


async def test_an_order_whose_answer_is_lost_is_not_given_to_another_host(lab: AgentLab) -> None:
    await lab.add_agent("agent-b", {"gpu": ("0",)})
    await lab.until_known("agent-b")
    actuator = lab.actuator
    assert isinstance(actuator, AgentsActuator)
    before = await actuator._reports()
    lab.world.pause("agent-a")
    actuator._remember("x1", NodeId("agent-a"))
    with pytest.raises(ActuatorTransient):
        await start(lab, "x1")
    assert set(before) == {"agent-a", "agent-b"}
    assert await lab.processes("x1") == 0
    lab.world.resume("agent-a")
    assert await start(lab, "x1") == ["agent-a"]
    assert await lab.processes("x1") == 1


async def test_ending_is_not_confirmed_while_a_host_that_may_have_it_is_silent(
    lab: AgentLab,
) -> None:
    await lab.add_agent("agent-b", {"gpu": ("0",)})
    await lab.until_known("agent-b")
    lab.world.pause("agent-b")
    with pytest.raises(ActuatorTransient, match="agent-b does not answer"):
        await lab.actuator.stop("x1", 1.0)
    lab.world.resume("agent-b")


async def test_an_agent_that_drains_starts_nothing_more(lab: AgentLab) -> None:
    await start(lab, "x1")
    lab.services["agent-a"].draining = True
    with pytest.raises(ActuatorExhausted):
        await start(lab, "x2")
    assert await start(lab, "x1") == ["agent-a"]
    await lab.actuator.stop("x1", 1.0)


async def test_a_worker_that_ended_long_ago_takes_no_slot(
    lab: AgentLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdserve.agent.workers._KEEP_ENDED", 0.0)
    for change in ("x1", "x2", "x3"):
        await start(lab, change)
        await lab.actuator.list()
        await lab.die(change)
        async with asyncio.timeout(lab.patience):
            while await lab.actuator.list():  # noqa: ASYNC110
                await asyncio.sleep(0.02)
    await start(lab, "x4")


async def test_an_order_that_never_arrives_takes_a_slot_for_a_while_only(
    lab: AgentLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    actuator = lab.actuator
    assert isinstance(actuator, AgentsActuator)
    for change in ("lost1", "lost2"):
        actuator._remember(change, NodeId("agent-a"))
    with pytest.raises(ActuatorExhausted):
        await start(lab, "x1")
    monkeypatch.setattr(agents, "_ON_ITS_WAY", 0.0)
    await start(lab, "x1")


async def _forgotten(lab: AgentLab, name: str) -> None:
    async with asyncio.timeout(lab.patience):
        while lab.planner().registry.get(NodeId(name)):  # noqa: ASYNC110
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("listed", [True, False])
async def test_a_repeat_of_an_order_to_a_lost_agent_starts_nothing_elsewhere(
    lab: AgentLab, listed: bool
) -> None:
    await lab.add_agent("agent-b", {"gpu": ("0",)})
    await lab.until_known("agent-b")
    actuator = lab.actuator
    assert isinstance(actuator, AgentsActuator)
    if listed:
        assert await start(lab, "x1") == ["agent-a"]
    else:  # it was sent, and its answer was lost
        actuator._remember("x1", NodeId("agent-a"))
    await lab.crash_agent("agent-a")
    await _forgotten(lab, "agent-a")
    with pytest.raises(ActuatorTransient, match="agent-a"):
        await start(lab, "x1")
    assert not lab.processes_of["agent-b"].alive

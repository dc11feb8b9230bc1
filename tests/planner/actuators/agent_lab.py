"""Agents, workers and a planner as nodes in memory; the agents' processes are fakes."""

from __future__ import annotations

import asyncio
import random
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from pdserve.agent.records import RecordStore
from pdserve.agent.service import AgentService
from pdserve.agent.workers import WorkerCommand, Workers
from pdserve.errors import ActuatorDenied
from pdserve.gossip.config import GossipConfig
from pdserve.ids import NodeId
from pdserve.messages.node import NodeCard
from pdserve.net.transport.memory import MemoryWorld
from pdserve.observe.degraded import Degradations
from pdserve.observe.metrics import Metrics
from pdserve.planner.actuators.agents import AgentsActuator
from pdserve.runtime.node import Node, NodeConfig
from tests.agent.support import FakeProcesses
from tests.support.net_support import KEY

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence
    from pathlib import Path

    from pdserve.agent.processes import Started
    from pdserve.agent.records import WorkerRecord
    from pdserve.planner.actuators.base import Actuator

QUICK = GossipConfig(gossip_interval=0.005, ping_interval=0.2)


class JoiningProcesses(FakeProcesses):
    """Fake processes whose workers join the lab's cluster."""

    def __init__(self, lab: AgentLab) -> None:
        super().__init__()
        self.lab = lab
        self.joins = True
        self.denied = ""

    def launch(self, command: Sequence[str], environ: Mapping[str, str], log: Path) -> Started:
        if self.denied:
            raise ActuatorDenied(self.denied)
        started = super().launch(command, environ, log)
        if self.joins:
            self.lab.spawn(self.lab.join_worker(environ["NAME"], environ["CHANGE"]))
        return started

    def terminate(self, process: Started) -> None:
        super().terminate(process)
        if process in self.alive:
            self.end(process.pid)
            self.lab.spawn(self.lab.part(self.words[process][1]))

    def kill(self, process: Started) -> None:
        super().kill(process)
        self.lab.spawn(self.lab.part(self.words[process][1]))


class AgentLab:
    """One planner and one agent with two slots; more agents may be added."""

    kind = "gpu"
    up = "running"
    deadline = 0.5
    patience = 20.0
    pause = 0.02
    cannot: Mapping[str, str] = {}
    actuator: Actuator

    def __init__(self, path: Path) -> None:
        self.path = path
        self.world = MemoryWorld(random.Random(1))
        self.nodes: dict[str, Node] = {}
        self.processes_of: dict[str, JoiningProcesses] = {}
        self.services: dict[str, AgentService] = {}
        self.stores: dict[str, RecordStore] = {}
        self.tasks: set[asyncio.Task[None]] = set()
        self.turn = asyncio.Lock()
        """Workers come and go one after the other, since slots give them their names again."""

    def spawn(self, work: object) -> None:
        task = asyncio.ensure_future(work)  # type: ignore[call-overload]
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def node(self, name: str, role: str) -> Node:
        join = tuple(f"{other}:7000" for other in list(self.nodes)[:1])
        node = Node(
            NodeConfig(
                node=NodeId(name), role=role, listen=f"{name}:7000", join=join, gossip=QUICK
            ),
            self.world.network(name),
            keys=lambda: (KEY,),
            entropy=random.Random(name).randbytes,
            random=random.Random(name),
            wall=lambda: 1_700_000_000 + asyncio.get_running_loop().time(),
        )
        self.nodes[name] = node
        await node.start()
        return node

    async def join_worker(self, name: str, change: str) -> None:
        async with self.turn:
            node = await self.node(name, "worker")
            node.publish_card(NodeCard(role="worker", change=change), {})

    async def part(self, word: str) -> None:
        change = word.removeprefix("--change=")
        async with self.turn:
            for name, node in tuple(self.nodes.items()):
                if node.card is not None and node.card.change == change:
                    del self.nodes[name]
                    await node.leave()
                    await node.close()

    async def add_agent(self, name: str, slots: Mapping[str, tuple[str, ...]]) -> AgentService:
        processes = self.processes_of.setdefault(name, JoiningProcesses(self))
        node = await self.node(name, "agent")
        service = AgentService(node, Degradations(Metrics()))
        store = RecordStore(self.path / name)
        store.open()

        def command(record: WorkerRecord, devices: str) -> WorkerCommand:
            words = ("worker", f"--change={record.change}")
            return WorkerCommand(words, {"NAME": record.node, "CHANGE": record.change})

        service.begin(Workers(slots, slots, store, processes, command, name))
        self.services[name], self.stores[name] = service, store
        node.publish_card(NodeCard(role="agent"), {})
        return service

    async def crash_agent(self, name: str) -> None:
        """The agent is gone without a word; its workers go on."""
        node = self.nodes.pop(name)
        self.world.crash(name)
        await node.close()
        self.world.resume(name)
        self.stores[name].close()

    def planner(self) -> Node:
        return self.nodes["planner"]

    async def until_known(self, *names: str) -> None:
        async with asyncio.timeout(self.patience):
            while any(self.planner().registry.get(NodeId(name)) is None for name in names):  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    # ------------------------------------------------------------------ the suite's lab

    async def reopen(self) -> Actuator:
        return AgentsActuator(self.planner(), deadline=self.deadline)

    async def processes(self, change: str) -> int:
        return sum(
            f"--change={change}" in processes.words[one]
            for processes in self.processes_of.values()
            for one in processes.alive
        )

    async def die(self, change: str) -> None:
        for processes in self.processes_of.values():
            found = processes.find(f"--change={change}")
            if found is not None:
                processes.end(found.pid, -9)
                await self.part(f"--change={change}")

    async def never_ready(self) -> None:
        for processes in self.processes_of.values():
            processes.joins = False

    async def start_fails(self) -> None:
        for processes in self.processes_of.values():
            processes.fails = OSError(12, "Cannot allocate memory")

    async def deny(self) -> None:
        for processes in self.processes_of.values():
            processes.denied = "its operator has locked this agent"

    async def silence(self) -> None:
        for name in self.processes_of:
            self.world.pause(name)


@asynccontextmanager
async def agent_lab(path: Path) -> AsyncIterator[AgentLab]:
    """A lab with one agent; afterwards nothing is left of it."""
    lab = AgentLab(path)
    planner = await lab.node("planner", "planner")
    await lab.add_agent("agent-a", {"gpu": ("0", "1")})
    lab.actuator = AgentsActuator(planner, deadline=lab.deadline)
    await lab.until_known("agent-a")
    try:
        yield lab
    finally:
        lab.world.heal()
        while lab.tasks:
            await asyncio.wait(lab.tasks)
        for name in tuple(lab.nodes):
            lab.world.resume(name)
        for node in lab.nodes.values():
            await node.close()
        for store in lab.stores.values():
            store.close()

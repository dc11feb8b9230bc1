"""What a planner's world has besides: machines, a batch system, an operator, and the judge."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from pdserve.messages.planner import Kind
from pdserve.planner.actuators.agents import AgentsActuator
from pdserve.testing.actuators.fake import FakeActuator
from tests.worlds.planner.machines import BatchHosts, Machine
from tests.worlds.planner.oracle import PlannerOracle
from tests.worlds.planner.roles import Agent, OrderedWorker, Planner

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdserve.ids import Seconds
    from pdserve.planner.config import PlannerConfig
    from pdserve.runtime.node import Node
    from tests.worlds.roles import NodeSettings, VirtualRole
    from tests.worlds.world import VirtualHost, World

__all__ = ["PlannerSetup", "Stage"]

_LOOKS: Final[Seconds] = 0.25
"""How often the batch system looks at its processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerSetup:
    """What a seed draws for the planners of its world."""

    config: PlannerConfig
    worker: NodeSettings
    """Of workers that are started."""
    machines: Mapping[str, int]
    """Slots by agent."""
    batch: int = 0
    """Nodes of the batch system; 0: there is none."""
    pending: Seconds = 0.0
    """How long a job waits."""
    out_of_reach: bool = False
    """No prompt is short enough for the objective, whatever the workers."""


class Stage:
    """See above."""

    def __init__(self, world: World, setup: PlannerSetup) -> None:
        self.world, self.setup = world, setup
        self.oracle = PlannerOracle(world, setup.config)
        self.machines = {
            name: Machine(world, name, slots, setup.worker)
            for name, slots in setup.machines.items()
        }
        self.batch = self._batch() if setup.batch else None
        world.makers |= {"planner": self._planner, "agent": self._agent, "worker": self._worker}
        world.stage = self

    def _batch(self) -> BatchHosts:
        world, setup = self.world, self.setup
        hosts = [world.add(f"b{n}", "worker", setup.worker) for n in range(setup.batch)]
        for host in hosts:
            host.wanted = False
        return BatchHosts(
            now=world.loop.time,
            kinds=(Kind(name="batch", slots=setup.batch),),
            pending=setup.pending,
            boot=setup.worker.load_time,
            world=world,
            hosts=hosts,
            on_time_over=self.oracle.time_over,
        )

    def watch(self) -> None:
        """Has the batch system go on, and the judge look, from now on."""
        if self.batch is not None:
            self.batch.advance()
        self.oracle.look()
        self.world.call_later(_LOOKS, self.watch)

    def planners(self) -> list[Planner]:
        """Those that run."""
        parts = [host.part for host in self.world.of_role("planner") if host.up and host.ready]
        return [part for part in parts if isinstance(part, Planner)]

    # ------------------------------------------------------------------ roles

    def _planner(self, host: VirtualHost, node: Node) -> VirtualRole:
        actuators: list[AgentsActuator | FakeActuator] = []
        if self.machines:
            actuators.append(AgentsActuator(node))
        if self.batch is not None:
            actuators.append(FakeActuator(self.batch))
        wall = partial(self.world.wall, host)
        made = Planner(node, self.setup.config, actuators, wall, self.oracle.decided)
        made.judge.unreachable = float(self.setup.out_of_reach)
        return made

    def _agent(self, host: VirtualHost, node: Node) -> VirtualRole:
        return Agent(node, self.machines[host.name])

    def _worker(self, host: VirtualHost, node: Node) -> VirtualRole:
        world = self.world
        return OrderedWorker(
            node,
            host.settings,
            world.fabric,
            partial(world.engine_died, host),
            on_drained=partial(self._drained, host),
            on_obeyed=partial(self.oracle.obeyed, host),
            on_switched=partial(self.oracle.switched, host),
            wall=partial(world.wall, host),
        )

    def _drained(self, host: VirtualHost, term: int) -> None:
        """A worker was told to go: no service manager starts it again."""
        self.oracle.drained(host, term)
        host.wanted = False
        self.world.terminate(host)

"""The roles that a planner's world has besides: planners, agents, and workers that obey both.

They are the product's own. A worker of such a world is a whole process: it takes orders to drain,
ends by itself when it is drained, and its card carries the change that started it.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

from pdserve.agent.service import AgentService
from pdserve.agent.workers import WorkerCommand, Workers
from pdserve.messages.status import NodeReport
from pdserve.observe.degraded import Degradations
from pdserve.observe.metrics import Metrics
from pdserve.planner.driver.decision_log import DecisionLog
from pdserve.planner.driver.ports import LoadForecaster
from pdserve.planner.node import PlannerNode
from pdserve.planner.outlook import Load
from pdserve.runtime.orders.drain import Drain
from pdserve.runtime.status import StatusService
from tests.planner.support import LinearJudge
from tests.worlds.planner.paced_engine import PacedEngine
from tests.worlds.planner.switch_watch import SwitchWatch
from tests.worlds.roles import Worker, make_secrets, plain_card

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pdserve.agent.records import WorkerRecord
    from pdserve.ids import NodeId, Seconds
    from pdserve.messages.planner import ScalingPlan
    from pdserve.messages.status import DrainOrder, DrainState, UndoDrain
    from pdserve.planner.actuators.base import Actuator
    from pdserve.planner.config import PlannerConfig
    from pdserve.planner.outlook import PoolCandidate, PoolOutcome
    from pdserve.planner.tick import PlannerInput, PlannerOutput
    from pdserve.runtime.node import Node
    from pdserve.testing.fake_rdma import FakeFabric
    from tests.worlds.planner.machines import Machine
    from tests.worlds.roles import NodeSettings

__all__ = ["DRAIN_TIMEOUT", "HASTE", "SERVED", "Agent", "OrderedWorker", "Planner"]

DRAIN_TIMEOUT: Final[Seconds] = 6.0
"""Most seconds for which a worker drains."""

SERVED: Final = 0.09
"""Work that a worker does in a second: it runs eight sequences for some eight seconds each, and a
prompt's work is half a step and more."""
HASTE: Final = 10.0
"""Times of these worlds are a tenth of the usual ones, and so is that in which waiting work is to
be done."""


class OrderedWorker(Worker):
    """A worker that planners drain and agents end."""

    engine_type = PacedEngine

    def __init__(
        self,
        node: Node,
        settings: NodeSettings,
        fabric: FakeFabric,
        on_death: Callable[[str], None],
        *,
        on_drained: Callable[[int], None],
        on_obeyed: Callable[[tuple[int, int], tuple[int, int]], None],
        on_switched: Callable[[list[str]], None],
        wall: Callable[[], float],
    ) -> None:
        """`on_drained`: an order has drained it, so its process ends; gets the planner's term.
        `on_obeyed` gets each order that it obeys, and the newest one before; `on_switched` what is
        wrong with each change of its mode."""
        super().__init__(node, settings, fabric, on_death)
        self.orders = WatchedDrain(_DrainedWorker(self), on_drained, on_obeyed)
        self.orders.serve(node)
        SwitchWatch(self, on_switched)
        StatusService(node, self._report, wall)
        self._begins: asyncio.Task[None] | None = None

    def _report(self) -> NodeReport:
        reason = self.service.unready_reason() or ""
        drain, mode = self.orders.state(), self.agent.mode.report()
        return NodeReport(reason=reason, drain=drain, mode=mode, worker=self.agent.load())

    async def start(self) -> None:
        self._begins = asyncio.current_task()
        await super().start()
        self._begins = None

    async def stop(self, *, leave: bool, within: Seconds = 2.0) -> None:
        """As `VirtualRole.stop`; one that loads gives up."""
        if self._begins is not None:
            self._begins.cancel()
            await asyncio.wait({self._begins})
        if leave:
            await self.orders.finish(within)
        await self.orders.close()
        await self.close(leave=leave)


class WatchedDrain(Drain):
    """The product's, with an account of the orders that are obeyed."""

    def __init__(
        self,
        part: _DrainedWorker,
        on_drained: Callable[[int], None],
        on_obeyed: Callable[[tuple[int, int], tuple[int, int]], None],
    ) -> None:
        super().__init__([part], DRAIN_TIMEOUT, lambda: on_drained(self._term))
        self._on_obeyed = on_obeyed
        self._newest = (0, 0)

    def ordered(self, node: Node, order: DrainOrder, by: NodeId) -> DrainState:
        state = super().ordered(node, order, by)
        self._note(order.term, order.number, state)
        return state

    async def undo(self, node: Node, order: UndoDrain, by: NodeId) -> DrainState:
        state = await super().undo(node, order, by)
        self._note(order.term, order.number, state)
        return state

    def _note(self, term: int, number: int, state: DrainState) -> None:
        if term and not state.refused:
            self._on_obeyed((term, number), self._newest)
            self._newest = max(self._newest, (term, number))


class _DrainedWorker:
    """A worker as the part of a process that drains; see `launch.roles.worker`."""

    def __init__(self, worker: OrderedWorker) -> None:
        self._worker = worker

    @property
    def left(self) -> int:
        return self._worker.agent.left

    def needed(self) -> str:
        return self._worker.agent.mode.needed()

    async def drain(self, timeout: Seconds) -> None:
        self._worker.handed_over = await self._worker.drain(timeout)

    async def undo_drain(self) -> None:
        self._worker.undo_drain()


class RateJudge(LinearJudge):
    """Judges by what a worker of these worlds serves: a replay for each question would take most of
    a world's time."""

    def judge(
        self,
        traffic: object,
        objectives: tuple[Seconds | None, Seconds | None],
        load: Load,
        candidates: Sequence[PoolCandidate],
    ) -> list[PoolOutcome]:
        scaled = Load(load.work / SERVED, HASTE * load.backlog / SERVED, load.cached)
        self.asked.clear()
        return list(super().judge(traffic, objectives, scaled, candidates))


class Planner(PlannerNode):
    """A planner that decides in no virtual time."""

    def __init__(
        self,
        node: Node,
        config: PlannerConfig,
        actuators: Sequence[Actuator],
        wall: Callable[[], float],
        on_decided: Callable[[Planner, PlannerInput, PlannerOutput], None],
    ) -> None:
        """`on_decided` is called at each tick with what was seen and what was decided."""
        metrics = Metrics()
        self.degradations = Degradations(metrics)
        self.judge = RateJudge()
        super().__init__(
            node,
            config,
            plain_card(node),
            make_secrets(node),
            actuators,
            judge=self.judge,
            forecaster=lambda: LoadForecaster(wall),
            wall=wall,
            log=DecisionLog(wall),
            degradations=self.degradations,
            metrics=metrics,
            offload=self._at_once,
        )
        self._on_decided = on_decided
        look = self.service.sight.look

        def looked(*args: Any) -> PlannerInput:
            self._seen = look(*args)
            return self._seen

        vars(self.service.sight)["look"] = looked

    async def _at_once(self, work: Callable[[], PlannerOutput]) -> PlannerOutput:
        output = work()
        self._on_decided(self, self._seen, output)
        return output

    @property
    def plans(self) -> tuple[ScalingPlan, ...]:
        """Its newest plans."""
        return self.service.report().plans

    def words(self, model: str) -> str:
        """What binds a model, as it says."""
        found = [plan.binding for plan in self.plans if plan.model == model]
        return f"{self.node.id}: {found[0] if found else 'is not the owner'}"

    async def start(self) -> None:
        await self.join()

    async def stop(self, *, leave: bool, within: Seconds = 2.0) -> None:
        self.drain()
        await self.close(leave=leave)


class Agent:
    """The agent of one machine. Its workers outlive it."""

    def __init__(self, node: Node, machine: Machine) -> None:
        self.node = node
        self.machine = machine
        self.service = AgentService(node, Degradations(Metrics()))

    async def start(self) -> None:
        await self.node.start()
        machine = self.machine
        machine.processes.begin()
        slots = {machine.group: ("",) * machine.slots}
        self.workers = Workers(
            slots,
            slots,
            machine.store,
            machine.processes,
            _command,
            self.node.id,
        )
        self.service.begin(self.workers)
        self.node.publish_card(plain_card(self.node), {})

    async def stop(self, *, leave: bool, within: Seconds = 2.0) -> None:
        if leave:
            await self.node.leave()
        await self.node.close()


def _command(record: WorkerRecord, devices: str) -> WorkerCommand:
    environ: Mapping[str, str] = {"NODE": record.node, "MODE": record.mode, "CHANGE": record.change}
    return WorkerCommand(("pdserve", f"--change={record.change}"), environ)

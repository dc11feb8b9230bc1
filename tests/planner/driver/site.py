"""A planner among workers, a router and an actuator that are played by hand, in virtual time."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from pdserve.errors import ActuatorTransient
from pdserve.ids import NodeId
from pdserve.messages.demand import DEMAND, DemandReport, ModelDemand, ModelTimes
from pdserve.messages.mode import ModeReport, SetMode
from pdserve.messages.node import ModelSummary, NodeCard
from pdserve.messages.planner import Instance, Kind, PlannerReport
from pdserve.messages.planner_orders import PlannerAnswer, PlannerOrder
from pdserve.messages.routing import LOAD, WorkerLoad
from pdserve.messages.status import (
    DrainOrder,
    DrainState,
    NodeReport,
    StatusQuery,
    UndoDrain,
)
from pdserve.observe.degraded import Degradations
from pdserve.observe.metrics import Metrics
from pdserve.planner.config import PlannerConfig, PoolConfig
from pdserve.planner.driver.decision_log import DecisionLog
from pdserve.planner.service import PlannerService
from pdserve.runtime.orders.order_fence import OrderFence
from pdserve.runtime.peers.handlers import answers
from pdserve.runtime.rpc_methods import DRAIN, MODE, PLANNER, REPORT, UNDO_DRAIN
from pdserve.runtime.topics.service import Topics
from pdserve.wire.codec import encode
from tests.planner.support import LastValue, LinearJudge
from tests.runtime.cluster import cluster

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from pdserve.net.base import IncomingCall
    from pdserve.runtime.node import Node
    from tests.runtime.cluster import Cluster

MODEL = "m"
SUMMARY = ModelSummary(
    name=MODEL,
    max_model_len=4096,
    vocab_size=100,
    block_size=16,
    tokenizer=bytes(16),
    tokenizer_config=bytes(16),
)


class FakeWorker:
    """A worker that obeys at once, drains in a second, and then ends."""

    def __init__(self, site: Site, node: Node, mode: str, change: str = "") -> None:
        self.site, self.node = site, node
        self.orders: list[object] = []
        self.refused = ""
        self.stays = 0.0
        """Seconds that a drain takes."""
        self.limit = 0.0
        """Its own limit for a drain, as it reports it."""
        self.drains_until = 0.0
        self.fence = OrderFence()
        self.term = 0
        self.topics = Topics(node, node.timers)
        self.load = self.topics.publish_state(LOAD, encode)
        self.card = NodeCard(
            role="worker",
            topics=self.topics.names,
            models=(SUMMARY,),
            mode=mode,  # type: ignore[arg-type]
            transfers=("tcp",),
            mode_generation=1,
            max_sequences=64,
            change=change,
        )
        node.host(self)
        self.tell()

    def tell(self, **fields: Any) -> None:
        self.card = replace(self.card, **fields)
        self.node.publish_card(self.card, {})
        self.load.set(WorkerLoad(ready=not self.card.draining, blocks_total=1000))

    @answers(REPORT)
    def _report(self, query: StatusQuery, call: IncomingCall) -> NodeReport:
        left = max(0.0, self.drains_until - self.node.now())
        drain = DrainState(term=self.term, remaining=left) if self.card.draining else None
        mode = ModeReport(mode=self.card.mode, generation=1, state="serving")
        return NodeReport(drain=drain, mode=mode)

    def _objection(self, order: Any) -> str:
        late = self.fence.refusal(order.term, order.number)
        if not (late or self.refused):
            self.fence.obeyed(order.term, order.number)
        return late or self.refused

    @answers(DRAIN)
    def _drain(self, order: DrainOrder, call: IncomingCall) -> DrainState:
        self.orders.append(order)
        refused = self._objection(order)
        if refused:
            return DrainState(refused=refused, newest=self.fence.newest)
        if not self.card.draining:
            self.term = order.term
            self.drains_until = self.node.now() + self.limit
            self.tell(draining=True)
            _ = self.node.tasks.spawn(self._end(), "end")
        return DrainState(term=order.term)

    async def _end(self) -> None:
        await asyncio.sleep(self.stays)
        if self.card.draining:
            self.site.tasks.append(asyncio.ensure_future(self.site.gone(self.node.id)))

    @answers(UNDO_DRAIN)
    def _undo(self, order: UndoDrain, call: IncomingCall) -> DrainState:
        self.orders.append(order)
        refused = self._objection(order)
        if not refused:
            self.tell(draining=False)
        return DrainState(serves=not refused, refused=refused, newest=self.fence.newest)

    @answers(MODE)
    def _mode(self, order: SetMode, call: IncomingCall) -> ModeReport:
        self.orders.append(order)
        refused = self._objection(order)
        if not refused:
            generation = self.card.mode_generation + 1
            self.tell(mode=order.mode, mode_generation=generation)
        return ModeReport(
            mode=self.card.mode, state="serving", refused=refused, newest=self.fence.newest
        )


class FakeRouter:
    """A router that reports each second as much work per second as it is told."""

    def __init__(self, node: Node) -> None:
        self.node, self.rate, self.work, self.number = node, 0.0, 0.0, 0
        self.held, self.held_oldest = 0, 0.0
        self.began = node.now()
        topics = Topics(node, node.timers)
        self.demand = topics.publish_state(DEMAND, encode)
        node.publish_card(NodeCard(role="router", topics=topics.names), {})
        _ = node.tasks.spawn(self._report(), "reports")

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            now, self.number = self.node.now(), self.number + 1
            self.work += self.rate
            arrivals = round(self.work * 10)
            demand = ModelDemand(
                model=MODEL,
                began=self.began,
                arrivals=arrivals,
                work=self.work,
                first_tokens=arrivals,
                held=self.held,
                held_oldest=self.held_oldest,
                times=ModelTimes(0.01, 1e-4, 0.0, 0.01, 0.0, 0.0, True),
            )
            self.demand.set(
                DemandReport(
                    now=now, process=1, number=self.number, since=now - 1.0, models=(demand,)
                )
            )


class FakeStarts:
    """An actuator whose workers join after `boot` seconds. It outlives planners."""

    name = "fake"

    def __init__(self, site: Site) -> None:
        self.site = site
        self.boot = 10.0
        self.pods = False
        """True: workers are not told their change; their nodes' names are known beforehand."""
        self.listed: dict[str, Instance] = {}
        self.started: list[str] = []
        self.stopped: list[str] = []
        self.down = ""
        self.start_error: Exception | None = None

    async def kinds(self) -> list[Kind]:
        return [Kind(name="gpu", actuator=self.name, slots=8)]

    async def start(self, kind: str, mode: str, change: str) -> Instance:
        if self.start_error is not None:
            raise self.start_error
        if change not in self.listed:
            self.started.append(change)
            self.listed[change] = Instance(
                change=change,
                kind=kind,
                actuator=self.name,
                state="booting",
                node=self._name(change) if self.pods else None,
            )
            self.site.tasks.append(asyncio.ensure_future(self._boot(change, mode)))
        return self.listed[change]

    async def _boot(self, change: str, mode: str) -> None:
        await asyncio.sleep(self.boot)
        if self.listed[change].state == "booting":
            name = self._name(change)
            await self.site.worker(name, mode, change="" if self.pods else change)
            self._move(change, "running", name)

    def _name(self, change: str) -> NodeId:
        return NodeId(f"g{self.started.index(change)}")

    def _move(self, change: str, state: str, node: NodeId | None = None) -> None:
        self.listed[change] = replace(self.listed[change], state=state, node=node)

    async def stop(self, change: str, grace: float) -> None:
        self.stopped.append(change)
        self._move(change, "ended")

    async def list(self) -> list[Instance]:
        if self.down:
            raise ActuatorTransient(self.down)
        return list(self.listed.values())

    def gone(self, node: NodeId) -> None:
        for change, one in self.listed.items():
            if one.node == node:
                self._move(change, "ended")

    async def close(self) -> None: ...


class Planner:
    """One planner process."""

    def __init__(self, site: Site, node: Node, config: PlannerConfig) -> None:
        self.site, self.node, self.metrics = site, node, Metrics()
        self.degradations = Degradations(self.metrics)
        self.topics = Topics(node, node.timers)

        async def at_once(work: Callable[[], Any]) -> Any:
            return work()

        self.service = PlannerService(
            config,
            node,
            self.topics,
            NodeCard(role="planner"),
            [site.starts],
            judge=LinearJudge(),
            forecaster=LastValue,
            wall=lambda: 1_700_000_000 + node.now(),
            log=DecisionLog(lambda: 1_700_000_000 + node.now()),
            degradations=self.degradations,
            metrics=self.metrics,
            offload=at_once,
        )
        self.service.open()

    @property
    def report(self) -> PlannerReport:
        return self.service.report()

    @property
    def term(self) -> int:
        return self.report.plans[0].term

    @property
    def binding(self) -> str:
        return self.report.plans[0].binding

    async def asked(self, verb: str, **fields: Any) -> PlannerAnswer:
        link = await self.site.nodes.nodes["r"].link(self.node.id, timeout=1.0)
        return await link.request(PLANNER, PlannerOrder(verb=verb, **fields), timeout=1.0)

    async def close(self) -> None:
        await self.service.close()
        self.topics.close()


class Site:
    """Everything."""

    def __init__(self, nodes: Cluster) -> None:
        self.nodes = nodes
        self.workers: dict[str, FakeWorker] = {}
        self.planners: dict[str, Planner] = {}
        self.starts = FakeStarts(self)
        self.router: FakeRouter
        self.tasks: list[asyncio.Future[None]] = []

    async def worker(self, name: str, mode: str = "aggregated", **fields: Any) -> FakeWorker:
        made = self.workers[name] = FakeWorker(self, await self.nodes.add(name), mode, **fields)
        return made

    async def gone(self, node: NodeId) -> None:
        """The process of a worker ends in order."""
        worker = self.workers.pop(node, None)
        if worker is None:
            return
        self.starts.gone(node)
        await worker.node.leave()
        worker.topics.close()
        await worker.node.close()
        self.nodes.nodes.pop(node, None)

    async def planner(self, name: str = "p", **fields: Any) -> Planner:
        settings = {"mode": "act", "pools": (PoolConfig(model=MODEL, ttft=1.0, max=6),)} | fields
        config = PlannerConfig(start_prior=10.0, slow_tick=10.0, stable=30.0, hold=60.0, **settings)
        node = await self.nodes.add(name, role="planner")
        made = self.planners[name] = Planner(self, node, config)
        return made

    async def crash(self, name: str) -> None:
        planner = self.planners.pop(name)
        await planner.close()
        await self.nodes.crash(name)

    def serving(self) -> int:
        return sum(not worker.card.draining for worker in self.workers.values())

    def modes(self) -> list[str]:
        return sorted(one.card.mode for one in self.workers.values())

    async def until(self, met: Callable[[], bool], timeout: float = 120.0) -> float:
        return await self.nodes.until(met, timeout)


@asynccontextmanager
async def site(rate: float = 0.0, workers: int = 1) -> AsyncIterator[Site]:
    """A router that asks for `rate` workers' work, and so many workers."""
    async with cluster() as nodes:
        made = Site(nodes)
        made.router = FakeRouter(await nodes.add("r", role="router"))
        made.router.rate = rate
        for number in range(workers):
            await made.worker(f"w{number}")
        try:
            yield made
        finally:
            for planner in made.planners.values():
                await planner.close()
            for task in made.tasks:
                task.cancel()
            await asyncio.gather(*made.tasks, return_exceptions=True)

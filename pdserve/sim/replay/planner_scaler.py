"""Runs the production planner in a replay: its decisions, its orders, and what they cost."""

from __future__ import annotations

import asyncio
from collections import Counter
from math import inf
from typing import TYPE_CHECKING, Any, Final

from pdserve.observe.degraded import Degradations
from pdserve.observe.metrics import Metrics
from pdserve.planner.driver.decision_log import DecisionLog
from pdserve.planner.driver.ports import LoadForecaster
from pdserve.planner.node import PlannerNode
from pdserve.runtime.tasks import Tasks
from pdserve.sim.replay.cluster import REPLAY_SECRET, replay_card
from pdserve.sim.replay.virtual_actuator import StartUp, VirtualActuator

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.ids import Seconds
    from pdserve.planner.config import PlannerConfig
    from pdserve.planner.outlook import Judge
    from pdserve.planner.tick import PlannerOutput
    from pdserve.sim.replay.cluster import ReplayCluster, ReplayWorker

__all__ = ["PlannerScaler", "WorkerBill"]

_LINES: Final = 2000
"""Most lines of the decision log in a summary."""


class WorkerBill:
    """Counts how long workers were paid for: those of the beginning, and those of an actuator."""

    def __init__(self, cluster: ReplayCluster, actuator: VirtualActuator) -> None:
        self._loop = asyncio.get_running_loop()
        self._begin = self._loop.time()
        self._actuator = actuator
        self._first = dict.fromkeys(cluster.workers, inf)
        """When each worker of the beginning has left."""
        self._tasks = Tasks("bill")
        for worker in cluster.workers:
            _ = self._tasks.spawn(self._note(worker), f"end of {worker.node.id}")

    async def _note(self, worker: ReplayWorker) -> None:
        await worker.gone.wait()
        self._first[worker] = self._loop.time()

    async def close(self) -> None:
        """Ends the count."""
        self._end = self._loop.time()
        await self._tasks.close()

    def summary(self) -> dict[str, Any]:
        """Worker-seconds and the number of starts; after `close`."""
        stays = self._actuator.stays.values()
        first = sum(min(left, self._end) - self._begin for left in self._first.values())
        started = sum(stay.paid(self._end) for stay in stays)
        return {
            "worker_seconds": first + started,
            "seconds": self._end - self._begin,
            "starts": len(stays),
            "served": sum(stay.ready < inf for stay in stays),
            "left": sum(left < inf for left in self._first.values())
            + sum(stay.ready < stay.ended < inf for stay in stays),
        }


class PlannerScaler:
    """One planner over a virtual actuator; a `Scaler`."""

    def __init__(
        self,
        config: PlannerConfig,
        judge: Judge,
        start_up: StartUp,
        *,
        slots: int = 0,
        price: float = 1.0,
    ) -> None:
        """`slots` and `price`: of the one kind of workers that it can start, `sim`."""
        config.validate()
        self._config = config
        self._judge = judge
        self._start_up = start_up
        self._slots, self._price = slots, price
        self._lines: list[str] = []
        self._actions: Counter[str] = Counter()

    async def begin(self, cluster: ReplayCluster, now: Callable[[], Seconds]) -> None:
        """Starts the planner."""
        self._now = now
        random = cluster.random("actuator")
        self.actuator = VirtualActuator(
            cluster, random, self._start_up, slots=self._slots, price=self._price
        )
        self._bill = WorkerBill(cluster, self.actuator)
        node, metrics = cluster.add_node("planner-0", "planner"), Metrics()
        self.planner = PlannerNode(
            node,
            self._config,
            replay_card(node),
            REPLAY_SECRET,
            [self.actuator],
            judge=self._judge,
            forecaster=lambda: LoadForecaster(cluster.wall),
            wall=cluster.wall,
            log=DecisionLog(cluster.wall),
            degradations=Degradations(metrics),
            metrics=metrics,
            offload=self._at_once,
        )
        await self.planner.join()

    async def _at_once(self, work: Callable[[], PlannerOutput]) -> PlannerOutput:
        """Decides in no virtual time: a decision takes far less than the tick."""
        output = work()
        self._lines += [f"{self._now():.0f} s: {line}" for line in output.log]
        return output

    async def end(self) -> None:
        """Ends the planner; workers stay."""
        await self._bill.close()
        await self.planner.close(leave=False)
        await self.actuator.close()

    def summary(self) -> dict[str, Any]:
        """What the workers cost, and what was decided."""
        return self._bill.summary() | {"log": self._lines[:_LINES]}

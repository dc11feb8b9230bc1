"""Runs the production planner in a replay: its decisions, its orders, and what they cost."""

from __future__ import annotations

import asyncio
from math import inf
from typing import TYPE_CHECKING, Any, Final

from pdserve.observe.degraded import Degradations
from pdserve.observe.metrics import Metrics
from pdserve.planner.driver.decision_log import DecisionLog
from pdserve.planner.driver.ports import LoadForecaster
from pdserve.planner.node import PlannerNode
from pdserve.sim.replay.cluster import REPLAY_SECRET, replay_card
from pdserve.sim.replay.virtual_actuator import StartUp, VirtualActuator

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from pdserve.ids import Seconds
    from pdserve.planner.config import PlannerConfig
    from pdserve.planner.outlook import Judge
    from pdserve.planner.tick import PlannerOutput
    from pdserve.sim.replay.cluster import ReplayCluster
    from pdserve.sim.replay.virtual_actuator import Stay

__all__ = ["PlannerScaler", "worker_bill"]

_LINES: Final = 2000
"""Most lines of the decision log in a summary."""


def worker_bill(stays: Iterable[Stay], begin: Seconds, end: Seconds) -> dict[str, Any]:
    """What workers cost from `begin` to `end`, times of the loop."""
    every = tuple(stays)
    paid = sum(stay.paid(end) for stay in every)
    return {
        "worker_seconds": paid,
        "mean_workers": paid / (end - begin) if end > begin else 0.0,
        "seconds": end - begin,
        "not_serving_seconds": paid - sum(stay.served(end) for stay in every),
        "starts": sum(stay.asked > begin for stay in every),
        "failed_starts": sum(stay.asked > begin and stay.ready == inf for stay in every),
        "removed": sum(stay.ready < stay.ended < inf for stay in every),
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

    async def begin(self, cluster: ReplayCluster, now: Callable[[], Seconds]) -> None:
        """Starts the planner."""
        self._now = now
        random = cluster.random("actuator")
        self.actuator = VirtualActuator(
            cluster, random, self._start_up, slots=self._slots, price=self._price
        )
        self._loop = asyncio.get_running_loop()
        self.begun = self._loop.time()
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
        self._end = self._loop.time()
        await self.planner.close(leave=False)
        await self.actuator.close()

    def summary(self) -> dict[str, Any]:
        """What the workers cost, and what was decided."""
        bill = worker_bill(self.actuator.stays.values(), self.begun, self._end)
        return bill | {"log": self._lines[:_LINES]}

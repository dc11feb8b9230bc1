"""Asks a rule and does what it wants: starts workers and drains them, as the planner does.

Excess starts are withdrawn first, then the worker with the fewest requests drains by the production
order. Every rule pays for workers in the same way; none may fail a request.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

from bench.planner_arms.base import PoolView, WorkerView
from pdserve.errors import PdserveError
from pdserve.messages.status import DrainOrder
from pdserve.runtime.rpc_methods import DRAIN
from pdserve.runtime.tasks import Tasks
from pdserve.sim.replay.planner_scaler import worker_bill
from pdserve.sim.replay.virtual_actuator import StartUp, VirtualActuator

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from bench.planner_arms.base import Rule
    from pdserve.ids import NodeId, Seconds
    from pdserve.sim.replay.cluster import ReplayCluster, ReplayWorker

__all__ = ["RuleScaler", "difference", "starts_asked"]

_ASK: Final[Seconds] = 5.0
"""Time limit of a drain order's reply."""


def difference(view: PoolView, wanted: int, most: int) -> tuple[int, int, int]:
    """What is to be done for `wanted` workers: to start, to withdraw, to drain. One ready worker
    stays."""
    wanted = min(max(1, wanted), most)
    excess = max(0, view.size - wanted)
    withdrawn = min(excess, view.starting)
    drained = min(excess - withdrawn, len(view.workers) - 1)
    return max(0, wanted - view.size), withdrawn, drained


def starts_asked(actuator: VirtualActuator, begin: Seconds) -> list[Seconds]:
    """When starts were ordered, in seconds after `begin`."""
    return sorted(s.asked - begin for s in actuator.stays.values() if s.asked > begin)


class RuleScaler:
    """One rule over a virtual actuator; a `Scaler`."""

    def __init__(self, rule: Rule, start_up: StartUp, most: int) -> None:
        """`most`: most workers."""
        self._rule, self._start_up, self._most = rule, start_up, most
        self._lines: list[str] = []
        self._draining: set[NodeId] = set()
        self._started = 0

    async def begin(self, cluster: ReplayCluster, now: Callable[[], Seconds]) -> None:
        """Begins to ask."""
        self._cluster, self._now = cluster, now
        self.actuator = VirtualActuator(cluster, cluster.random("actuator"), self._start_up)
        self._loop = asyncio.get_running_loop()
        self.begun = self._loop.time()
        self._tasks = Tasks("rule")
        self._task = self._tasks.spawn(self._run(), "rule")

    async def end(self) -> None:
        """Asks no more; workers stay. Raises what the rule raised."""
        self._end = self._loop.time()
        if self._task.done():
            self._task.result()
        await self._tasks.close()
        await self.actuator.close()

    def summary(self) -> dict[str, Any]:
        """What the workers cost, and each change."""
        bill = worker_bill(self.actuator.stays.values(), self.begun, self._end)
        return bill | {"log": self._lines}

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._rule.interval)
            starting = [
                one.change
                for one in await self.actuator.list()
                if one.state in ("pending", "booting")
            ]
            ready = [w for w in self._cluster.workers if w.node.id not in self._draining]
            if ready:
                await self._follow(ready, starting)

    async def _follow(self, ready: list[ReplayWorker], starting: list[str]) -> None:
        view = PoolView(now=self._now(), workers=tuple(map(_seen, ready)), starting=len(starting))
        wanted = self._rule.wanted(view)
        start, withdraw, drain = difference(view, wanted, self._most)
        if start or withdraw or drain:
            self._lines.append(
                f"{view.now:.0f} s: {len(ready)} serve, {len(starting)} start; wanted {wanted}"
            )
        for _ in range(start):
            self._started += 1
            await self.actuator.start("sim", "aggregated", f"start-{self._started}")
        for change in starting[len(starting) - withdraw :]:
            await self.actuator.stop(change, 0.0)
        await self._drain(sorted(ready, key=lambda one: one.agent.requests)[:drain])

    async def _drain(self, workers: Iterable[ReplayWorker]) -> None:
        router = self._cluster.routers[0].node
        for worker in workers:
            ref = router.ref(worker.node.id, worker.node.epoch)
            try:
                state = await ref.ask(DRAIN, DrainOrder(), timeout=_ASK)
            except PdserveError as error:
                self._lines.append(f"{self._now():.0f} s: {worker.node.id}: {error}")
                continue
            if not state.refused:
                self._draining.add(worker.node.id)


def _seen(worker: ReplayWorker) -> WorkerView:
    load = worker.agent.load()
    return WorkerView(
        kv=load.blocks_used / max(1, load.blocks_total),
        running=load.running,
        waiting=load.waiting,
        itl=load.itl,
        backlog=load.uncomputed_tokens,
    )

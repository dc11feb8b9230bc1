"""Starts and stops workers of a replay, as slowly and as badly as a real environment may.

Implements the port `planner.actuators.base.Actuator` over a `ReplayCluster`, so that the production
planner, and every rule that it is compared with, pays for its starts. A start is pending for a
while, boots, and serves; or it waits for ever, or its process ends before it serves. What is booked
for how long is in `stays`, from which a run's cost is counted.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from math import inf, log
from typing import TYPE_CHECKING, Any, Final, cast

from msgspec.structs import replace

from pdserve.errors import ActuatorDenied, ActuatorExhausted
from pdserve.messages.planner import Instance, Kind
from pdserve.planner.actuators.base import KEEP_ENDED, check_order
from pdserve.runtime.tasks import Tasks

if TYPE_CHECKING:
    from collections.abc import Sequence
    from random import Random

    from pdserve.ids import Seconds
    from pdserve.messages.handoff import WorkerMode
    from pdserve.sim.replay.cluster import ReplayCluster, ReplayWorker

__all__ = ["StartUp", "Stay", "VirtualActuator"]

_OVER: Final = ("ended", "failed")


@dataclass(frozen=True, slots=True, kw_only=True)
class StartUp:
    """How long a start takes, and how often it comes to nothing."""

    median: Seconds = 60.0
    """From the begin of the boot to the first request; times are lognormal."""
    p90: Seconds = 60.0
    """At least `median`; equal: every start takes the median."""
    pending: Seconds = 0.0
    """Before the boot, in every start. It costs nothing."""
    stuck: float = 0.0
    """Share of the starts that are pending for ever."""
    failing: float = 0.0
    """Share of the starts that end before they serve, after the time of a start."""

    def drawn(self, random: Random) -> Seconds:
        """The time of one start."""
        sigma = log(self.p90 / self.median) / 1.2816 if self.median else 0.0
        return self.median * random.lognormvariate(0.0, sigma)


@dataclass(slots=True, kw_only=True)
class Stay:
    """One instance from the order to its end, in seconds of the replay's loop."""

    change: str
    kind: str
    mode: str
    asked: Seconds
    booted: Seconds = inf
    """When it began to cost; `inf`: it never did."""
    ready: Seconds = inf
    """When it began to serve; `inf`: it never did."""
    drained: Seconds = inf
    """When it was to take no more requests."""
    ended: Seconds = inf
    worker: ReplayWorker | None = None

    def served(self, now: Seconds) -> Seconds:
        """Seconds from its first request that was possible until `now` or its end."""
        return max(0.0, min(self.ended, now) - min(self.ready, now))

    def paid(self, now: Seconds) -> Seconds:
        """Seconds that it has cost until `now`."""
        return max(0.0, min(self.ended, now) - min(self.booted, now))


class VirtualActuator:
    """The actuator of a replay. It has one kind of worker."""

    def __init__(
        self,
        cluster: ReplayCluster,
        random: Random,
        start_up: StartUp,
        *,
        kind: str = "sim",
        slots: int = 0,
        price: float = 1.0,
    ) -> None:
        """The workers that are there count as started by it. `slots`: most instances at once; 0: no
        bound."""
        self.stays: dict[str, Stay] = {}
        """Everything that was ever ordered, by change id."""
        self._cluster = cluster
        self._random = random
        self._start_up = start_up
        self._kind = Kind(name=kind, actuator=self.name, slots=slots, price=price)
        self._known: dict[str, Instance] = {}
        self._work: dict[str, asyncio.Task[None]] = {}
        self._tasks = Tasks("virtual actuator")
        self._loop = asyncio.get_running_loop()
        for worker in cluster.workers:
            self._adopt(worker)

    def _adopt(self, worker: ReplayWorker) -> None:
        change, now = worker.change, self._loop.time()
        self._enter(change, worker.mode)
        stay = self.stays[change]
        stay.worker, stay.booted, stay.ready = worker, now, now
        self._set(change, state="running", node=worker.node.id)
        self._work[change] = self._tasks.spawn(self._watch(change, worker), f"watch {change}")

    def _enter(self, change: str, mode: str) -> None:
        kind = self._kind.name
        self._known[change] = Instance(change=change, kind=kind, actuator=self.name, ref=change)
        self.stays[change] = Stay(change=change, kind=kind, mode=mode, asked=self._loop.time())

    @property
    def name(self) -> str:
        """Its name in kinds and instances."""
        return "virtual"

    async def kinds(self) -> Sequence[Kind]:
        """The one kind."""
        return (self._kind,)

    async def start(self, kind: str, mode: str, change: str) -> Instance:
        """As `Actuator.start`."""
        check_order(mode, change)
        if kind != self._kind.name:
            raise ActuatorDenied(f"kind {kind!r} is unknown: there is {self._kind.name!r}")
        if change in self._known:
            return self._known[change]
        if self._kind.slots and self._running() >= self._kind.slots:
            raise ActuatorExhausted(f"all {self._kind.slots} slots of kind {kind!r} are taken")
        self._enter(change, mode)
        self._work[change] = self._tasks.spawn(self._boot(change, mode), f"start {change}")
        return self._known[change]

    async def stop(self, change: str, grace: Seconds) -> None:
        """As `Actuator.stop`."""
        known = self._known.get(change)
        if known is None or known.state in (*_OVER, "ending"):
            return
        self._work.pop(change).cancel()
        worker = self.stays[change].worker
        if worker is None:
            self._end(change, "ended", "stopped before it served")
            return
        self._set(change, state="ending")
        self._work[change] = self._tasks.spawn(self._take(change, worker, grace), f"end {change}")

    async def list(self) -> Sequence[Instance]:
        """As `Actuator.list`."""
        now = self._loop.time()
        return tuple(
            one
            for change, one in self._known.items()
            if one.state not in _OVER or now - self.stays[change].ended <= KEEP_ENDED
        )

    async def close(self) -> None:
        """Ends starts and stops that are under way; their workers stay as they are."""
        await self._tasks.close()

    # ------------------------------------------------------------------ inside

    def _running(self) -> int:
        return sum(one.state not in _OVER for one in self._known.values())

    async def _boot(self, change: str, mode: str) -> None:
        stay, start_up = self.stays[change], self._start_up
        # Drawn in a fixed order and at once, so that every rule meets the same luck.
        stuck = self._random.random() < start_up.stuck
        fails = self._random.random() < start_up.failing
        takes = start_up.drawn(self._random)
        await asyncio.sleep(start_up.pending)
        if stuck:
            self._set(change, reason="waits for a slot that nobody gives back")
            await self._loop.create_future()
        stay.booted = self._loop.time()
        self._set(change, state="booting")
        await asyncio.sleep(takes)
        if fails:
            self._end(change, "failed", "the process ended before it served, with status 1")
            return
        worker = await self._cluster.add_worker(f"w-{change}", cast("WorkerMode", mode), change)
        stay.worker, stay.ready = worker, self._loop.time()
        self._set(change, state="running", node=worker.node.id)
        await self._watch(change, worker)

    async def _watch(self, change: str, worker: ReplayWorker) -> None:
        await worker.gone.wait()
        self._end(change, "ended", "the worker has drained")

    async def _take(self, change: str, worker: ReplayWorker, grace: Seconds) -> None:
        self.stays[change].drained = min(self.stays[change].drained, self._loop.time())
        if not worker.gone.is_set():
            await self._cluster.remove_worker(worker, grace)
        self._end(change, "ended", "stopped")

    def _set(self, change: str, **fields: Any) -> None:
        self._known[change] = replace(self._known[change], **fields)

    def _end(self, change: str, state: str, reason: str) -> None:
        self.stays[change].ended = self._loop.time()
        self._set(change, state=state, reason=reason)

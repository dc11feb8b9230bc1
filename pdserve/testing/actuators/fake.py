"""An actuator without processes, with every fault that a planner has to bear.

`FakeHosts` is the environment and keeps the truth, as hosts do: it outlives the actuators that use
it, and only its clock makes workers come and go. `FakeActuator` is what a planner holds. Times come
from the clock that is passed in, so simulations are exact.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from pdserve.ids import NodeId
from pdserve.messages.planner import Instance, Kind
from pdserve.planner.actuators.base import (
    DEADLINE,
    KEEP_ENDED,
    ActuatorDenied,
    ActuatorExhausted,
    ActuatorTransient,
    check_order,
    within,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdserve.ids import Seconds

__all__ = ["ActuatorFaults", "FakeActuator", "FakeHosts", "FakeWorker"]

_ENDED: Final = ("ended", "failed")


@dataclass(slots=True)
class ActuatorFaults:
    """What goes wrong from now on; each may be changed at any time."""

    delay: Seconds = 0.0
    """Seconds that each call takes; more than the deadline makes it fail."""
    silent: bool = False
    """No call is answered, and none is carried out."""
    lost_answers: bool = False
    """Orders are carried out, and their answers are lost."""
    denied: str = ""
    """Why nothing is allowed; empty: it is."""
    start_fails: str = ""
    """Why the next workers cannot be started; empty: they can."""
    never_ready: bool = False
    """The next workers boot for ever."""
    stuck_pending: str = ""
    """Why the next workers wait for ever; empty: they do not."""
    wrong_mode: str = ""
    """The mode in which the next workers come, whatever was asked for; empty: as asked."""
    lies: bool = False
    """Workers that have ended are still listed as running."""
    unknown: bool = False
    """Hosts do not answer: every instance that lives is listed as `unknown`."""


@dataclass(slots=True)
class FakeWorker:
    """One worker of the fake environment."""

    change: str
    kind: str
    mode: str
    """The mode in which it comes."""
    wanted: Seconds
    """When it was asked for."""
    pending: Seconds
    boot: Seconds
    """Seconds until it boots, and from then until it has joined; infinite: never."""
    reason: str = ""
    hard_end: Seconds | None = None
    stopped: Seconds | None = None
    """When it was told to end."""
    grace: Seconds = 0.0
    ended: Seconds | None = None
    failed: bool = False

    @property
    def joins(self) -> Seconds:
        """When it joins the cluster."""
        return self.wanted + self.pending + self.boot


@dataclass(slots=True)
class FakeHosts:
    """The environment: kinds, their slots, and every worker ever started."""

    now: Callable[[], Seconds]
    kinds: tuple[Kind, ...]
    pending: Seconds = 0.0
    boot: Seconds = 1.0
    ending: Seconds = 0.5
    """Seconds that a worker takes to drain; one with a shorter grace is killed before."""
    hard_end: Seconds | None = None
    """Seconds after which the environment ends each worker; None: never."""
    faults: ActuatorFaults = field(default_factory=ActuatorFaults)
    workers: dict[str, FakeWorker] = field(default_factory=dict)
    starts: int = 0
    """Workers that were really started: more than changes would be an error of an actuator."""

    def start(self, kind: str, mode: str, change: str) -> FakeWorker:
        """Errors: `ActuatorDenied`, `ActuatorExhausted`."""
        self.advance()
        if change in self.workers:
            return self.workers[change]
        check_order(mode, change)
        slots = {one.name: one.slots for one in self.kinds}
        if kind not in slots:
            raise ActuatorDenied(f"there is no kind {kind!r}: there are {', '.join(slots)}")
        taken = sum(one.kind == kind and one.ended is None for one in self.workers.values())
        if slots[kind] and taken >= slots[kind]:
            raise ActuatorExhausted(f"all {slots[kind]} slots of {kind!r} are taken")
        self.workers[change] = worker = self._worker(kind, mode, change)
        self.starts += 1
        return worker

    def _worker(self, kind: str, mode: str, change: str) -> FakeWorker:
        faults, now = self.faults, self.now()
        worker = FakeWorker(
            change=change,
            kind=kind,
            mode=faults.wrong_mode or mode,
            wanted=now,
            pending=float("inf") if faults.stuck_pending else self.pending,
            boot=float("inf") if faults.never_ready else self.boot,
            reason=faults.stuck_pending,
            hard_end=None if self.hard_end is None else now + self.hard_end,
        )
        if faults.start_fails:
            worker.ended, worker.failed, worker.reason = now, True, faults.start_fails
        return worker

    def stop(self, change: str, grace: Seconds) -> None:
        """Has a worker end; unknown and ended ones are left alone."""
        self.advance()
        worker = self.workers.get(change)
        if worker is None or worker.ended is not None:
            return
        now = self.now()
        if worker.stopped is None:
            worker.stopped, worker.grace = now, grace
        else:
            worker.grace = min(worker.grace, now + grace - worker.stopped)
        self.advance()

    def die(self, change: str, reason: str = "was ended by SIGKILL") -> None:
        """A worker ends by itself."""
        worker = self.workers[change]
        worker.ended, worker.failed, worker.reason = self.now(), True, reason

    def advance(self) -> None:
        """Ends what had its time."""
        now = self.now()
        for worker in self.workers.values():
            if worker.ended is None and worker.stopped is not None:
                boots = worker.wanted + worker.pending <= worker.stopped
                takes = min(self.ending, worker.grace) if boots else 0.0
                if now >= worker.stopped + takes:
                    worker.ended = worker.stopped + takes
            if worker.ended is None and worker.hard_end is not None and now >= worker.hard_end:
                worker.ended, worker.reason = worker.hard_end, "its time is over"

    def serving(self) -> list[FakeWorker]:
        """Workers that are in the cluster now."""
        self.advance()
        now = self.now()
        return [one for one in self.workers.values() if one.ended is None and now >= one.joins]

    def instance(self, worker: FakeWorker, actuator: str) -> Instance:
        """What is said of a worker now."""
        now = self.now()
        expected = worker.wanted + worker.pending - now
        ends = None if worker.hard_end is None else max(0.0, worker.hard_end - now)
        return Instance(
            change=worker.change,
            kind=worker.kind,
            actuator=actuator,
            ref=f"fake {worker.change}",
            state=self._state(worker, now),
            reason=worker.reason,
            node=NodeId(f"worker-{worker.change}"),
            expected=expected if 0 < expected < float("inf") else None,
            hard_end=ends,
        )

    def _state(self, worker: FakeWorker, now: Seconds) -> str:
        if worker.ended is not None and not self.faults.lies:
            return "failed" if worker.failed else "ended"
        if self.faults.unknown:
            return "unknown"
        if worker.stopped is not None and not self.faults.lies:
            return "ending"
        if now < worker.wanted + worker.pending:
            return "pending"
        return "running" if now >= worker.joins else "booting"


class FakeActuator:
    """A planner's hold on `FakeHosts`; any number may share them."""

    def __init__(
        self, hosts: FakeHosts, *, name: str = "fake", deadline: Seconds = DEADLINE
    ) -> None:
        self.hosts = hosts
        self.name = name
        self._deadline = deadline

    async def kinds(self) -> Sequence[Kind]:
        await self._answer("to name kinds")
        return [replace(one, actuator=self.name) for one in self.hosts.kinds]

    async def start(self, kind: str, mode: str, change: str) -> Instance:
        await self._answer(f"to start {change}")
        worker = self.hosts.start(kind, mode, change)
        self._lose_answer()
        return self.hosts.instance(worker, self.name)

    async def stop(self, change: str, grace: Seconds) -> None:
        await self._answer(f"to stop {change}")
        self.hosts.stop(change, grace)
        self._lose_answer()

    async def list(self) -> Sequence[Instance]:
        await self._answer("to list workers")
        self.hosts.advance()
        now = self.hosts.now()
        return [
            self.hosts.instance(one, self.name)
            for one in self.hosts.workers.values()
            if one.ended is None or now - one.ended <= KEEP_ENDED
        ]

    async def close(self) -> None:
        """Does nothing: the hosts live on."""

    async def _answer(self, what: str) -> None:
        faults = self.hosts.faults
        async with within(self._deadline, what):
            if faults.silent:
                await asyncio.Event().wait()
            if faults.delay:
                await asyncio.sleep(faults.delay)
        if faults.denied:
            raise ActuatorDenied(faults.denied)

    def _lose_answer(self) -> None:
        if self.hosts.faults.lost_answers:
            raise ActuatorTransient("the answer was lost")

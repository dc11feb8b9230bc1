"""Where workers of a planner's world are started: machines with agents, and a batch system.

A machine outlives its agent, and so do its workers' processes. The batch system has every fault of
`testing.actuators`. In both, a worker's process is one of the world: it can be killed, suspended
and cut off as any other.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

from msgspec.structs import replace as with_fields

from pdserve.agent.processes import Started
from pdserve.agent.records import RecordStore
from pdserve.ids import NodeId
from pdserve.testing.actuators.fake import FakeHosts

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from pdserve.agent.records import WorkerRecord
    from pdserve.ids import Seconds
    from pdserve.messages.handoff import WorkerMode
    from pdserve.messages.planner import Instance
    from pdserve.testing.actuators.fake import FakeWorker
    from tests.worlds.roles import NodeSettings
    from tests.worlds.world import VirtualHost, World

__all__ = ["BatchHosts", "Machine", "VirtualProcesses"]

NEVER: Final[Seconds] = 1e6


class MemoryStore(RecordStore):
    """Records of one machine's workers without a disk."""

    def __init__(self, name: str, left: Callable[[str], int | None]) -> None:
        """`left`: the status that a worker which ended by itself has written down."""
        super().__init__(Path("/nowhere") / name)
        self._records: dict[str, WorkerRecord] = {}
        self._left = left

    def load(self) -> tuple[list[WorkerRecord], list[Path]]:
        return list(self._records.values()), []

    def save(self, record: WorkerRecord) -> None:
        self._records[record.change] = record

    def forget(self, change: str) -> None:
        self._records.pop(change, None)

    def exit_status(self, change: str) -> int | None:
        return self._left(change)


class Machine:
    """A machine whose agent starts workers in its slots."""

    def __init__(self, world: World, name: str, slots: int, settings: NodeSettings) -> None:
        self.name = name
        self.group = "gpu"
        self.slots = slots
        self.processes = VirtualProcesses(world, name)
        self.store = MemoryStore(name, self.processes.left)
        for slot in range(slots):
            host = world.add(f"{name}-{self.group}-{slot}", "worker", settings)
            host.wanted = False


class VirtualProcesses:
    """The processes of a machine; implements `agent.processes.Processes`."""

    def __init__(self, world: World, name: str) -> None:
        self._world = world
        self._name = name
        self._words: dict[Started, tuple[VirtualHost, int, tuple[str, ...]]] = {}
        self._own: set[Started] = set()
        """Processes that the present agent has started."""
        self._left: dict[str, int | None] = {}
        """Exit statuses of earlier processes, by change; None: they were killed."""
        self.asked = 0
        """Starts."""
        self.fails = False
        """Nothing can be started now."""
        self.never_ready = False
        """What is started now loads for ever."""
        self.agent_dies = False
        """The agent dies with each start, before it answers."""

    def begin(self) -> None:
        """Another agent begins: it knows no exit status of what it did not start."""
        self._own.clear()

    def boot_id(self) -> str:
        return "boot"

    def launch(self, command: Sequence[str], environ: Mapping[str, str], log: Path) -> Started:
        self.asked += 1
        if self.fails:
            raise OSError(12, "Cannot allocate memory")
        host = self._world.hosts[environ["NODE"]]
        if host.settings.change:
            self._left[host.settings.change] = self.left(host.settings.change)
        life = launch(self._world, host, environ["MODE"], environ["CHANGE"], never=self.never_ready)
        started = Started(100 + len(self._words), life)
        self._words[started] = (host, life, tuple(command))
        self._own.add(started)
        if self.agent_dies:
            self._world.kill(self._world.hosts[self._name])
        return started

    def find(self, argument: str) -> Started | None:
        found = (one for one in self._words if argument in self._words[one][2])
        return next((one for one in found if self.runs(one)), None)

    def runs(self, process: Started) -> bool:
        if process not in self._words:
            return False
        host, life, _ = self._words[process]
        return host.process is not None and host.lives == life

    def status(self, process: Started) -> int | None:
        host, life, _ = self._words[process]
        known = process in self._own and host.lives == life and not self.runs(process)
        return host.status if known else None

    def left(self, change: str) -> int | None:
        """The exit status of this change's worker, if it ended by itself; None: it did not."""
        words = f"--change={change}"
        ended = (one for one, (_, _, said) in self._words.items() if words in said)
        process = next((one for one in ended if not self.runs(one)), None)
        if process is None or change in self._left:
            return self._left.get(change)
        host, life, _ = self._words[process]
        return host.status if host.lives == life and host.status >= 0 else None

    def terminate(self, process: Started) -> None:
        if self.runs(process):
            self._world.terminate(self._words[process][0])

    def kill(self, process: Started) -> None:
        if self.runs(process):
            host = self._words[process][0]
            self._world.call_later(0.0, lambda: self._kill(host, process))

    def _kill(self, host: VirtualHost, process: Started) -> None:
        if self.runs(process):
            self._world.kill(host)

    def left_running(self, ended: Collection[Started]) -> set[Started]:
        return set()


def launch(world: World, host: VirtualHost, mode: str, change: str, *, never: bool) -> int:
    """Starts a worker's process; returns the number of its life."""
    if host.process is not None:
        world.complain(f"{host.name} is started for {change}, and {host.settings.change} runs")
    assert world.stage is not None
    world.stage.oracle.launched(change, host)
    usual = host.settings if host.usual is None else host.usual
    host.usual = usual
    load = NEVER if never else usual.load_time
    host.settings = replace(usual, mode=cast("WorkerMode", mode), change=change, load_time=load)
    world.start(host)
    return host.lives


@dataclass(slots=True)
class _Run:
    """One process of the batch system."""

    host: VirtualHost
    life: int
    ending: bool = False

    @property
    def runs(self) -> bool:
        return self.host.process is not None and self.host.lives == self.life


@dataclass(slots=True)
class BatchHosts(FakeHosts):
    """A batch system whose workers are processes of the world."""

    world: World = field(kw_only=True)
    hosts: list[VirtualHost] = field(kw_only=True)
    on_time_over: Callable[[VirtualHost], None] = field(kw_only=True)
    runs: dict[str, _Run] = field(default_factory=dict)

    def advance(self) -> None:
        """Starts what has waited, ends what is to end, and notes what has ended."""
        now = self.now()
        for worker in self.workers.values():
            if worker.ended is not None:
                continue
            run = self.runs.get(worker.change)
            if run is None:
                self._begin(worker, now)
            elif not run.runs:
                self._over(worker, run, now)
            elif worker.stopped is not None or _is_over(worker, now):
                self._end(worker, run, now)

    def limited(self) -> set[str]:
        """Hosts of jobs with a time limit."""
        return {
            self.runs[worker.change].host.name
            for worker in self.workers.values()
            if worker.hard_end is not None and worker.change in self.runs
        }

    def _begin(self, worker: FakeWorker, now: Seconds) -> None:
        if worker.stopped is not None:
            worker.ended = now
        elif now >= worker.wanted + worker.pending:
            taken = {id(run.host) for run in self.runs.values() if run.host.process is not None}
            host = next((one for one in self.hosts if id(one) not in taken), None)
            if host is None:
                worker.ended, worker.failed, worker.reason = now, True, "no node is free"
                return
            never = worker.boot == inf
            life = launch(self.world, host, worker.mode, worker.change, never=never)
            self.runs[worker.change] = _Run(host, life)

    def _over(self, worker: FakeWorker, run: _Run, now: Seconds) -> None:
        status = run.host.status if run.host.lives == run.life else -9
        worker.ended = now
        worker.failed = status != 0 and worker.stopped is None
        worker.reason = f"ended with status {status}" if worker.failed else worker.reason

    def _end(self, worker: FakeWorker, run: _Run, now: Seconds) -> None:
        if worker.stopped is None:
            self.on_time_over(run.host)
            worker.stopped, worker.grace, worker.reason = now, 5.0, "its time is over"
        if not run.ending:
            run.ending = True
            self.world.terminate(run.host)
        elif now >= worker.stopped + worker.grace:
            self.world.kill(run.host)

    def instance(self, worker: FakeWorker, actuator: str) -> Instance:
        found = FakeHosts.instance(self, worker, actuator)
        run = self.runs.get(worker.change)
        return with_fields(found, node=None if run is None else NodeId(run.host.name))


def _is_over(worker: FakeWorker, now: Seconds) -> bool:
    return worker.hard_end is not None and now >= worker.hard_end

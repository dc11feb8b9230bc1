"""The workers of one agent: which are started, which end, and what is said of them.

Plain and synchronous: the caller passes the time and what the cluster knows. An agent restarts
nothing by itself. The planner sees that a worker has failed, and decides.

    booting ──its card came──▶ running ──stop, or it drains──▶ ending ──▶ ended
       └──────────────────────────┴── it ended by itself ──▶ failed

Each step is on disk before it is done, so a later agent goes on: with a record and no process id it
looks for the process by the change id on its command line.
"""

from __future__ import annotations

import difflib
import logging
import signal
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from pdserve.agent.config import group_of
from pdserve.agent.logs import last_line, rotate
from pdserve.agent.measures import OTHER_KIND, AgentMeasures
from pdserve.agent.processes import Started
from pdserve.agent.records import WorkerRecord
from pdserve.errors import ActuatorDenied, ActuatorExhausted
from pdserve.ids import NodeId
from pdserve.messages.agent import AgentReport
from pdserve.messages.planner import START_MODES, Instance, Kind
from pdserve.observe.metrics import Metrics

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from pdserve.agent.measures import ExitKind
    from pdserve.agent.processes import Processes
    from pdserve.agent.records import RecordStore
    from pdserve.ids import Seconds
    from pdserve.messages.agent import StartWorker

__all__ = ["SeenWorker", "WorkerCommand", "Workers"]

_log = logging.getLogger(__name__)

_KEEP_ENDED: Final[Seconds] = 300.0
"""How long a worker that has ended is reported, for planners to read why."""
_KEEP_RECORD: Final[Seconds] = 86400.0
"""How long its change id is known, so that a late repeat of the order starts nothing."""
_KEEP_LOGS: Final = 20
"""Logs of ended workers that are kept, the newest."""
_TELLS: Final[Seconds] = 3.0
"""A worker that was told to end says so on its card within this: more than twice the time that
gossip takes among 256 members."""
_CHILDREN: Final[Seconds] = 5.0
"""How long an ended worker's engine may go on before it is killed; it holds the device."""


@dataclass(frozen=True, slots=True)
class WorkerCommand:
    """What is run for one worker."""

    words: tuple[str, ...]
    environ: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class SeenWorker:
    """What a worker's card says."""

    node: NodeId
    draining: bool = False


class Workers:
    """The table of an agent's workers."""

    def __init__(
        self,
        slots: Mapping[str, tuple[str, ...]],
        kinds: Iterable[str],
        store: RecordStore,
        processes: Processes,
        command: Callable[[WorkerRecord, str], WorkerCommand],
        name: str,
        measures: AgentMeasures | None = None,
    ) -> None:
        """`slots` by group, as `AgentConfig.slots`; `command` says what to run for a record on the
        devices of its slot; `name` begins the workers' node names."""
        self._measures = measures or AgentMeasures(Metrics())
        self._slots = slots
        self._kinds = tuple(kinds)
        self._store = store
        self._processes = processes
        self._command = command
        self._name = name.removeprefix("agent-")
        self._boot = processes.boot_id()
        self._records: dict[str, WorkerRecord] = {}
        self._gone: dict[str, Seconds] = {}
        """When the first process of a worker was found to have ended, while its engine runs."""
        self._unwritten: dict[str, str] = {}
        """By change: why its record on disk is older than the one here."""
        self._unsure: dict[str, Seconds] = {}
        """Since when it is not known whether an earlier agent has told a worker to end."""

    # ------------------------------------------------------------------ life

    def adopt(self, now: Seconds) -> list[str]:
        """Takes over what an earlier agent has left; returns the names of unreadable records."""
        records, unreadable = self._store.load()
        for record in records:
            self._records[record.change] = record
            if record.ended is None:
                self._adopt(record, now)
            elif record.boot != self._boot:
                self._put(replace(record, boot=self._boot, ended=now))
        return [path.name for path in unreadable]

    def _adopt(self, record: WorkerRecord, now: Seconds) -> None:
        if record.boot != self._boot:
            self._lost(replace(record, boot=self._boot), now, "the machine was restarted")
        elif not record.pid:
            found = self._processes.find(f"--change={record.change}")
            if found is None:
                self._lost(record, now, "the agent ended before it had started this worker")
            else:
                self._put(replace(record, pid=found.pid, begun=found.begun))
                self._measures.adopted(record.kind)
                _log.info("found worker %s: process %d", record.change, found.pid)
        elif self._processes.runs(_process(record)):
            self._measures.adopted(record.kind)
            _log.info("worker %s still runs: process %d", record.change, record.pid)

    def _lost(self, record: WorkerRecord, now: Seconds, reason: str) -> None:
        """A worker has ended, or never was, while no agent ran. Args: `reason` counts unless the
        worker has left its exit status."""
        if self._store.exit_status(record.change) is None:
            self._measures.exited(record.kind, "lost")
            self._end(record, now, reason)
        else:
            self._end(record, now, "")
            self._measures.exited(record.kind, _exit_kind(self._records[record.change]))

    def start(self, order: StartWorker, now: Seconds) -> Instance:
        """Starts a worker, unless its change is known. Errors: `ActuatorDenied`,
        `ActuatorExhausted`, also if the order cannot be written down."""
        known = self._records.get(order.change)
        if known is not None:
            return self._instance(known)
        slot = self._slot_for(order)
        record = WorkerRecord(
            change=order.change,
            kind=order.kind,
            mode=order.mode,
            slot=slot,
            node=f"{self._name}-{group_of(order.kind)}-{slot}",
            boot=self._boot,
        )
        try:
            self._store.save(record)
        except OSError as error:
            self._measures.asked(order.kind, "failed")
            # Nothing was started, so another agent may be asked at once.
            raise ActuatorExhausted(
                f"{self._store.directory} cannot be written: {error.strerror}"
            ) from None
        self._records[record.change] = record
        self._launch(record, now)
        return self._instance(self._records[record.change])

    def knows(self, change: str) -> bool:
        """True if the change was carried out here, whatever became of it."""
        return change in self._records

    def refuse(self, kind: str) -> None:
        """Counts an order to start a worker that is not obeyed."""
        self._measures.asked(kind if kind in self._kinds else OTHER_KIND, "refused")

    def _slot_for(self, order: StartWorker) -> int:
        try:
            self._check(order)
            return self._free_slot(group_of(order.kind))
        except (ActuatorDenied, ActuatorExhausted):
            self.refuse(order.kind)
            raise

    def _check(self, order: StartWorker) -> None:
        if order.kind not in self._kinds:
            near = difflib.get_close_matches(order.kind, self._kinds, n=1)
            hint = f", did you mean {near[0]!r}?" if near else f": it has {', '.join(self._kinds)}"
            raise ActuatorDenied(f"this agent has no kind {order.kind!r}{hint}")
        if order.mode not in START_MODES:
            raise ActuatorDenied(
                f"a worker does not start in mode {order.mode!r}: use one of "
                f"{', '.join(START_MODES)}"
            )

    def _free_slot(self, group: str) -> int:
        taken = self._taken(group)
        free = (slot for slot in range(len(self._slots[group])) if slot not in taken)
        found = next(free, None)
        if found is None:
            raise ActuatorExhausted(f"all {len(self._slots[group])} slots {group!r} are taken")
        return found

    def _taken(self, group: str) -> set[int]:
        return {
            record.slot
            for record in self._records.values()
            if record.ended is None and group_of(record.kind) == group
        }

    def _launch(self, record: WorkerRecord, now: Seconds) -> None:
        command = self._command(record, self._slots[group_of(record.kind)][record.slot])
        log = self._store.log(record.change)
        try:
            started = self._processes.launch(command.words, command.environ, log)
        except OSError as error:
            self._measures.asked(record.kind, "failed")
            self._end(record, now, f"it cannot be started: {error}")
            return
        self._measures.asked(record.kind, "started")
        self._put(replace(record, pid=started.pid, begun=started.begun))
        _log.info(
            "started worker %s in mode %s, kind %s, as process %d; its log is %s",
            *(record.change, record.mode, record.kind, started.pid, log),
        )

    def stop(self, change: str, grace: Seconds, now: Seconds) -> bool:
        """Has a worker drain and end; after `grace` it is killed. Returns False for a change that
        is not known."""
        record = self._records.get(change)
        if record is None:
            return False
        if record.ended is not None:
            return True
        first, kill_at = record.kill_at is None, now + grace
        if record.kill_at is not None:
            kill_at = min(kill_at, record.kill_at)
        self._put(replace(record, draining=True, kill_at=kill_at))
        if first:
            _log.info("worker %s is to end within %.0f s", change, grace)
            self._tell_to_end(self._records[change])
        return True

    def _tell_to_end(self, record: WorkerRecord) -> None:
        self._processes.terminate(_process(record))
        self._put(replace(record, told=True))

    def poll(self, now: Seconds, seen: Mapping[str, SeenWorker]) -> None:
        """Notes what has ended, and ends what had its time. `seen`: cards of workers by change."""
        watched = [one for one in self._records.values() if one.ended is None]
        gone = {one for record in watched if not self._processes.runs(one := _process(record))}
        left = self._processes.left_running(gone)
        for record in watched:
            card = seen.get(record.change)
            noted = self._note(record, card)
            if card is not None and noted.kill_at is not None and not noted.told:
                self._make_sure(noted, card, now)
            process = _process(record)
            if process not in gone:
                self._bound_end(self._records[record.change], now)
            else:
                self._watch_gone(self._records[record.change], now, engine_runs=process in left)
        self._forget_old(now)
        for change in tuple(self._unwritten):
            self._put(self._records[change])
        self._note_present()

    def _note_present(self) -> None:
        """Tells metrics what there is now."""
        slots = {group: len(devices) for group, devices in self._slots.items()}
        free = {group: self._free(group) for group in self._slots}
        alive = [self._instance(one) for one in self._records.values() if one.ended is None]
        self._measures.note(slots, free, self._kinds, alive)

    def _note(self, record: WorkerRecord, card: SeenWorker | None) -> WorkerRecord:
        if card is None:
            return record
        draining = card.draining or record.kill_at is not None
        noted = replace(record, joined=True, draining=draining)
        if noted != record:
            self._put(noted)
        return noted

    def _make_sure(self, record: WorkerRecord, card: SeenWorker, now: Seconds) -> None:
        """An earlier agent has died between its mark on disk and the signal, or just after. A
        second signal would end a drain, so the worker's card decides whether there was a first."""
        if card.draining:
            self._put(replace(record, told=True))
        elif now - self._unsure.setdefault(record.change, now) >= _TELLS:
            _log.info("worker %s was not told to end yet", record.change)
            self._tell_to_end(record)

    def _bound_end(self, record: WorkerRecord, now: Seconds) -> None:
        """Kills a worker that was told to end and has had its grace."""
        if record.kill_at is not None and now >= record.kill_at and not record.killed:
            _log.warning("worker %s did not end in time: killed", record.change)
            self._put(replace(record, killed=True))
            self._processes.kill(_process(record))

    def _watch_gone(self, record: WorkerRecord, now: Seconds, *, engine_runs: bool) -> None:
        """Notes that a worker has ended, once its engine has, too."""
        if engine_runs:
            gone = self._gone.setdefault(record.change, now)
            if now - gone < _CHILDREN:
                return
            self._processes.kill(_process(record))
        self._gone.pop(record.change, None)
        self._end(record, now, "")
        self._measures.exited(record.kind, _exit_kind(self._records[record.change]))

    def _end(self, record: WorkerRecord, now: Seconds, reason: str) -> None:
        status = None if reason else self._status(record)
        failed = not record.draining if status is None else status != 0 and not record.draining
        how = reason or _how(record, status)
        said = self._last_line(record.change) if failed else ""
        words = f"{how}; its last line: {said}" if said else how
        self._put(replace(record, ended=now, failed=failed, reason=words))
        level = logging.WARNING if failed else logging.INFO
        _log.log(level, "worker %s %s", record.change, words)

    def _last_line(self, change: str) -> str:
        """Its log's last line, also if the log was emptied just before."""
        return next((line for one in self._store.logs(change) if (line := last_line(one))), "")

    def _status(self, record: WorkerRecord) -> int | None:
        """Its exit status, negative for a signal. The kernel tells it only to the agent that
        started the worker; to a later one the worker itself does, unless it was killed."""
        known = self._processes.status(_process(record)) if record.pid else None
        return self._store.exit_status(record.change) if known is None else known

    def _put(self, record: WorkerRecord) -> None:
        """Keeps a record. What cannot be written is told, written when it can be, and found again
        by its command line."""
        self._records[record.change] = record
        try:
            self._store.save(record)
        except OSError as error:
            self._unwritten[record.change] = error.strerror or str(error)
        else:
            self._unwritten.pop(record.change, None)

    @property
    def unwritten(self) -> str:
        """Why records on disk are out of date; empty: they are not."""
        why = next(iter(self._unwritten.values()), "")
        return f"{self._store.directory} cannot be written: {why}" if why else ""

    def _forget_old(self, now: Seconds) -> None:
        ended = [one for one in self._records.values() if one.ended is not None]
        for record in ended:
            self._unsure.pop(record.change, None)
            if now - (record.ended or 0.0) > _KEEP_RECORD:
                self._store.forget(record.change)
                self._unwritten.pop(record.change, None)
                del self._records[record.change]
        ended.sort(key=lambda one: one.ended or 0.0)
        for record in ended[:-_KEEP_LOGS]:
            for path in self._store.logs(record.change):
                with suppress(OSError):  # it would end every look at the workers
                    path.unlink()

    # ------------------------------------------------------------------ saying

    def bound_logs(self) -> None:
        """Empties logs that are too long, also of workers that have ended. Errors: `OSError`, of
        the last one that failed."""
        failure: OSError | None = None
        for change in self._records:
            try:
                rotate(*self._store.logs(change))
            except OSError as error:
                failure = error
        if failure is not None:
            raise failure

    def report(self, now: Seconds) -> AgentReport:
        """What can be started, and what was."""
        listed = [
            self._instance(one)
            for one in self._records.values()
            if one.ended is None or now - one.ended <= _KEEP_ENDED
        ]
        free = {kind: self._free(group_of(kind)) for kind in self._kinds}
        kinds = tuple(Kind(name=one, slots=len(self._slots[group_of(one)])) for one in self._kinds)
        return AgentReport(
            kinds=kinds, free=free, instances=tuple(listed), directory=str(self._store.directory)
        )

    def _free(self, group: str) -> int:
        return len(set(range(len(self._slots[group]))) - self._taken(group))

    @property
    def running(self) -> int:
        """Number of workers that have not ended."""
        return sum(one.ended is None for one in self._records.values())

    def _instance(self, record: WorkerRecord) -> Instance:
        return Instance(
            change=record.change,
            kind=record.kind,
            ref=f"pid {record.pid}" if record.pid else "",
            state=_state(record),
            reason=record.reason,
            node=NodeId(record.node),
        )


def _process(record: WorkerRecord) -> Started:
    return Started(record.pid, record.begun)


def _state(record: WorkerRecord) -> str:
    if record.ended is not None:
        return "failed" if record.failed else "ended"
    if record.draining:
        return "ending"
    return "running" if record.joined else "booting"


def _exit_kind(record: WorkerRecord) -> ExitKind:
    if record.killed:
        return "killed"
    return "failed" if record.failed else "ended"


def _how(record: WorkerRecord, status: int | None) -> str:
    """How a worker ended, in words."""
    if record.killed:
        return "did not end in time and was killed"
    if status is None:
        return "left no exit status, as a process that is killed or crashes"
    if status < 0:
        return f"was ended by {_signal_name(-status)}"
    return f"ended with status {status}"


def _signal_name(number: int) -> str:
    """Its name; most real-time signals have none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"

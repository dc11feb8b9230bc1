"""Starts each worker as a step of one allocation, which a person has made.

`srun` runs as long as its step, in a session of its own: it survives the planner, and a step
survives `srun`. It does not know when a worker has joined.
"""

from __future__ import annotations

import asyncio
import logging
import shlex
import time
from typing import TYPE_CHECKING, Final, ParamSpec, TypeVar

from msgspec.structs import replace

from pdserve.errors import ActuatorDenied, ActuatorError, ActuatorExhausted, ActuatorTransient
from pdserve.planner.actuators.base import DEADLINE, check_order, within
from pdserve.planner.actuators.commands import end_session, leave_running
from pdserve.planner.actuators.settings import find_kind, kinds_of, worker_command
from pdserve.planner.actuators.slurm.commands import Pace, SlurmCommands
from pdserve.planner.actuators.slurm.step_records import (
    BOOT_ID,
    EndedStep,
    StepRecord,
    StepRecords,
    step_instance,
)
from pdserve.planner.actuators.slurm.text import (
    STEP_FORMAT,
    TELL,
    duration,
    parse_steps,
    told_once,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pdserve.ids import Seconds
    from pdserve.messages.planner import Instance, Kind
    from pdserve.planner.actuators.settings import CommandKind, Home
    from pdserve.planner.actuators.slurm.config import SlurmConfig

__all__ = ["SlurmSteps"]

_log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

_FLAGS: Final = ("--overlap", "--exact", "--nodes=1", "--ntasks=1", "--mpi=none")
"""Without `--overlap` a step waits for ever behind one that has the same cores."""
_GRACE_OF_SRUN: Final[Seconds] = 2.0
"""The exit status of `srun` may come to the disk so long after its step has gone."""


class SlurmSteps:
    """The actuator `slurm` with an allocation."""

    name = "slurm"

    def __init__(
        self,
        config: SlurmConfig,
        home: Home,
        *,
        environ: Mapping[str, str] | None = None,
        list_interval: Seconds = 5.0,
        deadline: Seconds = DEADLINE,
    ) -> None:
        """Args: `environ` is that of Slurm's commands; `deadline` is the longest that a call
        takes."""
        self._config, self._home = config, home
        self._deadline = deadline
        self._job = str(config.allocation)
        self._commands = SlurmCommands(environ, deadline)
        self._records = StepRecords(config.directory)
        self._listing = Pace(list_interval)
        self._seen: list[Instance] = []
        self._failed: ActuatorError | None = None
        self._gone: dict[str, float] = {}
        """When a step was first missed whose command has not told how it ended."""

    async def kinds(self) -> Sequence[Kind]:
        """The kinds of the settings; Slurm is not asked."""
        return kinds_of(self.name, self._config.kinds)

    async def start(self, kind: str, mode: str, change: str) -> Instance:
        """Starts `srun`. A step that Slurm refuses is an instance that has failed, in its words."""
        check_order(mode, change)
        settings = find_kind(self._config.kinds, kind)
        async with within(self._deadline, "start a step"), self._listing.lock:
            await self._refresh()
            listed = next((one for one in self._seen if one.change == change), None)
            if found := listed or await self._disk(self._found, change):
                return found
            if settings.slots and self._live(kind) >= settings.slots:
                raise ActuatorExhausted(f"{settings.slots} steps of kind {kind} run already")
            record = StepRecord(change=change, kind=kind)
            if await self._disk(self._records.create, record):
                self._seen.append(step_instance(record, None, None))
                await self._launch(settings, mode, change)
            return step_instance(record, None, None)

    def _found(self, change: str) -> Instance | None:
        record = self._records.read(change)
        if record is None:
            return None
        return step_instance(record, self._records.ended(change), None)

    def _live(self, kind: str) -> int:
        live = ("pending", "booting", "ending")
        return sum(one.kind == kind and one.state in live for one in self._seen)

    async def _launch(self, settings: CommandKind, mode: str, change: str) -> None:
        config = self._config
        worker = worker_command(
            config.program, mode, change, self._home, config.worker, settings.worker
        )
        step = ("srun", f"--jobid={self._job}", *settings.flags, *_FLAGS)
        step = (*step, f"--job-name=pdserve-{change}", "sh", "-c", told_once(worker))
        names = (str(self._records.path(change, name)) for name in ("srun", "log", "end"))
        srun, log, end = (shlex.quote(name) for name in names)
        text = f"cat {BOOT_ID} /proc/$$/stat >{srun}; "
        text += f"{shlex.join(step)} >{log} 2>&1 </dev/null; echo $? >{end}"
        await self._disk(leave_running, ("sh", "-c", text), self._commands.environ)

    async def stop(self, change: str, grace: Seconds) -> None:
        """Sends SIGTERM to the step once; a later `list` kills what runs after the grace."""
        async with within(self._deadline, "stop a step"), self._listing.lock:
            record = await self._disk(self._records.read, change)
            if record is None:
                return
            until = time.time() + grace
            if record.until is None or until < record.until:
                await self._disk(self._records.write, replace(record, until=until))
            await self._read()

    async def list(self) -> Sequence[Instance]:
        """Reads the steps and the records, seldom, and ends what has to be ended."""
        async with within(self._deadline, "read the steps"), self._listing.lock:
            await self._refresh()
            return list(self._seen)

    async def _refresh(self) -> None:
        if self._listing.due:
            await self._read()
        elif self._failed is not None:
            raise self._failed

    async def _read(self) -> None:
        """Brings the records up to date. Nothing changes when Slurm does not answer."""
        self._listing.passed()
        try:
            left = await self._time_left()
            words = ("--noheader", "--steps", f"--jobs={self._job}", f"--format={STEP_FORMAT}")
            steps = parse_steps(await self._commands.ask("squeue", *words))
            records = await self._disk(self._records.all)
            seen = []
            for record, ended in records:
                if step := steps.get(f"pdserve-{record.change}"):
                    ended = None  # its srun may have been killed, but the step runs
                    record = await self._follow(record, step)
                elif ended is None:
                    ended = await self._unseen(record, allocated=left is not None)
                seen.append(step_instance(record, ended, left or None))
        except ActuatorError as error:
            self._failed = error
            raise
        except BaseException:
            self._listing.forget()
            raise
        self._seen, self._failed = seen, None

    async def _time_left(self) -> Seconds | None:
        """Until the allocation ends; 0: it has no end; None: it is over."""
        words = ("--noheader", "--states=RUNNING,SUSPENDED", f"--jobs={self._job}", "--format=%L")
        try:
            text = await self._commands.ask("squeue", *words)
        except ActuatorDenied as error:
            if "invalid job id" in error.message.lower():
                return None
            raise
        return (duration(text.strip()) or 0.0) if text.strip() else None

    async def _unseen(self, record: StepRecord, *, allocated: bool) -> EndedStep | None:
        """A change whose step Slurm does not know: not yet, or no more; None: it may still run."""
        if not allocated:
            return await self._miss(record, f"allocation {self._job} is over")
        if record.ref:
            return await self._miss(record, "it is gone, and its srun did not tell how it ended")
        srun = await self._disk(self._records.srun, record.change)
        over = record.until is not None and record.until <= time.time()
        if srun.never:
            return await self._miss(record, "its srun was never started")
        if srun.gone or (over and srun.pid is None):
            return await self._miss(record, "its srun is gone and has not told how it ended")
        if record.until is not None and srun.pid is not None and self._home.acts:
            _log.info("slurm: the srun of %s waits, and is ended", record.change)
            await self._disk(end_session, srun.pid)
        return None

    async def _miss(self, record: StepRecord, why: str) -> EndedStep | None:
        """It runs no more: its command may still write how it ended."""
        since = self._gone.setdefault(record.change, time.monotonic())
        if time.monotonic() - since < _GRACE_OF_SRUN:
            return None
        await self._disk(self._records.end, record.change, why)
        del self._gone[record.change]
        return await self._disk(self._records.ended, record.change)

    async def _follow(self, record: StepRecord, step: str) -> StepRecord:
        """Notes the step's id, and ends it if that was asked for."""
        new = replace(record, ref=step)
        if new.until is not None and self._home.acts:
            try:
                if new.until <= time.time():
                    await self._commands.told("scancel", "--signal=KILL", step)
                elif not new.told:
                    await self._commands.told("scancel", f"--signal={TELL}", step)
                    new = replace(new, told=True)
            except ActuatorError as error:  # the next reading does it
                _log.warning("slurm: step %s does not end: %s", step, error.message)
        if new != record:
            await self._disk(self._records.write, new)
        return new

    async def _disk(self, work: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """Errors: `ActuatorTransient` for those of the disk."""
        try:
            return await asyncio.to_thread(work, *arguments, **named)
        except OSError as error:
            raise ActuatorTransient(f"{self._config.directory}: {error.strerror}") from None

    async def close(self) -> None:
        """Nothing is held: steps go on."""

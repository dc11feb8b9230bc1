"""Starts each worker as a job of its own.

The change id is in the job's comment, beside the moment at which it has to end once that was asked
for: both outlive this process and the controller. It does not know when a worker has joined.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Final

from pdserve.errors import ActuatorError, ActuatorExhausted, ActuatorTransient
from pdserve.planner.actuators.base import DEADLINE, check_order, within
from pdserve.planner.actuators.settings import find_kind, kinds_of, worker_command
from pdserve.planner.actuators.slurm.commands import Pace, SlurmCommands
from pdserve.planner.actuators.slurm.job_table import JobTable
from pdserve.planner.actuators.slurm.text import (
    JOB_FORMAT,
    TELL,
    Job,
    comment,
    instance,
    is_live,
    parse_jobs,
    script,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pdserve.ids import Seconds
    from pdserve.messages.planner import Instance, Kind
    from pdserve.planner.actuators.settings import CommandKind, Home
    from pdserve.planner.actuators.slurm.config import SlurmConfig

__all__ = ["SlurmJobs"]

_log = logging.getLogger(__name__)

LIST_INTERVAL: Final[Seconds] = 5.0
"""At most one `squeue` in so long: a controller serves thousands of users."""
START_INTERVAL: Final[Seconds] = 1.0
"""At most one `sbatch` in so long, for the same reason."""


class SlurmJobs:
    """The actuator `slurm` without an allocation."""

    name = "slurm"

    def __init__(
        self,
        config: SlurmConfig,
        home: Home,
        *,
        environ: Mapping[str, str] | None = None,
        list_interval: Seconds = LIST_INTERVAL,
        start_interval: Seconds = START_INTERVAL,
        deadline: Seconds = DEADLINE,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Args: `environ` is that of Slurm's commands; `deadline` is the longest that a call takes;
        `clock` tells Unix seconds, as Slurm's."""
        self._config, self._home, self._clock = config, home, clock
        self._deadline = deadline
        self._commands = SlurmCommands(environ, deadline)
        self._table = JobTable()
        self._failed: ActuatorError | None = None
        """Why the last reading failed: until the next one, nothing is known."""
        self._listing, self._starting = Pace(list_interval), Pace(start_interval)

    async def kinds(self) -> Sequence[Kind]:
        """The kinds of the settings; Slurm is not asked."""
        return kinds_of(self.name, self._config.kinds)

    async def start(self, kind: str, mode: str, change: str) -> Instance:
        """Submits a job. A job that Slurm refuses is an error in Slurm's words."""
        check_order(mode, change)
        settings = find_kind(self._config.kinds, kind)
        async with within(self._deadline, "start a job"), self._starting.lock:
            await self._refresh()
            job = self._table.get(change)
            if job is None:
                self._check_room(kind, settings)
                job = await self._submit(kind, settings, mode, change)
            return self._instance(job)

    def _check_room(self, kind: str, settings: CommandKind) -> None:
        if settings.slots and self._table.live(kind) >= settings.slots:
            raise ActuatorExhausted(f"{settings.slots} jobs of kind {kind} run or wait already")

    async def _submit(self, kind: str, settings: CommandKind, mode: str, change: str) -> Job:
        await self._starting.turn()
        config = self._config
        worker = worker_command(
            config.program, mode, change, self._home, config.worker, settings.worker
        )
        try:
            answer = await self._commands.ask(
                "sbatch", *self._flags(kind, settings, change), text=script(worker)
            )
        except ActuatorTransient:
            self._listing.forget()  # it may have been taken: look before the next try
            raise
        job = Job(answer.strip().partition(";")[0], "PENDING", "", None, None, change, kind)
        self._table.add(job, self._clock())
        return job

    def _flags(self, kind: str, settings: CommandKind, change: str) -> list[str]:
        """Options of `sbatch`; the last of two that are the same holds.

        `--dependency=singleton`: if an order whose answer was lost is repeated, the second job of
        the name waits for the end of the first, and is withdrawn meanwhile.
        """
        return [
            *settings.flags,
            "--parsable",
            "--no-requeue",
            f"--job-name=pdserve-{change}",
            "--dependency=singleton",
            f"--comment={comment(self._home.cluster, change, kind)}",
            f"--signal=B:{TELL}@{self._config.warning}",
            "--nodes=1",
            "--ntasks=1",
            f"--output={self._output(change)}",
            f"--chdir={self._config.directory}",
        ]

    def _output(self, change: str) -> str:
        return f"{self._config.directory}/pdserve-{change}.log"

    async def stop(self, change: str, grace: Seconds) -> None:
        """Withdraws a job that waits. One that runs gets SIGTERM once, and is killed by a later
        `list` when the grace is over."""
        async with within(self._deadline, "stop a job"):
            await self._refresh(force=self._table.get(change) is None)
            job = self._table.get(change)
            if job is None or not is_live(job):
                return
            until = self._clock() + grace
            if job.until is None:
                await self._order_end(job, until)
            elif until < job.until:
                await self._mark(job, until)
            await self._end_due()

    async def _order_end(self, job: Job, until: float) -> None:
        """Withdraws a job that waits; one that runs, or has begun to meanwhile, gets SIGTERM."""
        if job.state == "PENDING":
            await self._mark(job, until)
            await self._commands.told("scancel", "--state=PENDING", job.id)
            await self._refresh(force=True)
            job = self._table.get(job.change) or job
            if job.state == "PENDING" or not is_live(job):
                return
        await self._terminate(job)
        await self._mark(job, until)

    async def _terminate(self, job: Job) -> None:
        """Its shell passes on the first one only: a planner may have died before its mark."""
        await self._commands.told("scancel", "--batch", f"--signal={TELL}", job.id)

    async def _mark(self, job: Job, until: float) -> None:
        words = comment(self._home.cluster, job.change, job.kind, until)
        if await self._commands.told("scontrol", "update", f"JobId={job.id}", f"Comment={words}"):
            self._table.add(job._replace(until=until), self._clock())

    async def list(self) -> Sequence[Instance]:
        """Reads the queue, at most once in `LIST_INTERVAL`, and ends what has to be ended."""
        async with within(self._deadline, "read the queue"):
            await self._refresh()
        return [self._instance(job) for job in self._table]

    def _instance(self, job: Job) -> Instance:
        return instance(job, self._clock(), self._output(job.change))

    async def _refresh(self, *, force: bool = False) -> None:
        """Reads the queue if it is time. Nothing changes when Slurm does not answer."""
        async with self._listing.lock:
            if not force and not self._listing.due:
                if self._failed is not None:
                    raise self._failed
                return
            self._listing.passed()
            asked = self._clock()
            text = await self._read_queue()
            self._table.update(parse_jobs(text, self._home.cluster), asked, self._clock())
            await self._end_due()

    async def _read_queue(self) -> str:
        command = ("squeue", "--noheader", "--me", "--states=all", f"--format={JOB_FORMAT}")
        try:
            text = await self._commands.ask(*command)
        except ActuatorError as error:
            self._failed = error
            raise
        except BaseException:
            self._listing.forget()
            raise
        self._failed = None
        return text

    async def _end_due(self) -> None:
        if not self._home.acts:
            return
        for job, kill in list(self._table.endings(self._clock())):
            # A plain scancel is SIGTERM for all processes, which ends a worker that drains at once,
            # and SIGKILL after `KillWait`. A batch shell that is killed alone would be a fault of
            # the node to Slurm.
            how = () if kill else ("--state=PENDING",)
            try:
                await self._commands.told("scancel", *how, job.id)
            except ActuatorError as error:  # the next reading finds it again
                _log.warning("slurm: job %s does not end: %s", job.id, error.message)

    async def close(self) -> None:
        """Nothing is held: jobs go on."""

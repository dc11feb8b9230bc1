"""Slurm as labs of the conformance suite: workers as jobs, and as steps of an allocation."""

from __future__ import annotations

import itertools
import re
import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING

from pdserve.planner.actuators.settings import CommandKind, Home
from pdserve.planner.actuators.slurm import SlurmConfig, SlurmJobs, SlurmSteps
from tests.planner.actuators.workers import FAILS, POLITE, kill_worker, workers_of, write_program

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from pdserve.planner.actuators.base import Actuator
    from tests.support.slurm import Slurm

_clusters = (f"lab{number}" for number in itertools.count())


class JobsLab:
    """Jobs of one cluster on a Slurm that others use, too."""

    kind = "cpu"
    up = "booting"
    deadline = 8.0
    patience = 60.0
    pause = 0.1
    cannot: Mapping[str, str] = {}

    def __init__(self, slurm: Slurm, folder: Path, allocation: int = 0) -> None:
        self.slurm, self.folder = slurm, folder
        self.cluster = next(_clusters)
        self._config = SlurmConfig(
            directory=str(folder),
            kinds={self.kind: CommandKind(slots=2)},
            program=write_program(folder, POLITE),
            allocation=allocation,
        )
        self.actuator = self.open()

    def open(self) -> Actuator:
        return SlurmJobs(
            self._config,
            Home(self.cluster),
            environ=self.slurm.environ,
            list_interval=0.05,
            start_interval=0.0,
            deadline=self.deadline,
        )

    def close(self) -> None:
        """Whatever the test has broken is mended, and its jobs are gone."""
        self.slurm.signal_controller(signal.SIGCONT)
        self.slurm.run("scontrol", "update", "PartitionName=main", "State=UP")
        end_jobs(self.slurm, self.cluster)

    # ------------------------------------------------------------------ the suite's lab

    async def reopen(self) -> Actuator:
        return self.open()

    async def processes(self, change: str) -> int:
        return len(workers_of(self.folder, change))

    async def die(self, change: str) -> None:
        await kill_worker(self.folder, change)

    async def never_ready(self) -> None:
        """No actuator of Slurm knows when a worker is ready: `booting` is the most that it says."""

    async def start_fails(self) -> None:
        write_program(self.folder, FAILS)

    async def deny(self) -> None:
        self.slurm.run("scontrol", "update", "PartitionName=main", "State=DRAIN")

    async def silence(self) -> None:
        self.slurm.signal_controller(signal.SIGSTOP)


class StepsLab(JobsLab):
    """Steps of an allocation."""

    cannot: Mapping[str, str] = {"deny": "nothing in Slurm refuses a step of one's own allocation"}

    def open(self) -> Actuator:
        return SlurmSteps(
            self._config,
            Home(self.cluster),
            environ=self.slurm.environ,
            list_interval=0.05,
            deadline=self.deadline,
        )


def end_jobs(slurm: Slurm, cluster: str) -> None:
    """Kills the jobs of a cluster."""
    shown = slurm.run("squeue", "--noheader", "--format=%i %k").stdout
    mine = re.findall(rf"^(\d+) pdserve:{cluster}:", shown, re.MULTILINE)
    if mine:
        slurm.run("scancel", "--signal=KILL", *mine)


@contextmanager
def allocated(slurm: Slurm) -> Iterator[str]:
    """Four cores of the node, as a person has them."""
    done = slurm.run("salloc", "--no-shell", "--ntasks=1", "--cpus-per-task=4", "--time=5")
    job = done.stderr.split()[-1]
    assert job.isdecimal(), done.stderr
    yield job
    slurm.run("scancel", job)
    slurm.until(lambda: not slurm.run("squeue", "-h", "-j", job, "-tR,CG").stdout, "released")

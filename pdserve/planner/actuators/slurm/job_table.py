"""Remembers the jobs of a cluster's planners, and says which of them are to be ended. Pure.

`squeue` is the truth, and the comment of a job says which change wanted it. It does not know how a
command is run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from pdserve.planner.actuators.base import KEEP_ENDED
from pdserve.planner.actuators.slurm.text import Job, is_live, never_starts

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

__all__ = ["Ending", "JobTable"]


class Ending(NamedTuple):
    """A job that has to be ended now."""

    job: Job
    kill: bool
    """True: its grace is over. False: it waits, and is withdrawn if it still does."""


class JobTable:
    """One job per change."""

    def __init__(self) -> None:
        self._jobs: dict[str, Job] = {}
        self._ended: dict[str, float] = {}
        """When a change was first seen to have ended."""
        self._added: dict[str, float] = {}
        """When this planner submitted or marked a job, until a younger `squeue` shows it."""
        self._second: list[Job] = []

    def __iter__(self) -> Iterator[Job]:
        return iter(self._jobs.values())

    def get(self, change: str) -> Job | None:
        """The job of a change."""
        return self._jobs.get(change)

    def live(self, kind: str) -> int:
        """How many jobs of a kind run, or may."""
        return sum(job.kind == kind and is_live(job) for job in self)

    def add(self, job: Job, now: float) -> None:
        """Takes a job in that was submitted just now, or whose mark has changed."""
        self._jobs[job.change] = job
        self._added[job.change] = now

    def update(self, found: Sequence[Job], asked: float, now: float) -> None:
        """Takes in what `squeue` has shown.

        Args: `asked` is when the command began: a job that is younger need not be in it.
        """
        first, self._second = _first_of_each(found)
        for change, job in first.items():
            mine = self._jobs.get(change)
            # A mark that is younger than the reading is not in it.
            if mine is not None and self._added.get(change, 0.0) >= asked:
                job = job._replace(until=mine.until)
            self._jobs[change] = job
        for change, job in self._jobs.items():
            young = self._added.get(change, 0.0) >= asked
            if change not in first and is_live(job) and not young:
                self._jobs[change] = _vanished(job)
        self._added = {change: at for change, at in self._added.items() if at >= asked}
        self._forget(now)

    def _forget(self, now: float) -> None:
        ended = [change for change, job in self._jobs.items() if not is_live(job)]
        self._ended = {change: self._ended.get(change, now) for change in ended}
        for change, since in self._ended.items():
            if now - since > KEEP_ENDED:
                del self._jobs[change]
        self._ended = {change: at for change, at in self._ended.items() if change in self._jobs}

    def endings(self, now: float) -> Iterator[Ending]:
        """The jobs that have to be ended, in Unix seconds: those past their grace, those that are
        withdrawn or can never start, and second jobs of a change."""
        for job in (*self, *self._second):
            if job.state == "PENDING":
                unwanted = job.until is not None or job in self._second
                if unwanted or never_starts(job.reason):
                    yield Ending(job, kill=False)
            elif is_live(job) and job.until is not None and job.until <= now:
                yield Ending(job, kill=True)


def _first_of_each(found: Iterable[Job]) -> tuple[dict[str, Job], list[Job]]:
    """The job of each change, a live one before an ended one; and second ones, which an order made
    whose answer was lost."""
    first: dict[str, Job] = {}
    second = []
    for job in sorted(found, key=lambda job: (not is_live(job), _submitted(job))):
        if job.change in first:
            second.append(job)
        else:
            first[job.change] = job
    return first, second


def _submitted(job: Job) -> tuple[int, str]:
    """Order of submission: ids count up."""
    return (int(job.id), job.id) if job.id.isdecimal() else (0, job.id)


def _vanished(job: Job) -> Job:
    """A job that Slurm knows no more: it has ended, and was forgotten after `MinJobAge`."""
    state = "COMPLETED" if job.until is not None else "unknown to Slurm"
    return job._replace(state=state, reason="", left=None)

"""Runs the trials of a plan, several at once in processes of their own.

A pool owns its processes: they end with it, and with this process, whatever ends it.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from typing import TYPE_CHECKING, Final, NamedTuple

from pdserve.sim.capacity.trial import run_trial

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.connection import Connection
    from types import TracebackType

    from pdserve.ids import Seconds
    from pdserve.sim.capacity.search import PlanCell
    from pdserve.sim.capacity.trial import TrialPlan, TrialResult

__all__ = ["TrialPool"]

_LOOK_EVERY: Final[Seconds] = 0.2
_COUNT_EVERY: Final = 20
"""Requests that a process ends before it says so."""
_PR_SET_PDEATHSIG: Final = 1


class TrialPool:
    """A context that replays cells; with one process they run in this one.

    Args: `watch` is called now and then with the cells that run and the number of requests that
    have ended in all trials.
    """

    def __init__(
        self, plan: TrialPlan, processes: int, watch: Callable[[Sequence[PlanCell], int], None]
    ) -> None:
        self._plan = plan
        self._watch = watch
        self._processes = processes
        self._ended = 0
        self._executor: ProcessPoolExecutor | None = None
        self._counts, self._counted = multiprocessing.Pipe(duplex=False)
        self._others = set(multiprocessing.active_children())

    def __enter__(self) -> TrialPool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._executor is not None:
            if kind is not None:
                # A replay can take minutes, and its result is not wanted any more.
                for process in set(multiprocessing.active_children()) - self._others:
                    process.kill()
            self._executor.shutdown(cancel_futures=True)
        self._counts.close()
        self._counted.close()

    def run(self, cells: Sequence[PlanCell]) -> dict[PlanCell, TrialResult]:
        """The results of the cells."""
        if self._processes <= 1:
            return {cell: self._run_here(cell) for cell in cells}
        pool = self._executor or self._start()
        jobs = {pool.submit(_run_in_child, cell): cell for cell in cells}
        pending = set(jobs)
        while pending:
            _, pending = wait(pending, _LOOK_EVERY, FIRST_COMPLETED)
            self._read_counts()
            self._watch([cell for job, cell in jobs.items() if job in pending], self._ended)
        return {cell: job.result() for job, cell in jobs.items()}

    def _read_counts(self) -> None:
        while self._counts.poll(0):
            self._ended += int.from_bytes(self._counts.recv_bytes())

    def _run_here(self, cell: PlanCell) -> TrialResult:
        def ended() -> None:
            self._ended += 1
            self._watch([cell], self._ended)

        return run_trial(self._plan, cell, ended)

    def _start(self) -> ProcessPoolExecutor:
        self._executor = ProcessPoolExecutor(
            self._processes,
            multiprocessing.get_context("spawn"),
            _begin,
            (self._plan, self._counted, os.getpid()),
        )
        return self._executor


class _Child(NamedTuple):
    """What a child process keeps between trials."""

    plan: TrialPlan
    counted: Connection
    """Takes numbers of requests that have ended. Several children write to it: each number is
    short enough to be written at once."""


_child: list[_Child] = []


def _begin(plan: TrialPlan, counted: Connection, parent: int) -> None:
    """Prepares a child. Ctrl-C reaches the whole group, and the parent ends its children."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)
    _child.append(_Child(plan, counted))


def _run_in_child(cell: PlanCell) -> TrialResult:
    child, ended = _child[0], 0

    def count() -> None:
        nonlocal ended
        ended += 1
        if ended % _COUNT_EVERY == 0:
            child.counted.send_bytes(_COUNT_EVERY.to_bytes(4))

    result = run_trial(child.plan, cell, count)
    child.counted.send_bytes((ended % _COUNT_EVERY).to_bytes(4))
    return result

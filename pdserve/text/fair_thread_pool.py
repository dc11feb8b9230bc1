"""Runs jobs in a bounded thread pool, shared fairly among tenants, with a deadline for each job.

A thread cannot be killed. A job past its deadline is abandoned: its caller gets `DeadlineExceeded`,
an exception raised in the thread ends its Python code at the next step, and a new thread replaces
it. Native code runs on until it returns. The number of abandoned threads is bounded; beyond it a
late job keeps its thread. All threads are daemons, so that the process can end. The pool does not
know what its jobs do. `TextPool` owns one per kind of work, in the event loop's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import itertools
import logging
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeVar

from pdserve.errors import DeadlineExceeded, Draining, Overloaded
from pdserve.text.fair_queue import FairQueue

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.ids import Seconds

__all__ = ["JOB_SECONDS", "FairThreadPool"]

T = TypeVar("T")

_log = logging.getLogger("pdserve.text")

JOB_SECONDS: Final[Seconds] = 60.0
"""Deadline of one job, from its start. The longest text needs 3 s on an idle machine."""
_LOOKS: Final = 8
"""Checks for late jobs within the time that one job may take."""


class _GivenUp(BaseException):
    """Raised in an abandoned thread. Not an `Exception`, so that no handler in a job keeps it."""


@dataclass(slots=True, eq=False)
class _Job:
    tenant: str
    work: Callable[[], Any]
    large: bool
    first: bool
    outcome: Future[Any] = field(default_factory=Future)


@dataclass(slots=True, eq=False)
class _Worker:
    """One thread and its current job."""

    ident: int = 0
    job: _Job | None = None
    began: Seconds = 0.0
    late: bool = False
    """Set once the caller of its job got `DeadlineExceeded`."""
    abandoned: bool = False


class FairThreadPool:
    """Bounded thread pool with fair sharing and deadlines; all methods run in the loop's thread."""

    def __init__(
        self,
        name: str,
        threads: int,
        max_jobs: int,
        *,
        spare: int = 0,
        seconds: Seconds = JOB_SECONDS,
        max_abandoned: int = 4,
        changed: Callable[[], None] = lambda: None,
        clock: Callable[[], Seconds] = time.monotonic,
    ) -> None:
        """`max_jobs` bounds waiting and running jobs. `spare`: more threads, for tenants that
        have no job under way. `max_abandoned`: threads that may be replaced while they still
        run; a tenant that has caused half of them is refused. `changed` is called when a thread
        is abandoned, and when an abandoned one ends."""
        if threads < 1 or max_jobs < threads:
            raise ValueError("need threads >= 1 and max_jobs >= threads")
        self._name = name
        self._threads = threads
        self._most = threads + spare
        self._max_jobs = max_jobs
        self._seconds = seconds
        self._max_abandoned = max_abandoned
        self._changed = changed
        self._clock = clock
        # This lock is written in C: no injected exception can arrive between taking it and
        # entering `with`.
        self._lock = threading.Lock()
        self._work_waits = threading.Condition(self._lock)
        # Guarded by the lock:
        self._queue: FairQueue[_Job] = FairQueue()
        self._workers: set[_Worker] = set()
        self._stuck: dict[_Worker, str] = {}
        """Abandoned threads that still run, with their tenants."""
        self._idle = 0
        self._running = 0
        self._large = 0
        self._stopped = False
        # Used by the event loop only:
        self._numbers = itertools.count()
        self._watch: asyncio.TimerHandle | None = None
        self._quiet = asyncio.Event()
        self._quiet.set()
        self.jobs: set[_Job] = set()
        """Jobs submitted and not finished, without abandoned ones."""
        self._bounded = 0
        """Number of `jobs` that count against the bound."""
        self.accepted = 0
        self.refused = 0
        self.given_up = 0
        """Number of jobs that passed their deadline."""

    @property
    def stuck(self) -> int:
        """Number of abandoned threads that still run."""
        return len(self._stuck)

    async def submit(
        self, work: Callable[[], T], *, tenant: str = "", large: bool = False, first: bool = False
    ) -> T:
        """Run `work` in a thread and return its result.

        `large` jobs run one at a time. A `first` job runs before others of its tenant and is never
        refused at the bound.

        Errors: `Overloaded` at the bound, or later if the job has to make room; `Draining` after
        `stop`; `DeadlineExceeded` past the deadline; what `work` raises. Cancellation: a waiting
        job is withdrawn; a running one keeps its thread until it ends, and its result is dropped.
        """
        if self._stopped:
            raise Draining("the text was not processed: shutting down")
        if not first:
            self._admit(tenant)
        loop = asyncio.get_running_loop()
        job = _Job(tenant, work, large, first)
        # This callback runs before the caller's own, so the place is free when the caller goes on.
        outcome = job.outcome
        outcome.add_done_callback(functools.partial(self._settled, loop, job))
        self._enter(job, loop)
        if self._watch is None:
            self._watch = loop.call_later(self._seconds / _LOOKS, self._tick, loop)
        try:
            return await asyncio.wrap_future(outcome)
        except asyncio.CancelledError:
            if self._stopped and outcome.cancelled() and not _being_cancelled():
                raise Draining("the text was not processed: shutting down") from None
            raise
        finally:
            # The traceback of the job's error refers to this frame, whose callers hold the
            # request's text. Without a cycle back to the error the text is freed at once.
            del job, outcome

    def look(self) -> None:
        """Abandon the jobs that have passed their deadline."""
        late = self._abandon_late(self._clock())
        for worker, job in late:
            self.given_up += 1
            _log.warning(
                "%s: a job took over %g s and was given up; its thread %s",
                *(self._name, self._seconds),
                "is replaced" if worker.abandoned else "stays: too many were replaced",
            )
            with contextlib.suppress(Exception):
                # The job may have ended at this moment and set its outcome.
                job.outcome.set_exception(
                    DeadlineExceeded(f"working on the text took over {self._seconds:g} s")
                )
        # This comes last, because an error in it must not leave a caller waiting.
        if late:
            self._changed()

    def stop(self) -> None:
        """Take no more jobs and withdraw those that wait, which then raise `Draining`."""
        with self._lock:
            self._stopped = True
            waiting = [job for job in self.jobs if self._queue.remove(job.tenant, job)]
            self._work_waits.notify_all()
        for job in waiting:
            job.outcome.cancel()

    async def wait_quiet(self) -> None:
        """Wait until every job has ended or was abandoned."""
        await self._quiet.wait()

    def end(self) -> int:
        """Abandon running jobs, after `stop`; their callers get `Draining`. Return their number."""
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        with self._lock:
            left = [(each, each.job) for each in self._workers if each.job is not None]
            for worker, job in left:
                self._abandon(worker, job, 0.0)
        for _, job in left:
            with contextlib.suppress(Exception):
                # The job may have ended at this moment and set its outcome.
                job.outcome.set_exception(Draining("the text was not processed: shutting down"))
        return len(left)

    # ------------------------------------------------------------------ the loop's side

    def _admit(self, tenant: str) -> None:
        """Make room for one more job. Errors: `Overloaded`."""
        crowded = self._bounded >= self._max_jobs
        if not crowded and not self._stuck:
            return
        with self._lock:
            stuck = sum(name == tenant for name in self._stuck.values())
            too_stuck = bool(stuck) and stuck >= self._max_abandoned // 2
            victim = self._queue.make_room(tenant) if crowded and not too_stuck else None
        self.refused += too_stuck or crowded
        if too_stuck:
            raise Overloaded(
                f"{stuck} earlier texts of this client are still running past their deadline",
                retry_after=5.0,
            )
        if crowded and victim is None:
            raise Overloaded(f"{self._max_jobs} texts are already being processed", retry_after=1.0)
        if victim is not None:
            self._forget(victim)
            victim.outcome.set_exception(
                Overloaded("this client has the most texts in work; others go first", retry_after=1)
            )

    def _enter(self, job: _Job, loop: asyncio.AbstractEventLoop) -> None:
        """Errors: `Overloaded` when the system has no thread to give."""
        with self._lock:
            self._queue.push(job.tenant, job, first=job.first)
            try:
                self._wake(loop)
            except RuntimeError as error:
                self._queue.remove(job.tenant, job)
                raise Overloaded(f"no thread for the text: {error}", retry_after=1.0) from None
        self.accepted += 1
        self.jobs.add(job)
        self._bounded += not job.first
        self._quiet.clear()

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        self._watch = loop.call_later(self._seconds / _LOOKS, self._tick, loop)
        self.look()
        if not self.jobs:
            self._watch.cancel()
            self._watch = None

    def _settled(self, loop: asyncio.AbstractEventLoop, job: _Job, outcome: Future[Any]) -> None:
        """Report the outcome of a job to the loop; runs in any thread."""
        # The callbacks of the old outcome refer to the job; without a cycle both are freed at once.
        job.outcome = Future()
        if outcome.cancelled():
            with self._lock:
                self._queue.remove(job.tenant, job)
        with contextlib.suppress(RuntimeError):
            # A closed loop counts no jobs.
            loop.call_soon_threadsafe(self._forget, job)

    def _forget(self, job: _Job) -> None:
        if job in self.jobs:
            self.jobs.discard(job)
            self._bounded -= not job.first
        if not self.jobs:
            self._quiet.set()
            if self._watch is not None:
                self._watch.cancel()
                self._watch = None

    def _abandon_late(self, now: Seconds) -> list[tuple[_Worker, _Job]]:
        """Mark workers whose job is late, and abandon as many of them as may be."""
        late = []
        with self._lock:
            for worker in list(self._workers):
                job = worker.job
                if job is None or worker.late or now - worker.began <= self._seconds:
                    continue
                worker.late = True
                late.append((worker, job))
                if len(self._stuck) < self._max_abandoned:
                    self._abandon(worker, job, now - worker.began)
            with contextlib.suppress(RuntimeError):
                # If no thread can be started, the jobs wait for a running one.
                self._wake(asyncio.get_running_loop())
        return late

    # ------------------------------------------------------------------ under the lock

    def _abandon(self, worker: _Worker, job: _Job, took: Seconds) -> None:
        """Detach the thread from its job: it only has to end, at any point of its code."""
        worker.abandoned = True
        self._stuck[worker] = job.tenant
        self._workers.discard(worker)
        self._free(job, took)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(worker.ident), ctypes.py_object(_GivenUp)
        )

    def _may(self, job: _Job, running: int) -> bool:
        """Return True if a job may begin now while `running` jobs of its tenant run."""
        if job.large and self._large:
            return False
        return self._running < self._threads or not running

    def _next(self) -> _Job | None:
        return None if self._running >= self._most else self._queue.next(self._may)

    def _wake(self, loop: asyncio.AbstractEventLoop) -> None:
        """Wake or start a thread for the next job, if one may begin. Errors: `RuntimeError`."""
        if self._next() is None:
            return
        if self._idle:
            self._idle -= 1
            self._work_waits.notify()
        elif len(self._workers) < self._most:
            self._start_thread(loop)

    def _start_thread(self, loop: asyncio.AbstractEventLoop) -> None:
        worker = _Worker()
        thread = threading.Thread(
            target=self._live,
            args=(worker, loop),
            name=f"{self._name}-{next(self._numbers)}",
            daemon=True,
        )
        thread.start()
        worker.ident = thread.ident or 0
        self._workers.add(worker)

    def _begin(self, worker: _Worker) -> bool:
        """Give the worker the next job; False if none may begin."""
        while (job := self._next()) is not None:
            self._queue.begin(job.tenant, job)
            if job.outcome.set_running_or_notify_cancel():
                self._running += 1
                self._large += job.large
                worker.job, worker.began = job, self._clock()
                return True
            self._queue.end(job.tenant, 0.0)
        return False

    def _free(self, job: _Job, took: Seconds) -> None:
        self._queue.end(job.tenant, took)
        self._running -= 1
        self._large -= job.large

    # ------------------------------------------------------------------ a thread's side

    def _live(self, worker: _Worker, loop: asyncio.AbstractEventLoop) -> None:
        """Main function of a worker thread."""
        with contextlib.suppress(_GivenUp):
            # The exception may arrive when the job has just ended.
            self._serve(worker, loop)
        with self._lock:
            was_stuck = self._stuck.pop(worker, None) is not None
        if was_stuck:
            with contextlib.suppress(RuntimeError):
                # The loop may be closed.
                loop.call_soon_threadsafe(self._changed)

    def _serve(self, worker: _Worker, loop: asyncio.AbstractEventLoop) -> None:
        """Run jobs until the pool stops or this thread is abandoned."""
        while (job := self._wait_for_job(worker, loop)) is not None:
            error: BaseException | None = None
            result: Any = None
            try:
                result = job.work()
            except BaseException as raised:
                # Every exception of the job goes to its caller, not only an `Exception`.
                error = raised
            if not self._leave(worker):
                # The injected `_GivenUp` is raised here at the latest.
                time.sleep(0)
                return
            with contextlib.suppress(Exception):
                # The caller of a late job already has its `DeadlineExceeded`.
                if error is None:
                    job.outcome.set_result(result)
                else:
                    job.outcome.set_exception(error)
            del job, error, result

    def _wait_for_job(self, worker: _Worker, loop: asyncio.AbstractEventLoop) -> _Job | None:
        """Wait for a job; None: the pool has stopped."""
        with self._lock:
            while not self._begin(worker):
                if self._stopped:
                    self._workers.discard(worker)
                    return None
                # `_wake` subtracts this thread again before it notifies.
                self._idle += 1
                self._work_waits.wait()
            with contextlib.suppress(RuntimeError):
                self._wake(loop)
            return worker.job

    def _leave(self, worker: _Worker) -> bool:
        """Mark the worker's job as ended. False: it was abandoned and its thread must end."""
        with self._lock:
            if worker.abandoned:
                return False
            job = worker.job
            assert job is not None
            self._free(job, self._clock() - worker.began)
            worker.job, worker.late = None, False
            return True


def _being_cancelled() -> bool:
    """Return True if the current task itself was cancelled, not only what it waits for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0

"""Carries out the jobs of lower tiers in threads: one that copies, some that read and write files.

The threads release the interpreter while bytes move. They touch no index: `LowerTiers` sees the
result of a job when it polls. A thread that a broken disk keeps for ever holds its frame and its
segment, and nothing else waits for it.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter, deque
from typing import TYPE_CHECKING, Final

from pdserve.kv.tiers.jobs import READERS, CopyIn, CopyOut, Fill, FillShared

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.ids import Seconds
    from pdserve.kv.tiers.job_runner import JobRunner
    from pdserve.kv.tiers.jobs import JobDone, TierJob

__all__ = ["ThreadTierIo"]

_log = logging.getLogger(__name__)

_CLOSE: Final[Seconds] = 10.0
"""How long `close` waits for the threads."""


class ThreadTierIo:
    """A `TierIo` on threads."""

    def __init__(self, runner: JobRunner, *, disk: bool = False) -> None:
        """`disk`: there is a disk tier, which needs threads of its own."""
        self._runner = runner
        self._disk = disk
        self._done: deque[JobDone] = deque()
        self._wake: Callable[[], None] = lambda: None
        self._copies: queue.SimpleQueue[TierJob | None] = queue.SimpleQueue()
        self._reads: queue.SimpleQueue[TierJob | None] = queue.SimpleQueue()
        self._writes: queue.SimpleQueue[TierJob | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._landed = threading.Condition()
        self._landing: Counter[tuple[int, int]] = Counter()
        """Copies under way, by fetch and layer group."""

    def start(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._spawn("copy", self._copies)
        if self._disk:
            self._spawn("disk-write", self._writes)
            for number in range(READERS):
                self._spawn(f"disk-read-{number}", self._reads)

    def _spawn(self, name: str, jobs: queue.SimpleQueue[TierJob | None]) -> None:
        thread = threading.Thread(
            target=self._run, args=(jobs,), name=f"pdserve-tier-{name}", daemon=True
        )
        self._threads.append(thread)
        thread.start()

    def submit(self, job: TierJob) -> None:
        match job:
            case CopyIn():
                with self._landed:
                    self._landing[job.fetch, job.group] += 1
                self._copies.put(job)
            case CopyOut():
                self._copies.put(job)
            case Fill() | FillShared():
                self._reads.put(job)
            case _:
                self._writes.put(job)

    def poll(self) -> list[JobDone]:
        done: list[JobDone] = []
        while self._done:
            done.append(self._done.popleft())
        return done

    def next_due(self) -> Seconds | None:
        return None

    def wait_copied(self, fetch: int, group: int, seconds: Seconds) -> bool:
        with self._landed:
            return self._landed.wait_for(lambda: (fetch, group) not in self._landing, seconds)

    def copied_at(self, fetch: int, group: int) -> Seconds | None:
        return None

    def close(self) -> None:
        threads, self._threads = self._threads, []
        for _ in threads:
            for jobs in (self._copies, self._reads, self._writes):
                jobs.put(None)
        until = time.monotonic() + _CLOSE
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))
            if thread.is_alive():
                _log.error(
                    "%s has not ended within %g s: the disk does not answer", thread.name, _CLOSE
                )

    # ------------------------------------------------------------------ in the threads

    def _run(self, jobs: queue.SimpleQueue[TierJob | None]) -> None:
        while (job := jobs.get()) is not None:
            self._done.append(self._runner.run(job, time.monotonic(), time.monotonic))
            if isinstance(job, CopyIn):
                self._land(job)
            self._wake()

    def _land(self, job: CopyIn) -> None:
        """A copy has ended: tell the step that waits for it."""
        group = (job.fetch, job.group)
        with self._landed:
            self._landing[group] -= 1
            if not self._landing[group]:
                del self._landing[group]
                self._landed.notify_all()

"""Carries out the jobs of lower tiers in simulated time: each lane does one job after the other.

A job ends when its lane has had the time for its bytes. Its effect happens then too: nothing is
there before the end. Without a runner nothing is copied, for simulations without content.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from pdserve.kv.tiers.jobs import CopyIn, JobDone, bytes_of, lane_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pdserve.clock import Clock
    from pdserve.ids import Bytes, Seconds
    from pdserve.kv.tiers.disk.records import ReadFault
    from pdserve.kv.tiers.job_runner import JobRunner
    from pdserve.kv.tiers.jobs import TierJob
    from pdserve.messages.tiers import LaneName

__all__ = ["DEFAULT_RATES", "LaneRate", "VirtualTierIo"]


@dataclass(frozen=True, slots=True)
class LaneRate:
    """How fast a simulated lane is."""

    bandwidth: float
    """Bytes per second."""
    latency: Seconds = 0.0


DEFAULT_RATES: Final[Mapping[LaneName, LaneRate]] = {
    "d2h": LaneRate(50e9, 5e-5),
    "h2d": LaneRate(50e9, 5e-5),
    "disk_read": LaneRate(6e9, 2e-4),
    "disk_write": LaneRate(3e9, 2e-4),
}
"""A GPU on PCIe 5 and one NVMe drive."""


class VirtualTierIo:
    """A `TierIo` without threads, on any clock."""

    def __init__(
        self,
        clock: Clock,
        block_bytes: Bytes,
        runner: JobRunner | None = None,
        rates: Mapping[LaneName, LaneRate] = DEFAULT_RATES,
    ) -> None:
        self.fault: Callable[[TierJob], tuple[str, ReadFault, int] | None] = lambda job: None
        """Asked when a job ends: (error, reason, errno) makes it fail without effect. For tests."""
        self._clock = clock
        self._block_bytes = block_bytes
        self._runner = runner
        self._rates = rates
        self._free: dict[LaneName, Seconds] = {}
        """When each lane has done everything it has."""
        self._jobs: list[tuple[Seconds, int, Seconds, TierJob]] = []
        self._ended: list[JobDone] = []
        """Ends that a step has waited for."""
        self._number = 0

    def start(self, wake: Callable[[], None]) -> None:
        """Nothing to start: `next_due` tells when there is something."""

    def submit(self, job: TierJob) -> None:
        lane = lane_of(job)
        rate = self._rates[lane]
        now = self._clock.now()
        began = max(now, self._free.get(lane, now))
        due = began + rate.latency + bytes_of(job, self._block_bytes) / rate.bandwidth
        self._free[lane] = due
        self._number += 1
        heapq.heappush(self._jobs, (due, self._number, due - began, job))

    def poll(self) -> list[JobDone]:
        now = self._clock.now()
        done, self._ended = self._ended, []
        while self._jobs and self._jobs[0][0] <= now:
            _, _, seconds, job = heapq.heappop(self._jobs)
            done.append(self._end(job, seconds))
        return done

    def _end(self, job: TierJob, seconds: Seconds) -> JobDone:
        fault = self.fault(job)
        if fault is not None:
            return JobDone(job, seconds, *fault)
        if self._runner is None:
            return JobDone(job, seconds)
        return replace(self._runner.run(job, 0.0, lambda: 0.0), seconds=seconds)

    def next_due(self) -> Seconds | None:
        if self._ended:
            return self._clock.now()
        return self._jobs[0][0] if self._jobs else None

    def wait_copied(self, fetch: int, group: int, seconds: Seconds) -> bool:
        """Simulated time does not pass in a step. So copies that would end in time end at once, and
        those ahead of them in their lane."""
        due = self.copied_at(fetch, group)
        if due is None:
            return True
        if due > self._clock.now() + seconds:
            return False
        copies = [each for each in self._jobs if each[0] <= due and isinstance(each[3], CopyIn)]
        self._jobs = [each for each in self._jobs if each not in copies]
        heapq.heapify(self._jobs)
        self._ended += [self._end(job, seconds) for _, _, seconds, job in sorted(copies)]
        return True

    def copied_at(self, fetch: int, group: int) -> Seconds | None:
        return max(
            (
                due
                for due, _, _, job in self._jobs
                if isinstance(job, CopyIn) and job.fetch == fetch and job.group == group
            ),
            default=None,
        )

    def close(self) -> None:
        self._jobs.clear()
        self._ended.clear()

"""Gives jobs to the threads and books their bytes in lanes.

A *lane* predicts what a path does; it learns from each job that ends. Times are arguments.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pdserve.kv.tiers.jobs import (
    READERS,
    Fill,
    FillShared,
    LookShared,
    Maintain,
    Spill,
    bytes_of,
    lane_of,
)
from pdserve.kv.tiers.lanes import Lane

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdserve.ids import Bytes, Seconds
    from pdserve.kv.tiers.jobs import JobDone, TierIo, TierJob
    from pdserve.kv.tiers.lanes import LaneEstimate
    from pdserve.messages.tiers import LaneLoad, LaneName

__all__ = ["JobLanes", "parts"]

_COPY_BYTES: Final[Bytes] = 16 << 20
"""Most bytes of one copy job, so that a fetch is not behind a long copy."""

_DISK_JOBS: Final = (Fill, FillShared, LookShared, Spill, Maintain)
_WIDTHS: Final[dict[LaneName, int]] = {"disk_read": READERS}
"""Jobs that a lane does at the same time, where it is more than one."""


class JobLanes:
    """The way of all jobs to the threads and back."""

    def __init__(
        self,
        io: TierIo,
        block_bytes: Bytes,
        rates: Mapping[LaneName, LaneEstimate] | None = None,
    ) -> None:
        """`rates`: the lanes that were measured."""
        self.io = io
        self.disk_jobs = 0
        """Jobs under way that use the disk."""
        self.copy_blocks = max(1, _COPY_BYTES // block_bytes)
        """Most blocks of one copy job."""
        self._block_bytes = block_bytes
        names: tuple[LaneName, ...] = ("d2h", "h2d", "disk_read", "disk_write")
        known = rates or {}
        self._lanes = {
            name: Lane(name, width=_WIDTHS.get(name, 1), measured=known.get(name)) for name in names
        }

    def submit(self, job: TierJob, now: Seconds) -> None:
        """Begin a job."""
        self._lanes[lane_of(job)].submit(bytes_of(job, self._block_bytes), now)
        self.disk_jobs += isinstance(job, _DISK_JOBS)
        self.io.submit(job)

    def ended(self, done: JobDone, now: Seconds) -> None:
        """Take note of a job's end. Its owner learns of it from the caller."""
        lane, size = self._lanes[lane_of(done.job)], bytes_of(done.job, self._block_bytes)
        if done.error:
            lane.failed(size, now)
        else:
            lane.done(size, now, done.seconds)
        self.disk_jobs -= isinstance(done.job, _DISK_JOBS)

    def age(self, now: Seconds) -> None:
        """Let the lanes forget what was long ago."""
        for lane in self._lanes.values():
            lane.age(now)

    def estimates(self) -> dict[LaneName, LaneEstimate]:
        """What each lane is predicted to do."""
        return {name: lane.estimate() for name, lane in self._lanes.items()}

    def loads(self) -> tuple[LaneLoad, ...]:
        """What each lane does now."""
        return tuple(lane.load() for lane in self._lanes.values())


def parts(count: int, each: int) -> list[slice]:
    """Slices of at most `each` that cover `count` items."""
    return [slice(first, min(first + each, count)) for first in range(0, count, each)]

"""Models a lane: a path for bytes (device to host, disk reads, fetches) with a queue.

    finish of a new job = latency + (backlog + bytes) / bandwidth

Both are measured when a lane is opened, where that is possible (`first_rates`), and learnt from
jobs that end. Only busy periods count, because an idle lane
says nothing about its speed. Large periods give the bandwidth; small ones give the latency, once
the bandwidth is known.

Pure: times are arguments. It does not know what a job is for, and starts none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pdserve.messages.tiers import LaneLoad

if TYPE_CHECKING:
    from pdserve.ids import Bytes, Seconds
    from pdserve.messages.tiers import LaneName

__all__ = ["ASSUMED", "Lane", "LaneEstimate", "estimate_of"]

_SMALL: Final = 1 << 20
"""Bytes of a busy period below which its time is mostly latency."""
_LARGE: Final = 8 << 20
"""Bytes after which a busy period that goes on counts as one observation."""
_MEMORY: Final = 2.0
"""Busy seconds after which an observation of the bandwidth counts for a third."""
_FIRST: Final[Seconds] = 0.05
"""Busy seconds that the measurement at the start counts for."""
_FORGET: Final[Seconds] = 60.0
"""Seconds after which a lane that is not used is not taken for slow any more."""
_LATENCY_WEIGHT: Final = 0.1
"""Weight of the newest observation of the latency."""


@dataclass(frozen=True, slots=True)
class LaneEstimate:
    """What is predicted of a lane at one moment."""

    bandwidth: float
    """Bytes per second; positive."""
    latency: Seconds = 0.0
    backlog: Bytes = 0

    def seconds(self, size: Bytes) -> Seconds:
        """Time until a job of `size` bytes that is submitted now is done."""
        return self.latency + (self.backlog + size) / self.bandwidth


ASSUMED: Final[dict[LaneName, LaneEstimate]] = {
    "d2h": LaneEstimate(8e9, 5e-5),
    "h2d": LaneEstimate(8e9, 5e-5),
    "disk_read": LaneEstimate(1e9, 2e-4),
    "disk_write": LaneEstimate(5e8, 2e-4),
    "fetch": LaneEstimate(10e9, 2e-3),
}
"""A modest machine: used until a lane has been measured. Too slow a guess would keep the planner
from ever using a lane, so these are what most machines reach. Networks differ most: the guess is
that of a fast one, and a fetch that comes late corrects it."""


def estimate_of(load: LaneLoad) -> LaneEstimate:
    """The estimate that a worker's report of a lane stands for."""
    if not load.bandwidth:
        assumed = ASSUMED[load.lane]
        return LaneEstimate(assumed.bandwidth, load.latency or assumed.latency, load.backlog)
    return LaneEstimate(load.bandwidth, load.latency, load.backlog)


class Lane:
    """One lane. Every submitted byte is given back by `done` or `failed`, once."""

    def __init__(
        self, name: LaneName, *, width: int = 1, measured: LaneEstimate | None = None
    ) -> None:
        """`width`: number of jobs that the lane can do at the same time. `measured`: how fast it
        was before the first job; None: that is not known."""
        self.name = name
        self.submitted: Bytes = 0
        """All bytes since the start; `submitted == moved + lost + backlog` at any time."""
        self.moved: Bytes = 0
        self.lost: Bytes = 0
        """Bytes of jobs that failed."""
        self._width = width
        self._jobs = 0
        self._since: Seconds = 0.0
        """Start of the observation that is under way."""
        self._until: Seconds = 0.0
        """Its last end of a job."""
        self._bytes: Bytes = 0
        self._seconds: Seconds = 0.0
        """Sum of the jobs' own times in it."""
        self._fresh = False
        """Whether it contains the start of a busy period, and so a latency."""
        self._measured = measured
        self._rate = self._first_rate()
        self._learnt: Seconds = 0.0
        """When something was learnt last."""
        self._latency = self._first_latency()

    @property
    def backlog(self) -> Bytes:
        """Bytes that wait or are under way."""
        return self.submitted - self.moved - self.lost

    def submit(self, size: Bytes, now: Seconds) -> None:
        """A job of `size` bytes was handed to the lane."""
        if not self._jobs:
            self._since, self._bytes, self._seconds, self._fresh = now, 0, 0.0, True
        self._jobs += 1
        self.submitted += size

    def done(self, size: Bytes, now: Seconds, seconds: Seconds) -> None:
        """A job of `size` bytes ended, after `seconds` of its own, without its wait. The caller may
        learn of it late."""
        self._end(size)
        if self._bytes >= _LARGE and now > self._until:
            # Not before: several jobs may end at one time, and share what came before it.
            self._observe(self._until)
        self.moved += size
        self._bytes += size
        self._seconds += seconds
        self._until = now
        if not self._jobs:
            self._observe(now)

    def failed(self, size: Bytes, now: Seconds) -> None:
        """A job ended without result. Its time says nothing about the speed."""
        self._end(size)
        self.lost += size
        self._since, self._bytes, self._seconds, self._fresh = now, 0, 0.0, False

    def estimate(self) -> LaneEstimate:
        """The prediction as of now: learnt values, or the assumed ones."""
        return estimate_of(self.load())

    def load(self) -> LaneLoad:
        """The record for routers."""
        return LaneLoad(self.name, self.backlog, self._rate.value, self._latency or 0.0)

    def age(self, now: Seconds) -> None:
        """Forget that the lane was slow, a while after it was used last: nothing is planned through
        a lane that seems slow, so nothing would ever correct one bad moment."""
        if self._jobs or now - self._learnt < _FORGET:
            return
        first = self._measured or ASSUMED[self.name]
        if 0.0 < self._rate.value < first.bandwidth:
            self._rate = self._first_rate()
        if (self._latency or 0.0) > first.latency:
            self._latency = self._first_latency()

    def _first_rate(self) -> _Rate:
        rate = _Rate()
        if self._measured is not None:
            rate.add(self._measured.bandwidth * _FIRST, _FIRST)
        return rate

    def _first_latency(self) -> Seconds | None:
        return None if self._measured is None else self._measured.latency

    def _end(self, size: Bytes) -> None:
        if not self._jobs or size > self.backlog:
            raise ValueError(f"{size} bytes were not submitted to lane {self.name}")
        self._jobs -= 1

    def _observe(self, now: Seconds) -> None:
        """Learn from the jobs since the last observation."""
        # Results are noticed between two steps of the core, so the clock may say too much; the
        # jobs' own times add up to too much where several are done at once.
        busy = max(self._seconds / self._width, min(now - self._since, self._seconds))
        first, size = self._fresh, self._bytes
        self._since, self._bytes, self._seconds, self._fresh = now, 0, 0.0, False
        if busy <= 0.0 or not size:
            return
        self._learnt = now
        if size >= _SMALL:
            started = (self._latency or 0.0) if first else 0.0
            self._rate.add(size, max(busy - started, busy / 2))
        elif first:
            # Most of such a time is latency, whatever the bandwidth is.
            bandwidth = self._rate.value or ASSUMED[self.name].bandwidth
            self._learn_latency(max(0.0, busy - size / bandwidth))

    def _learn_latency(self, seen: Seconds) -> None:
        before = seen if self._latency is None else self._latency
        self._latency = before + _LATENCY_WEIGHT * (seen - before)


class _Rate:
    """Bytes per second, of sums that decay with the seconds observed."""

    def __init__(self) -> None:
        self._bytes = 0.0
        self._seconds = 0.0

    @property
    def value(self) -> float:
        """0 before the first observation."""
        return self._bytes / self._seconds if self._seconds else 0.0

    def add(self, size: float, seconds: Seconds) -> None:
        keep = math.exp(-seconds / _MEMORY)
        self._bytes = self._bytes * keep + size
        self._seconds = self._seconds * keep + seconds

"""Carries out the jobs of lower tiers: copies in vLLM's steps, files in threads. Imports no vLLM.

    out    from vLLM's blocks to frames, by every rank, before the step computes
    in     from frames to vLLM's blocks, for a request that waits for them

vLLM plans a step, gives out blocks for it, and asks here what to copy (`take`). Whatever was cached
when a copy was ordered is still there before the step computes, even if vLLM has just given its
block to another request. So a copy out is never wrong; it only must not wait for a later step then.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from pdserve.kv.tiers.jobs import CopyIn, CopyOut, JobDone

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdserve.ids import Bytes, Seconds
    from pdserve.kv.tiers.jobs import TierIo, TierJob

__all__ = ["STEP_BYTES", "RankReport", "StepIo", "TierCopies"]

_log = logging.getLogger(__name__)

STEP_BYTES: Final[Bytes] = 64 << 20
"""Bytes that a step which computes copies out; more if the blocks are needed at once."""

Pairs = list[tuple[int, int]]
"""Pairs of a block of vLLM and a frame."""


@dataclass(frozen=True, slots=True)
class TierCopies:
    """What the ranks copy in one step."""

    number: int
    out: Pairs
    into: Pairs


@dataclass(frozen=True, slots=True)
class RankReport:
    """So many ranks have done the copies of a step."""

    number: int
    ranks: int = 1
    out_seconds: Seconds = 0.0
    in_seconds: Seconds = 0.0
    out_error: str = ""
    in_error: str = ""

    def joined(self, other: RankReport) -> RankReport:
        """Both in one."""
        return RankReport(
            self.number,
            self.ranks + other.ranks,
            max(self.out_seconds, other.out_seconds),
            max(self.in_seconds, other.in_seconds),
            self.out_error or other.out_error,
            self.in_error or other.in_error,
        )


@dataclass(slots=True)
class _Step:
    """The jobs of a step that is under way."""

    out: list[CopyOut] = field(default_factory=list)
    into: list[CopyIn] = field(default_factory=list)
    report: RankReport | None = None


class StepIo:
    """A `TierIo` for one vLLM engine. All methods but `wake` are called in the core's thread."""

    def __init__(
        self,
        files: TierIo | None,
        ranks: int,
        block_bytes: Bytes,
        kept: Callable[[Sequence[int]], bool],
        first: int = 0,
    ) -> None:
        """`files` carries out what is about files; None: there is no disk. `kept` tells whether
        vLLM still has all of these blocks cached. `first`: the block of the arena that is frame
        0."""
        self._files = files
        self._ranks = ranks
        self._size = block_bytes
        self._kept = kept
        self._first = first
        self._out: deque[CopyOut] = deque()
        self._into: list[CopyIn] = []
        self._steps: dict[int, _Step] = {}
        self._number = 0
        self._done: list[JobDone] = []
        self._wake: Callable[[], None] = lambda: None

    # ------------------------------------------------------------------ as a `TierIo`

    def start(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        if self._files is not None:
            self._files.start(wake)

    def submit(self, job: TierJob) -> None:
        match job:
            case CopyOut():
                self._out.append(job)
            case CopyIn():
                self._into.append(job)
            case _:
                assert self._files is not None
                self._files.submit(job)

    def poll(self) -> list[JobDone]:
        done, self._done = self._done, []
        return done if self._files is None else done + self._files.poll()

    def next_due(self) -> Seconds | None:
        return None

    def wait_copied(self, fetch: int, group: int, seconds: Seconds) -> bool:
        """False: no step can wait for copies that steps do."""
        return False

    def copied_at(self, fetch: int, group: int) -> Seconds | None:
        return None

    def close(self) -> None:
        if self._files is not None:
            self._files.close()

    # ------------------------------------------------------------------ as the connector sees it

    @property
    def waits(self) -> bool:
        """Return whether copies wait for a step."""
        return bool(self._out or self._into)

    def take(self, *, computes: bool) -> TierCopies | None:
        """The copies of the step that vLLM has just planned; None: there are none. `computes`: the
        step has tokens to compute, which should not wait long."""
        if not self.waits:
            return None
        step = _Step(self._take_out(computes=computes), self._into)
        self._into = []
        if not (step.out or step.into):
            return None
        self._number += 1
        self._steps[self._number] = step
        return TierCopies(
            self._number,
            self._pairs(step.out),
            self._pairs(step.into),
        )

    def _pairs(self, jobs: Sequence[CopyOut | CopyIn]) -> Pairs:
        return [
            (block, self._first + frame)
            for job in jobs
            for block, frame in zip(job.blocks, job.frames, strict=True)
        ]

    def _take_out(self, *, computes: bool) -> list[CopyOut]:
        """Jobs up to a size, and all whose blocks vLLM has given away."""
        taken: list[CopyOut] = []
        later: deque[CopyOut] = deque()
        room = STEP_BYTES
        for job in self._out:
            if not computes or room > 0 or not self._kept(job.blocks):
                taken.append(job)
                room -= len(job.blocks) * self._size
            else:
                later.append(job)
        self._out = later
        return taken

    def reported(self, report: RankReport) -> None:
        """Ranks have done the copies of a step."""
        step = self._steps.get(report.number)
        if step is None:
            _log.error("vLLM reports copies of step %d, which has none", report.number)
            return
        step.report = whole = report if step.report is None else step.report.joined(report)
        if whole.ranks < self._ranks:
            return
        del self._steps[report.number]
        self._done += _ended(step.out, whole.out_seconds, whole.out_error)
        self._done += _ended(step.into, whole.in_seconds, whole.in_error)
        self._wake()


def _ended(jobs: Sequence[CopyOut | CopyIn], seconds: Seconds, error: str) -> list[JobDone]:
    """The ends of jobs that were done together; each has its part of the time."""
    blocks = sum(len(job.blocks) for job in jobs)
    return [JobDone(job, seconds * len(job.blocks) / blocks, error) for job in jobs]

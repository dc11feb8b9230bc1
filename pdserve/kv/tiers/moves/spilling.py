"""Writes host blocks to disk in batches, ahead of their eviction from the host.

A block waits until there are enough for one write, or for half a second. Its frame is claimed while
it is written. Pure but for the jobs: times are arguments.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from errno import EIO
from typing import TYPE_CHECKING, Final

from pdserve.kv.tiers.disk.format import PAGE
from pdserve.kv.tiers.disk.segment import records_that_fit
from pdserve.kv.tiers.jobs import Spill

if TYPE_CHECKING:
    from pdserve.ids import Bytes, Seconds
    from pdserve.kv.tiers.admission import DiskAdmission
    from pdserve.kv.tiers.block import TierBlock
    from pdserve.kv.tiers.jobs import JobDone
    from pdserve.kv.tiers.moves.indexes import TierIndexes
    from pdserve.kv.tiers.moves.job_lanes import JobLanes

__all__ = ["Spilling"]

_log = logging.getLogger(__name__)

SPILL_BYTES: Final[Bytes] = 8 << 20
"""Bytes of one write to disk, if there are as many to write."""

SPILL_AFTER: Final[Seconds] = 0.5
"""Seconds after which fewer bytes are written too."""

SPILL_AGAIN: Final[Seconds] = 15.0
"""Pause after the disk had no room or was not to be written to."""

SPILLS: Final = 2
"""Most writes under way: one that the disk does, one that waits."""


class Spilling:
    """What the host has that the disk may have to get."""

    def __init__(self, tiers: TierIndexes, jobs: JobLanes, admission: DiskAdmission | None) -> None:
        """`admission` None: there is no disk."""
        self._tiers = tiers
        self._host = tiers.host
        self._jobs = jobs
        self._admission = admission
        self._waiting: OrderedDict[bytes, None] = OrderedDict()
        """Hashes on the host that may have to be written, oldest first."""
        self.under_way = 0
        self.no_room = False
        """Whether the disk had no room when it was last asked."""
        self._at: Seconds | None = None
        """When the oldest that waits is written even if few bytes wait."""

    def offer(self, block_hash: bytes, now: Seconds) -> None:
        """Consider a block of the host for the disk."""
        disk = self._tiers.open_disk
        if disk is None or disk.knows(block_hash):
            return
        if len(self._waiting) >= self._host.capacity:
            self._waiting.popitem(last=False)
        self._waiting[block_hash] = None
        if self._at is None:
            self._at = now + SPILL_AFTER

    def withdraw(self, block_hash: bytes) -> None:
        """The block is not to be written."""
        self._waiting.pop(block_hash, None)

    def clear(self) -> None:
        """Nothing of what waits is to be written."""
        self._waiting.clear()
        self._at = None

    def due(self) -> Seconds | None:
        """When `spill` must be called at the latest; None: never."""
        return self._at if self._waiting and self.under_way < SPILLS else None

    def spill(self, now: Seconds) -> None:
        """Write blocks while there are enough, or old ones."""
        disk = self._tiers.open_disk
        if disk is None:
            return
        size = self._tiers.block_bytes
        fitting = records_that_fit(disk.segment_bytes, PAGE, 0, size)
        each = max(1, min(SPILL_BYTES // size, fitting))
        while self._waiting and self.under_way < SPILLS:
            if self._at is not None and now < self._at and self._may_wait(each):
                return
            blocks, frames = self._choose(each, now)
            if not blocks:
                continue
            batch = disk.append(blocks, size, now)
            if batch is None:
                self._put_back(blocks, frames, now)
                return
            self.under_way += 1
            self.no_room = False
            self._jobs.submit(Spill(batch, frames), now)
        if not self._waiting:
            self._at = None

    def _may_wait(self, each: int) -> bool:
        """Return whether more blocks are waited for, before they are written."""
        return len(self._waiting) < each or self.no_room

    def _choose(self, most: int, now: Seconds) -> tuple[list[TierBlock], list[int]]:
        """Take blocks that are to be written, and claim their frames."""
        assert self._tiers.disk is not None
        assert self._admission is not None
        blocks: list[TierBlock] = []
        frames: list[int] = []
        while self._waiting and len(blocks) < most:
            block_hash, _ = self._waiting.popitem(last=False)
            content, frame = self._host.block(block_hash), self._host.frame(block_hash)
            if content is None or frame is None or self._tiers.disk.knows(block_hash):
                continue
            if not self._admission.admits(content, self._tiers.block_bytes, now):
                self._tiers.disk_counts.refused += 1
                continue
            self._host.claim(frame)
            blocks.append(content)
            frames.append(frame)
        return blocks, frames

    def _put_back(self, blocks: list[TierBlock], frames: list[int], now: Seconds) -> None:
        """The disk takes nothing now."""
        self.no_room = True
        assert self._admission is not None
        for frame in frames:
            self._host.release(frame)
            self._admission.budget.refund(self._tiers.block_bytes)
        for block in reversed(blocks):
            self._waiting[block.hash] = None
            self._waiting.move_to_end(block.hash, last=False)
        self._at = now + SPILL_AGAIN

    def spilled(self, done: JobDone, job: Spill, now: Seconds) -> None:
        """A write ended."""
        disk, counts = self._tiers.disk, self._tiers.disk_counts
        assert disk is not None
        self.under_way -= 1
        for frame in job.frames:
            self._host.release(frame)
        if done.error:
            counts.failed += len(job.frames)
            _log.warning("KV blocks were not written to disk: %s", done.error)
            disk.failed(job.batch, done.errno or EIO, now)
        else:
            counts.stored += len(job.frames)
            counts.written_bytes += len(job.frames) * self._tiers.block_bytes
            disk.written(job.batch, now)

"""Reads records from disk into host frames: one read for all fetches that want the block.

The record's segment is claimed while it is read, unless it is another worker's. The frame is in no
index before the last fetch that waits for it has copied from it; then it is an ordinary one.

Pure but for the jobs: times are arguments.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pdserve.kv.tiers.block import TierBlock
from pdserve.kv.tiers.jobs import Fill, FillShared
from pdserve.net.log_throttle import LogThrottle

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pdserve.ids import Seconds
    from pdserve.kv.tiers.jobs import JobDone
    from pdserve.kv.tiers.moves.indexes import TierIndexes
    from pdserve.kv.tiers.moves.job_lanes import JobLanes
    from pdserve.kv.tiers.moves.sharing import Sharing

__all__ = ["Filling", "Fills"]

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Filling:
    """A frame that a record is read into, and the fetches that wait for it."""

    frame: int
    content: TierBlock
    fetches: dict[int, int] = field(default_factory=dict)
    """Number of each waiting fetch -> place of the block in it."""
    readers: int = 0
    """Fetches that copy from the frame or will."""
    valid: bool = False
    unwanted: bool = False
    """True if an operator has dropped the block. Its frame is freed when its last reader ends."""


class Fills:
    """The reads from disk, and the frames that fetches still copy from."""

    def __init__(
        self,
        tiers: TierIndexes,
        jobs: JobLanes,
        sharing: Sharing,
        take_frame: Callable[[Seconds], int | None],
    ) -> None:
        """`take_frame`: a frame of the host to read into; None: all are in use."""
        self._tiers = tiers
        self._host = tiers.host
        self._jobs = jobs
        self._sharing = sharing
        self._take_frame = take_frame
        self._filling: dict[bytes, Filling] = {}
        self._warnings = LogThrottle()

    def __len__(self) -> int:
        return len(self._filling)

    def __contains__(self, block_hash: object) -> bool:
        return block_hash in self._filling

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._filling)

    def is_ready(self, block_hash: bytes) -> bool:
        """Return True if the block is in its frame and checked, so that fetches may copy it."""
        filling = self._filling.get(block_hash)
        return filling is not None and filling.valid

    def join(
        self, number: int, index: int, block_hash: bytes, parent: bytes, now: Seconds
    ) -> int | None:
        """Fetch `number`, whose block `index` this is, waits for its read, which begins now if it
        has not. Returns the frame; None if there is none, or the block is not on disk."""
        filling = self._filling.get(block_hash) or self._begin(block_hash, parent, now)
        if filling is None:
            return None
        filling.fetches[number] = index
        filling.readers += 1
        return filling.frame

    def lift(self, block_hash: bytes, now: Seconds) -> bool:
        """Read a record for which no fetch waits; False as `join` returns None."""
        return block_hash in self._filling or self._begin(block_hash, b"", now) is not None

    def _begin(self, block_hash: bytes, parent: bytes, now: Seconds) -> Filling | None:
        disk = self._tiers.open_disk
        own = None if disk is None else disk.place(block_hash)
        other = self._tiers.shared_place(block_hash) if own is None else None
        if own is None and other is None:
            return None
        frame = self._take_frame(now)
        if frame is None:
            return None
        job: Fill | FillShared
        if other is not None:
            content, job = other.block, FillShared(block_hash, other, frame)
        else:
            assert disk is not None
            assert own is not None
            disk.claim(own)
            content = disk.block(block_hash) or TierBlock(block_hash, parent)
            job = Fill(block_hash, own, frame)
        filling = self._filling[block_hash] = Filling(frame, content)
        self._jobs.submit(job, now)
        return filling

    def leave(self, number: int, block_hash: bytes, now: Seconds) -> None:
        """The fetch does not copy from the frame, or not any more."""
        filling = self._filling.get(block_hash)
        if filling is None:  # its read failed
            return
        filling.fetches.pop(number, None)
        filling.readers -= 1
        self.settle(block_hash, now)

    # ------------------------------------------------------------------ ends of reads

    def ended(self, done: JobDone, job: Fill | FillShared, now: Seconds) -> Filling:
        """A read ended; returns its frame, which is `valid` if it succeeded, with the fetches that
        wait for it. `settle` follows when they have been told."""
        filling = self._filling[job.hash]
        if isinstance(job, FillShared):
            self._sharing.filled(done, job)
        else:
            self._own_ended(done, job, now)
        if done.error:
            self._failed(job.hash, filling)
        else:
            filling.valid = True
            self._tiers.disk_counts.read_bytes += self._tiers.block_bytes
        return filling

    def _own_ended(self, done: JobDone, job: Fill, now: Seconds) -> None:
        disk = self._tiers.disk
        assert disk is not None
        if done.error:
            self._tiers.disk_counts.failed += 1
            self._warn(done.error, now)
            disk.read_failed(job.place, job.hash, done.reason, now, done.errno)
        else:
            disk.touch(job.hash, now)
        disk.release(job.place)

    def _warn(self, error: str, now: Seconds) -> None:
        """A bad segment has thousands of blocks: they share a line."""
        others = self._warnings.admit("read", now)
        if others is not None:
            more = f" ({others} others since the last such line)" if others else ""
            _log.warning("a KV block was not read from disk: %s%s", error, more)

    def _failed(self, block_hash: bytes, filling: Filling) -> None:
        del self._filling[block_hash]
        self._host.abandon(filling.frame)

    def settle(self, block_hash: bytes, now: Seconds) -> None:
        """Put the frame into the host index once its read and all copies from it have ended."""
        filling = self._filling.get(block_hash)
        if filling is not None and filling.valid and not filling.readers:
            self._keep(block_hash, filling, now)

    def _keep(self, block_hash: bytes, filling: Filling, now: Seconds) -> None:
        del self._filling[block_hash]
        if filling.unwanted:
            self._host.abandon(filling.frame)
        elif self._host.commit(filling.frame, filling.content, now):
            self._tiers.host_counts.stored += 1

    # ------------------------------------------------------------------ for operators

    def contents(self) -> Iterator[TierBlock]:
        """The blocks that are read now."""
        return (filling.content for filling in self._filling.values())

    def drop(self, unwanted: Callable[[bytes], bool]) -> None:
        """Let the frames of these blocks go when no fetch copies from them."""
        for name, filling in self._filling.items():
            filling.unwanted |= unwanted(name)

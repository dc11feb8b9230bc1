"""Does what a job of lower tiers says: copies bytes, reads and writes records.

It is called in I/O threads (`thread_io`) or in simulated time (`virtual_io`) and touches no index.
"""

from __future__ import annotations

import logging
from array import array
from errno import EIO
from typing import TYPE_CHECKING, Final, Protocol

from pdserve.kv.tiers.disk.records import TierReadError, TierWriteError
from pdserve.kv.tiers.jobs import (
    CopyIn,
    CopyOut,
    Fill,
    FillShared,
    JobDone,
    LookShared,
    Maintain,
    Spill,
)
from pdserve.transfer.copying import copy_runs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from pdserve.ids import Bytes, Seconds
    from pdserve.kv.tiers.disk.records import SegmentStore
    from pdserve.kv.tiers.disk.sealed_reader import SealedReader
    from pdserve.kv.tiers.jobs import BlockCopier, TierJob

__all__ = ["FrameBytes", "JobRunner", "MemoryCopier"]

_log = logging.getLogger(__name__)

_STREAMING: Final[Bytes] = 64 << 10
"""Blocks of at least this size are copied around the processor's caches."""


class MemoryCopier:
    """A `BlockCopier` for a device pool in host memory."""

    def __init__(self, device: memoryview, arena: memoryview, block_bytes: Bytes) -> None:
        self._device = device
        self._arena = arena
        self._size = block_bytes

    def copy_out(self, blocks: Sequence[int], frames: Sequence[int]) -> None:
        self._copy(self._arena, frames, self._device, blocks)

    def copy_in(
        self,
        frames: Sequence[int],
        blocks: Sequence[int],
        span: tuple[Bytes, Bytes] | None = None,
    ) -> None:
        self._copy(self._device, blocks, self._arena, frames, span)

    def close(self) -> None:
        """Let go of both memories."""
        self._device.release()
        self._arena.release()

    def _copy(
        self,
        target: memoryview,
        to: Sequence[int],
        source: memoryview,
        from_: Sequence[int],
        span: tuple[Bytes, Bytes] | None = None,
    ) -> None:
        size = self._size
        begin, end = (0, size) if span is None else span
        copy_runs(
            target,
            source,
            _int64(place * size + begin for place in to),
            _int64(place * size + begin for place in from_),
            _int64([end - begin] * len(to)),
            end - begin >= _STREAMING,
        )


class FrameBytes(Protocol):
    """The frames of a host tier: a `BlockMemory` of their own, or a part of one."""

    def view(self, frame: int, /) -> memoryview:
        """Writable bytes of one frame."""
        ...


class JobRunner:
    """Carries out jobs, one at a time in each calling thread."""

    def __init__(
        self,
        copier: BlockCopier | None,
        arena: FrameBytes,
        files: SegmentStore | None,
        shared: SealedReader | None = None,
    ) -> None:
        """`copier` None: copies are not its task. `files` None: there is no disk tier. `shared`
        None: nothing of other workers is read."""
        self._copier = copier
        self._arena = arena
        self.files = files
        self.shared = shared

    def run(self, job: TierJob, began: Seconds, clock: Callable[[], Seconds]) -> JobDone:
        """Carry out a job. `began`: when it did, on `clock`."""
        scan = None
        try:
            if isinstance(job, LookShared):
                scan = self._shared.scan(job.known, job.room)
            else:
                self._carry_out(job)
        except TierReadError as error:
            return JobDone(job, clock() - began, error.message, error.reason, error.errno)
        except TierWriteError as error:
            return JobDone(job, clock() - began, error.message, errno=error.errno)
        except Exception as error:
            # The tier must learn of any error: its frames and claims wait for the end of the job.
            _log.exception("a job of the KV tiers failed")
            return JobDone(job, clock() - began, f"{type(error).__name__}: {error}", errno=EIO)
        return JobDone(job, clock() - began, scan=scan)

    def _carry_out(self, job: TierJob) -> None:
        match job:
            case CopyOut():
                self._copies.copy_out(job.blocks, job.frames)
            case CopyIn():
                self._copies.copy_in(job.frames, job.blocks, job.span)
            case Fill():
                self._disk.read(job.place, job.hash, self._arena.view(job.frame))
            case FillShared():
                self._shared.read(job.place, job.hash, self._arena.view(job.frame))
            case Spill():
                self._disk.write(job.batch, [self._arena.view(frame) for frame in job.frames])
            case Maintain():
                self._disk.run(job.command)

    @property
    def _copies(self) -> BlockCopier:
        assert self._copier is not None
        return self._copier

    @property
    def _disk(self) -> SegmentStore:
        assert self.files is not None
        return self.files

    @property
    def _shared(self) -> SealedReader:
        assert self.shared is not None
        return self.shared


def _int64(numbers: Iterable[int]) -> array[int]:
    return array("q", numbers)

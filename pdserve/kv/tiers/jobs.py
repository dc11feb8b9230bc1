"""Defines the jobs that move blocks between tiers, and the port that carries them out.

    core's thread   `TierIo.submit` a job, which returns at once
    I/O threads     copy, read, write (`thread_io`); in simulated time `virtual_io` does
    core's thread   `TierIo.poll` returns what has ended, with its error if it has one

A job names places, never blocks' content. Until it has ended, it may read its sources and write to
its targets: `LowerTiers`, which submits it, keeps both from being used for anything else. The
exception is `CopyOut`: its source is a device block that nobody holds, and its result counts only
if the block has kept its generation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdserve.ids import Bytes, Seconds
    from pdserve.kv.tiers.block import TierBlock
    from pdserve.kv.tiers.disk.records import ReadFault, RecordPlace, SegmentCommand, WriteBatch
    from pdserve.kv.tiers.disk.sealed_reader import SealedScan, SharedPlace, SharedSegment
    from pdserve.messages.tiers import LaneName

__all__ = [
    "READERS",
    "BlockCopier",
    "CopyIn",
    "CopyOut",
    "Fill",
    "FillShared",
    "JobDone",
    "LookShared",
    "Maintain",
    "Spill",
    "TierIo",
    "TierJob",
]


READERS: Final = 4
"""Reads from disk at the same time: enough for a disk's queue, and one that hangs does not stop
all."""


@dataclass(frozen=True, slots=True, eq=False)
class CopyOut:
    """Copies device blocks to frames of the host arena."""

    blocks: Sequence[int]
    frames: Sequence[int]
    contents: Sequence[TierBlock]
    generations: Sequence[int]
    """`BlockPool.generation` of each block when the job was made."""
    spare: bool = False
    """True: the blocks stay on the device for a while."""


@dataclass(frozen=True, slots=True, eq=False)
class CopyIn:
    """Copies frames to device blocks."""

    fetch: int
    """Number of the fetch that it belongs to."""
    first: int
    """Place of its first block in that fetch."""
    frames: Sequence[int]
    blocks: Sequence[int]
    span: tuple[Bytes, Bytes] | None = None
    """Where the bytes to copy begin and end in each block; None: whole blocks."""
    group: int = 0
    """Number of the layer group that these bytes are."""
    last: bool = True
    """Whether it is the last copy from its frames, so that all of their blocks is there then."""


@dataclass(frozen=True, slots=True, eq=False)
class Fill:
    """Reads a record from disk into a frame and checks it."""

    hash: bytes
    place: RecordPlace
    frame: int


@dataclass(frozen=True, slots=True, eq=False)
class FillShared:
    """Reads a record that another worker has stored into a frame and checks it."""

    hash: bytes
    place: SharedPlace
    frame: int


@dataclass(frozen=True, slots=True, eq=False)
class LookShared:
    """Looks for segments that other workers have sealed."""

    known: frozenset[SharedSegment]
    """Those that need not be read again."""
    room: int
    """Blocks for which there is room."""


@dataclass(frozen=True, slots=True, eq=False)
class Spill:
    """Writes frames to disk, as one batch of records."""

    batch: WriteBatch
    frames: Sequence[int]


@dataclass(frozen=True, slots=True, eq=False)
class Maintain:
    """Seals or removes a segment on disk."""

    command: SegmentCommand


TierJob = CopyOut | CopyIn | Fill | FillShared | LookShared | Spill | Maintain


@dataclass(frozen=True, slots=True, eq=False)
class JobDone:
    """The end of a job."""

    job: TierJob
    seconds: Seconds
    """How long it took once it had begun."""
    error: str = ""
    """Why it failed, in words; empty: it did not."""
    reason: ReadFault = "io"
    """Why a read failed, in one word."""
    errno: int = 0
    """The system's error number; 0: none."""
    scan: SealedScan | None = None
    """What a look has found."""


class BlockCopier(Protocol):
    """Copies blocks between the device pool and the host arena. Called in the copy thread."""

    def copy_out(self, blocks: Sequence[int], frames: Sequence[int]) -> None:
        """Copy device blocks to frames; returns when the bytes are there."""
        ...

    def copy_in(
        self,
        frames: Sequence[int],
        blocks: Sequence[int],
        span: tuple[Bytes, Bytes] | None = None,
    ) -> None:
        """Copy frames to device blocks, or only the bytes of each from `span[0]` to `span[1]`;
        returns when steps may read them."""
        ...

    def close(self) -> None:
        """Let go of both memories. No copy is under way. Idempotent."""
        ...


class TierIo(Protocol):
    """Carries out jobs. Called in the core's thread; no method waits, except `wait_copied` and
    `close`."""

    def start(self, wake: Callable[[], None]) -> None:
        """Begin. `wake` is called, from any thread, when `poll` has something."""
        ...

    def submit(self, job: TierJob) -> None:
        """Begin a job as soon as its lane is free. Jobs of one lane begin in this order."""
        ...

    def poll(self) -> list[JobDone]:
        """Return the jobs that have ended since the last call."""
        ...

    def next_due(self) -> Seconds | None:
        """When a job ends, in simulated time; None: `wake` tells it."""
        ...

    def wait_copied(self, fetch: int, group: int, seconds: Seconds) -> bool:
        """Wait until the copies of a fetch's layer group that were submitted have ended, at most
        `seconds`; `poll` then has their ends. False: they have not."""
        ...

    def copied_at(self, fetch: int, group: int) -> Seconds | None:
        """When those copies end, in simulated time; None: it is not known, or they have ended."""
        ...

    def close(self) -> None:
        """End after the jobs under way. Idempotent."""
        ...


def lane_of(job: TierJob) -> LaneName:
    """The lane that a job's bytes take."""
    match job:
        case CopyOut():
            return "d2h"
        case CopyIn():
            return "h2d"
        case Fill() | FillShared():
            return "disk_read"
        case _:
            return "disk_write"


def bytes_of(job: TierJob, block_bytes: Bytes) -> Bytes:
    """How many bytes a job moves."""
    match job:
        case CopyIn(span=(begin, end)):
            return len(job.frames) * (end - begin)
        case CopyOut() | CopyIn() | Spill():
            return len(job.frames) * block_bytes
        case Fill() | FillShared():
            return block_bytes
        case _:
            return 0

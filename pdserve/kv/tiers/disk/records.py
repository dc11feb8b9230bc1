"""Defines what the index of the disk tier and its files say to each other.

The index hands out write batches and commands; threads perform them with a `SegmentStore` and the
index learns the results. `SegmentFiles` is the real store, `MemorySegments` its twin for
simulations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from pdserve.errors import PdserveError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.ids import Bytes
    from pdserve.kv.tiers.block import TierBlock

__all__ = [
    "EraseRecords",
    "MoveRecords",
    "NewRecord",
    "ReadFault",
    "RecordPlace",
    "RemoveDirectory",
    "SealSegment",
    "SegmentCommand",
    "SegmentStore",
    "TierReadError",
    "TierWriteError",
    "UnlinkSegment",
    "WriteBatch",
]

ReadFault = Literal["io", "crc", "absent", "format"]
"""Why a record was not read: the system reported an error, the payload does not match its checksum,
the file is gone, or the header is not the expected one."""


class TierReadError(PdserveError):
    """A record could not be read whole. It is a miss: nothing of it may be used."""

    code = "tier_read_error"

    def __init__(self, reason: ReadFault, message: str, errno: int = 0) -> None:
        super().__init__(message)
        self.reason = reason
        self.errno = errno


class TierWriteError(PdserveError):
    """A batch or command failed; `errno` says how. Nothing of it counts as stored."""

    code = "tier_write_error"

    def __init__(self, errno: int, message: str) -> None:
        super().__init__(message)
        self.errno = errno


@dataclass(frozen=True, slots=True)
class RecordPlace:
    """Where a record is, and what its header must say."""

    segment: int
    epoch: int
    offset: Bytes
    payload_bytes: Bytes
    seq: int


@dataclass(frozen=True, slots=True)
class NewRecord:
    """A record to be written: the block and the place reserved for it."""

    block: TierBlock
    place: RecordPlace


@dataclass(frozen=True, slots=True)
class WriteBatch:
    """Records to write together. All of them count, or none."""

    number: int
    records: tuple[NewRecord, ...]

    @property
    def segments(self) -> set[int]:
        """Segments that the batch writes to."""
        return {record.place.segment for record in self.records}


@dataclass(frozen=True, slots=True)
class SealSegment:
    """Write table and trailer, cut the file behind them and make it durable."""

    segment: int
    epoch: int
    first_seq: int
    end: Bytes
    """Where the last record ends."""
    table: bytes


@dataclass(frozen=True, slots=True)
class EraseRecords:
    """Overwrite records, so that their payloads are gone from the disk."""

    segment: int
    epoch: int
    places: tuple[RecordPlace, ...]
    seal: SealSegment | None
    """The table without them, for a segment that was sealed."""


@dataclass(frozen=True, slots=True)
class MoveRecords:
    """Copy records from a segment that goes to the open one."""

    batch: WriteBatch
    sources: tuple[RecordPlace, ...]


@dataclass(frozen=True, slots=True)
class UnlinkSegment:
    """Remove a segment and give its bytes back."""

    segment: int
    epoch: int


@dataclass(frozen=True, slots=True)
class RemoveDirectory:
    """Remove a subdirectory that no worker uses any more."""

    name: str


SegmentCommand = SealSegment | EraseRecords | MoveRecords | UnlinkSegment | RemoveDirectory


class SegmentStore(Protocol):
    """Performs what an index decides. Its methods block; threads call them, several at a time.

    Errors: `TierWriteError` from `write` and `run`, `TierReadError` from `read`.
    """

    def write(self, batch: WriteBatch, payloads: Sequence[memoryview]) -> None:
        """Write the batch's records; the payloads are in its order."""
        ...

    def read(self, place: RecordPlace, hash: bytes, into: memoryview) -> None:
        """Read the payload of block `hash`. After an error `into` holds anything."""
        ...

    def run(self, command: SegmentCommand) -> None:
        """Perform a command."""
        ...

    def close(self) -> None:
        """Give back files and locks. Nothing else may be called after it."""
        ...

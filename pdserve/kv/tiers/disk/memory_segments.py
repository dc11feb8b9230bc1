"""A twin of `SegmentFiles` that keeps records in a dictionary, or only their names.

For simulations, which have no bytes, and for tests of what lies above.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.kv.tiers.disk.records import (
    EraseRecords,
    MoveRecords,
    RemoveDirectory,
    SealSegment,
    TierReadError,
    TierWriteError,
    UnlinkSegment,
)
from pdserve.kv.tiers.disk.trouble import CORRUPT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.kv.tiers.disk.records import RecordPlace, SegmentCommand, WriteBatch

__all__ = ["MemorySegments"]


class MemorySegments:
    """Records by place. Not thread-safe."""

    def __init__(self) -> None:
        self._records: dict[RecordPlace, tuple[bytes, bytes | None]] = {}
        """Hash and payload of what is at a place."""

    def write(self, batch: WriteBatch, payloads: Sequence[memoryview] = ()) -> None:
        """Keep the batch's records; without payloads, only their names."""
        kept: list[bytes | None] = [bytes(payload) for payload in payloads]
        kept = kept or [None] * len(batch.records)
        for record, payload in zip(batch.records, kept, strict=True):
            self._records[record.place] = (record.block.hash, payload)

    def read(self, place: RecordPlace, hash: bytes, into: memoryview | None = None) -> None:
        """Read a payload, if there is one. Errors: `TierReadError`."""
        found = self._records.get(place)
        if found is None:
            raise TierReadError("absent", f"segment {place.segment} has no record there")
        if found[0] != hash:
            raise TierReadError("format", f"segment {place.segment} has another record there")
        if into is not None and found[1] is not None:
            into[: len(found[1])] = found[1]

    def run(self, command: SegmentCommand) -> None:
        """Perform a command. Errors: `TierWriteError`."""
        match command:
            case EraseRecords():
                for place in command.places:
                    self._records.pop(place, None)
            case MoveRecords():
                self._move(command)
            case UnlinkSegment():
                gone = [place for place in self._records if place.segment == command.segment]
                for place in gone:
                    del self._records[place]
            case SealSegment() | RemoveDirectory():
                pass

    def _move(self, command: MoveRecords) -> None:
        for record, source in zip(command.batch.records, command.sources, strict=True):
            found = self._records.get(source)
            if found is None:
                raise TierWriteError(CORRUPT, "a record to move is gone")
            self._records[record.place] = found

    def close(self) -> None:
        """Forget everything."""
        self._records.clear()

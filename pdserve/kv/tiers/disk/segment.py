"""Tracks one segment of the disk tier: its records, its readers, its writers, what it waits for.

OPEN      takes new records
FULL      takes none; is sealed when no batch is under way to it
SEALED    has its table on disk
RETIRING  is removed when nobody reads it, writes to it, or copies from it
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Final

from pdserve.kv.tiers.disk.format import PAGE, RecordEntry, record_bytes, table_bytes
from pdserve.kv.tiers.disk.records import RecordPlace

if TYPE_CHECKING:
    from pdserve.ids import Bytes, Seconds

__all__ = ["KEPT_SHARE", "FoundSegment", "Segment", "SegmentState", "records_that_fit"]

KEPT_SHARE: Final = 0.25
"""Largest part of an evicted segment whose records are written anew. It bounds what a byte costs:
1.33 bytes written for one stored."""

_MOST_USES: Final = 3
"""Uses of a record that are counted."""


class SegmentState(Enum):
    """What may happen to a segment."""

    OPEN = "open"
    FULL = "full"
    SEALED = "sealed"
    RETIRING = "retiring"


@dataclass(frozen=True, slots=True)
class FoundSegment:
    """A segment of an earlier life, as recovery found it."""

    number: int
    epoch: int
    first_seq: int
    size: Bytes
    end: Bytes
    sealed: bool
    entries: tuple[RecordEntry, ...]


@dataclass(slots=True, eq=False)
class Segment:
    """One segment. The index owns and changes it."""

    number: int
    epoch: int
    first_seq: int
    size: Bytes
    """Bytes that its file takes."""
    born: Seconds | None
    """When it was opened; None: in an earlier life."""
    state: SegmentState = SegmentState.OPEN
    end: Bytes = PAGE
    placed: int = 0
    """Records that places were reserved for."""
    entries: dict[int, RecordEntry] = field(default_factory=dict)
    """Valid records, by offset."""
    uses: dict[int, int] = field(default_factory=dict)
    """Uses since the record was written, or since the last second chance, by offset."""
    writing: int = 0
    """Batches under way to it."""
    claims: int = 0
    """Readers."""
    moving: int = 0
    """Copies under way from it."""
    busy: bool = False
    """A command that changes the file is under way."""
    erasing: list[RecordPlace] = field(default_factory=list)
    """Records whose payload must go."""
    faults: int = 0
    """Reads that failed."""

    def reserve(self, payload: Bytes, seq: int) -> RecordPlace | None:
        """The place for one more record; None if it does not fit."""
        if not records_that_fit(self.size, self.end, self.placed, payload):
            return None
        place = RecordPlace(self.number, self.epoch, self.end, payload, seq)
        self.end += record_bytes(payload)
        self.placed += 1
        return place

    def place(self, entry: RecordEntry) -> RecordPlace:
        """The place of one of its records."""
        return RecordPlace(self.number, self.epoch, entry.offset, entry.payload_bytes, entry.seq)

    def use(self, offset: Bytes) -> None:
        """A record was used."""
        self.uses[offset] = min(_MOST_USES, self.uses.get(offset, 0) + 1)

    def forgive(self) -> None:
        """A second chance: uses count half."""
        self.uses = {offset: uses // 2 for offset, uses in self.uses.items() if uses > 1}

    @property
    def used_bytes(self) -> Bytes:
        """Bytes of the valid records that were used."""
        return sum(
            record_bytes(self.entries[offset].payload_bytes)
            for offset in self.uses
            if offset in self.entries
        )

    @property
    def worn(self) -> bool:
        """True if more of it was used than may be written anew."""
        return self.used_bytes > KEPT_SHARE * self.size

    @property
    def quiet(self) -> bool:
        """True if no thread touches the file."""
        return not (self.writing or self.claims or self.moving or self.busy)

    def best(self, pinned: set[int]) -> list[RecordEntry]:
        """The records to write anew, best first: pinned ones, then used ones, within the share."""
        worth = [e for at, e in self.entries.items() if at in pinned or self.uses.get(at)]
        worth.sort(key=lambda e: (e.offset in pinned, self.uses.get(e.offset, 0), e.seq))
        room = KEPT_SHARE * self.size
        kept: list[RecordEntry] = []
        for entry in reversed(worth):
            room -= record_bytes(entry.payload_bytes)
            if room < 0:
                break
            kept.append(entry)
        return kept


def records_that_fit(size: Bytes, end: Bytes, placed: int, payload: Bytes) -> int:
    """How many more records fit into a segment of this size, with their rows of the table."""
    low, high = 0, max(0, size - end) // record_bytes(payload)
    while low < high:
        middle = (low + high + 1) // 2
        if end + middle * record_bytes(payload) + table_bytes(placed + middle) <= size:
            low = middle
        else:
            high = middle - 1
    return low

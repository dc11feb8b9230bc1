"""Reads sealed segments that other workers wrote below the same directory.

On a file system that several machines share, a worker can serve blocks from the subdirectories of
others with its fingerprint. It only reads: it locks nothing and removes nothing. Their owners may
erase records and remove segments at any time; then a read fails, which is a miss.

`scan` and `read` block and are for threads. All else is for the thread that owns the reader.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from pdserve.kv.tiers.block import TierBlock
from pdserve.kv.tiers.disk.directory import SegmentName, read_description, subdirectories
from pdserve.kv.tiers.disk.file_system.file_ops import OsFileOps
from pdserve.kv.tiers.disk.files import read_error, read_record
from pdserve.kv.tiers.disk.records import RecordPlace
from pdserve.kv.tiers.disk.recovery import find_segment

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from pdserve.kv.tiers.disk.file_system.file_ops import FileOps
    from pdserve.kv.tiers.disk.fingerprint import Fingerprint
    from pdserve.kv.tiers.disk.format import RecordEntry
    from pdserve.kv.tiers.disk.segment import FoundSegment

__all__ = ["SealedReader", "SealedScan", "SharedPlace", "SharedSegment"]

_MOST_RECORDS: Final = 1 << 18
"""Most blocks of others that are known; each takes about 0.4 KB."""
_MOST_READ: Final = 8192
"""Blocks after which a scan reads no further table: their owner takes them in within some
milliseconds. The next scan reads others."""


class SharedSegment(NamedTuple):
    """A segment in another worker's subdirectory."""

    path: Path
    name: SegmentName


@dataclass(frozen=True, slots=True)
class SharedPlace:
    """Where a block is in another worker's subdirectory."""

    segment: SharedSegment
    entry: RecordEntry

    @property
    def record(self) -> RecordPlace:
        """Its place in the segment."""
        name, entry = self.segment.name, self.entry
        return RecordPlace(name.number, name.epoch, entry.offset, entry.payload_bytes, entry.seq)

    @property
    def block(self) -> TierBlock:
        """What is known of the block."""
        entry = self.entry
        root = entry.root if any(entry.root) else b""
        return TierBlock(entry.key, entry.parent, entry.turns, entry.tokens, root=root)


@dataclass(frozen=True, slots=True)
class SealedScan:
    """What a look at the other subdirectories found."""

    present: frozenset[SharedSegment]
    added: tuple[tuple[SharedSegment, FoundSegment], ...]
    more: bool = False
    """Whether tables were left for the next scan."""


class SealedReader:
    """The blocks in sealed segments of other workers."""

    def __init__(
        self,
        root: Path,
        fingerprint: Fingerprint,
        own: Path,
        *,
        ops: FileOps | None = None,
        most: int = _MOST_RECORDS,
    ) -> None:
        """`own`: this worker's subdirectory, which is left out. `most`: blocks that are known at
        most; further segments are left out."""
        self._root = root
        self._fingerprint = fingerprint
        self._own = own
        self._ops = OsFileOps() if ops is None else ops
        self._most = most
        self._where: dict[bytes, SharedPlace] = {}
        self._segments: dict[SharedSegment, list[bytes]] = {}
        self._partial: set[SharedSegment] = set()
        """Segments of which some blocks are known from another one."""

    def __contains__(self, hash: object) -> bool:
        return hash in self._where

    def __len__(self) -> int:
        return len(self._where)

    def place(self, hash: bytes) -> SharedPlace | None:
        """Where a block is; None if no other worker has it sealed, as of the last scan."""
        return self._where.get(hash)

    def known(self) -> frozenset[SharedSegment]:
        """The segments that need not be read again: an argument of the next `scan`."""
        return frozenset(self._segments)

    @property
    def room(self) -> int:
        """Further blocks that may be known: an argument of the next `scan`."""
        return max(0, self._most - len(self._where))

    def apply(self, scan: SealedScan) -> None:
        """Take in what a scan found, and forget what it did not find."""
        gone = self._segments.keys() - scan.present
        # What was left out as known from a segment that is gone is found by the next scan.
        for segment in gone | (self._partial if gone else set()):
            self._forget(segment)
        for segment, found in scan.added:
            if segment not in self._segments and self.room:
                self._add(segment, found)

    def blocks(self) -> Iterator[TierBlock]:
        """Every block that is known. O(all)."""
        return (place.block for place in self._where.values())

    def failed(self, place: SharedPlace, hash: bytes, *, gone: bool = False) -> None:
        """A read failed: the block is not looked for there any more. `gone`: no block of the
        segment is."""
        if self._where.get(hash) == place:
            del self._where[hash]
        if gone and place.segment in self._segments:
            self._forget(place.segment)

    def drop(self, unwanted: Callable[[bytes], bool]) -> None:
        """Forget blocks, by an operator's order. Their files are for their owners to change."""
        for name in [name for name in self._where if unwanted(name)]:
            del self._where[name]
        # A segment that is read again would bring them back, also one that has a second copy.
        self._partial.clear()

    # ------------------------------------------------------------------ for threads

    def scan(self, known: frozenset[SharedSegment], room: int) -> SealedScan:
        """Look for segments, and read the tables of those that are not in `known`, for about `room`
        further blocks."""
        present: set[SharedSegment] = set()
        added: list[tuple[SharedSegment, FoundSegment]] = []
        left, more = min(room, _MOST_READ), False
        for segment, directory in self._all():
            if segment in known:
                present.add(segment)
            elif left <= 0:
                more = True
            elif (found := self._sealed(segment, directory)) is not None:
                present.add(segment)
                added.append((segment, found))
                left -= max(1, len(found.entries))
        return SealedScan(frozenset(present), tuple(added), more and room > _MOST_READ)

    def read(self, place: SharedPlace, hash: bytes, into: memoryview) -> None:
        """Read a payload. Errors: `TierReadError`."""
        try:
            fd = self._ops.open(place.segment.path / str(place.segment.name))
            try:
                identity = self._fingerprint.id
                read_record(self._ops, fd, place.record, hash, identity, into)
            finally:
                self._ops.close(fd)
        except OSError as error:
            raise read_error(error, place.record) from error

    # ------------------------------------------------------------------ inside

    def _others(self) -> Iterator[tuple[Path, bytes]]:
        """Other subdirectories of the same fingerprint, with their ids."""
        for path in subdirectories(self._root):
            description = None if path == self._own else read_description(path)
            if description is not None and description.of == self._fingerprint:
                yield path, bytes.fromhex(description.directory)

    def _all(self) -> Iterator[tuple[SharedSegment, bytes]]:
        """Their segments, each with its subdirectory's id."""
        for path, directory in self._others():
            for segment in self._segments_of(path):
                yield segment, directory

    def _segments_of(self, path: Path) -> list[SharedSegment]:
        try:
            names = self._ops.names(path)
        except OSError:
            return []
        return [SharedSegment(path, name) for name in map(SegmentName.parse, names) if name]

    def _sealed(self, segment: SharedSegment, directory: bytes) -> FoundSegment | None:
        """The segment if it is sealed; None: not, or it vanished."""
        with suppress(OSError):
            path, name = segment
            return find_segment(
                self._ops, path, name, directory, self._fingerprint, sealed_only=True
            )
        return None

    def _add(self, segment: SharedSegment, found: FoundSegment) -> None:
        names = []
        for entry in found.entries:
            if entry.key not in self._where:
                self._where[entry.key] = SharedPlace(segment, entry)
                names.append(entry.key)
        self._segments[segment] = names
        if len(names) < len(found.entries):
            self._partial.add(segment)

    def _forget(self, segment: SharedSegment) -> None:
        self._partial.discard(segment)
        for name in self._segments.pop(segment):
            place = self._where.get(name)
            if place is not None and place.segment == segment:
                del self._where[name]

"""Finds the complete records of segments that an earlier life, or another worker, has written.

A sealed segment has a table of its records. Without one, or if its checksum is wrong, the headers
are read one after the other. Payloads are checked when they are read, not here.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from pdserve.kv.tiers.disk.directory import SegmentName
from pdserve.kv.tiers.disk.format import (
    ENTRY_BYTES,
    PAGE,
    RecordEntry,
    RecordHeader,
    Superblock,
    Trailer,
    record_bytes,
    unpack_entries,
)
from pdserve.kv.tiers.disk.segment import FoundSegment

if TYPE_CHECKING:
    from pathlib import Path

    from pdserve.ids import Bytes
    from pdserve.kv.tiers.disk.file_system.file_ops import FileOps
    from pdserve.kv.tiers.disk.fingerprint import Fingerprint

__all__ = ["find_segment", "find_segments"]


def find_segments(
    ops: FileOps, path: Path, directory: bytes, fingerprint: Fingerprint
) -> tuple[list[FoundSegment], list[SegmentName]]:
    """The segments of an own directory, and the files that are none and may go.

    Of two with one number, the earlier one was removed, and power failed before that was durable.
    """
    found: dict[int, FoundSegment] = {}
    bad: list[SegmentName] = []
    for name in sorted(n for n in map(SegmentName.parse, ops.names(path)) if n is not None):
        segment = None
        with suppress(OSError):
            segment = find_segment(ops, path, name, directory, fingerprint)
        if segment is None:
            bad.append(name)
            continue
        if segment.number in found:
            bad.append(SegmentName(found[segment.number].epoch, segment.number))
        found[segment.number] = segment
    return list(found.values()), bad


def find_segment(
    ops: FileOps,
    path: Path,
    name: SegmentName,
    directory: bytes,
    fingerprint: Fingerprint,
    *,
    sealed_only: bool = False,
) -> FoundSegment | None:
    """One segment; None if it is none of this directory and fingerprint, or, with `sealed_only`,
    not sealed. Errors: OSError."""
    fd = ops.open(path / str(name))
    try:
        size = ops.size(fd)
        block = Superblock.unpack(_read(ops, fd, 0, PAGE))
        if block is None or (block.epoch, block.segment) != name:
            return None
        if (block.directory, block.fingerprint) != (directory, fingerprint.packed()):
            return None
        sealed = _sealed(ops, fd, size, block)
        if sealed is not None or sealed_only:
            return sealed
        return _walked(ops, fd, size, block, fingerprint)
    finally:
        ops.close(fd)


def _sealed(ops: FileOps, fd: int, size: Bytes, block: Superblock) -> FoundSegment | None:
    """The segment by its table; None if it has none that is whole."""
    if size < 2 * PAGE:
        return None
    trailer = Trailer.unpack(_read(ops, fd, size - PAGE, PAGE))
    if trailer is None or _life(trailer) != _life(block):
        return None
    length = trailer.records * ENTRY_BYTES
    if trailer.table_offset + length > size - PAGE:
        return None
    table = _read(ops, fd, trailer.table_offset, length)
    if not trailer.fits(table):
        return None
    entries = tuple(unpack_entries(table, trailer.first_seq))
    end = trailer.table_offset
    return FoundSegment(block.segment, block.epoch, trailer.first_seq, size, end, True, entries)


def _walked(
    ops: FileOps, fd: int, size: Bytes, block: Superblock, fingerprint: Fingerprint
) -> FoundSegment:
    """The segment by its headers. Where there is none, the next one is looked for behind a record
    of full length: of batches that were under way together, a later one may be whole."""
    entries: list[RecordEntry] = []
    step = record_bytes(fingerprint.block_bytes)
    at = end = PAGE
    while at + PAGE <= size:
        header = RecordHeader.unpack(_read(ops, fd, at, PAGE))
        if header is None or not _belongs(header, block, at, size, fingerprint):
            at += step
            continue
        entries.append(_entry(header))
        at += record_bytes(header.payload_bytes)
        end = at
    first = min((entry.seq for entry in entries), default=0)
    return FoundSegment(block.segment, block.epoch, first, size, end, False, tuple(entries))


def _belongs(
    header: RecordHeader, block: Superblock, at: Bytes, size: Bytes, fingerprint: Fingerprint
) -> bool:
    """True if the header was written to this place of this segment, in the segment's own life."""
    return (
        (header.segment, header.epoch) == (block.segment, block.epoch)
        and header.offset == at
        and header.fingerprint == fingerprint.id
        and at + record_bytes(header.payload_bytes) <= size
    )


def _entry(header: RecordHeader) -> RecordEntry:
    return RecordEntry(
        header.key,
        header.parent,
        header.root,
        header.offset,
        header.payload_bytes,
        header.tokens,
        header.seq,
        header.turns,
    )


def _life(part: Superblock | Trailer) -> tuple[int, int]:
    return part.segment, part.epoch


def _read(ops: FileOps, fd: int, offset: Bytes, size: Bytes) -> bytes:
    buffer = bytearray(size)
    return bytes(buffer[: ops.read(fd, offset, [buffer])])

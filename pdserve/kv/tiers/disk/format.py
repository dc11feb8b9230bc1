"""Packs and checks what a segment file consists of, version 1. Pure: bytes in, records out.

    0        superblock   which segment of which directory this is, and the fingerprint
    4 KiB    records      header (one page) and payload, padded to whole pages
    ...      table        one entry per record, written when the segment is sealed
    last     trailer      one page: where the table is, and its checksum

Every part has a checksum, the segment's number and its *epoch* (one opening of the directory). No
two segments of a directory share both, so bytes that another file left on the disk never count as
part of this one. A header has its own offset, too, and the payload's checksum.

All numbers are little-endian. Checksums are CRC-32, as `zlib.crc32` computes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from struct import Struct
from typing import TYPE_CHECKING, Final

from pdserve.transfer.copying import crc32

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pdserve.ids import Bytes

__all__ = [
    "ENTRY_BYTES",
    "PAGE",
    "RecordEntry",
    "RecordHeader",
    "Superblock",
    "Trailer",
    "pack_entries",
    "record_bytes",
    "table_bytes",
    "unpack_entries",
]

PAGE: Final[Bytes] = 4096
"""Alignment of everything in a segment: devices do not tear less than this in two."""
VERSION: Final = 1
DTYPE_BYTES: Final = 16
SCALES_BYTES: Final = 32

_CRC: Final = Struct("<I")
_SUPERBLOCK: Final = Struct("<8sHxxI16sQQQ")
_HEADER: Final = Struct("<8sHHHHHHQQQQ16s16s16s16sIII16s32s")
_ENTRY: Final = Struct("<16s16s16sIIIIHH")
_TRAILER: Final = Struct("<8sHxxIQQQQQI")
_SUPERBLOCK_MAGIC: Final = b"PDKVSEG1"
_HEADER_MAGIC: Final = b"PDKVREC1"
_TRAILER_MAGIC: Final = b"PDKVEND1"

ENTRY_BYTES: Final[Bytes] = _ENTRY.size


def pages(size: Bytes) -> Bytes:
    """`size`, rounded up to whole pages."""
    return -(-size // PAGE) * PAGE


def record_bytes(payload: Bytes) -> Bytes:
    """Bytes that a record with this payload takes in a segment."""
    return PAGE + pages(payload)


def table_bytes(records: int) -> Bytes:
    """Bytes that table and trailer of so many records take at a segment's end."""
    return pages(records * ENTRY_BYTES) + PAGE


@dataclass(frozen=True, slots=True)
class Superblock:
    """The first page of a segment."""

    directory: bytes
    """The directory's random id, 16 bytes."""
    segment: int
    epoch: int
    size: Bytes
    fingerprint: bytes
    """`Fingerprint.packed` of all its records."""

    def pack(self) -> bytes:
        body = _SUPERBLOCK.pack(
            _SUPERBLOCK_MAGIC,
            VERSION,
            len(self.fingerprint),
            self.directory,
            self.segment,
            self.epoch,
            self.size,
        )
        return _page(body + self.fingerprint)

    @staticmethod
    def unpack(page: bytes) -> Superblock | None:
        """The superblock in a page; None if it is none."""
        if len(page) < _SUPERBLOCK.size:
            return None
        magic, version, length, *fields = _SUPERBLOCK.unpack_from(page)
        end = _SUPERBLOCK.size + length
        if magic != _SUPERBLOCK_MAGIC or version != VERSION or not _checked(page, end):
            return None
        directory, segment, epoch, size = fields
        fingerprint = bytes(page[_SUPERBLOCK.size : end])
        return Superblock(directory, segment, epoch, size, fingerprint)


@dataclass(frozen=True, slots=True)
class RecordHeader:
    """The page before a payload. It says all that a reader must know of it."""

    seq: int
    """Grows with every record of the directory."""
    epoch: int
    segment: int
    offset: Bytes
    """Where in the segment this header is."""
    fingerprint: bytes
    key: bytes
    """The block's hash."""
    parent: bytes
    root: bytes
    """The chain's root hash, which names the tenant; zeros: not known."""
    tokens: int
    turns: int
    rank: int
    ranks: int
    group: int
    dtype: str
    scales: str
    payload_bytes: Bytes
    payload_crc: int

    def pack(self) -> bytes:
        """The header's page. Errors: ValueError for a name that does not fit."""
        body = _HEADER.pack(
            _HEADER_MAGIC,
            VERSION,
            min(self.turns, 0xFFFF),
            self.rank,
            self.ranks,
            self.group,
            0,
            self.seq,
            self.epoch,
            self.segment,
            self.offset,
            self.fingerprint,
            self.key,
            self.parent,
            self.root,
            self.tokens,
            self.payload_bytes,
            self.payload_crc,
            _ascii(self.dtype, DTYPE_BYTES),
            _ascii(self.scales, SCALES_BYTES),
        )
        return _page(body)

    @staticmethod
    def unpack(page: bytes | bytearray | memoryview) -> RecordHeader | None:
        """The header in a page; None if it is none, or a torn one."""
        if len(page) < _HEADER.size or bytes(page[:8]) != _HEADER_MAGIC:
            return None
        if not _checked(page, _HEADER.size):
            return None
        (_, version, turns, rank, ranks, group, _, *middle, dtype, scales) = _HEADER.unpack_from(
            page
        )
        if version != VERSION:
            return None
        seq, epoch, segment, offset, fingerprint, key, parent, root, tokens, length, crc = middle
        return RecordHeader(
            seq,
            epoch,
            segment,
            offset,
            fingerprint,
            key,
            parent,
            root,
            tokens,
            turns,
            rank,
            ranks,
            group,
            _text(dtype),
            _text(scales),
            length,
            crc,
        )


@dataclass(frozen=True, slots=True)
class RecordEntry:
    """What the index knows of one record; also a row of a sealed segment's table."""

    key: bytes
    parent: bytes
    root: bytes
    offset: Bytes
    payload_bytes: Bytes
    tokens: int
    seq: int
    turns: int = 1


def pack_entries(entries: Iterable[RecordEntry], first_seq: int) -> bytes:
    """A table's bytes. Sequence numbers are stored relative to the segment's first."""
    return b"".join(
        _ENTRY.pack(
            entry.key,
            entry.parent,
            entry.root,
            entry.offset // PAGE,
            entry.payload_bytes,
            entry.tokens,
            entry.seq - first_seq,
            min(entry.turns, 0xFFFF),
            0,
        )
        for entry in entries
    )


def unpack_entries(table: bytes, first_seq: int) -> Iterator[RecordEntry]:
    """The rows of a table. Names that several rows have are one object: a tier can have millions of
    rows."""
    names: dict[bytes, bytes] = {}
    for key, parent, root, page, payload, tokens, seq, turns, _ in _ENTRY.iter_unpack(table):
        yield RecordEntry(
            names.setdefault(key, key),
            names.setdefault(parent, parent),
            names.setdefault(root, root),
            page * PAGE,
            payload,
            tokens,
            seq + first_seq,
            turns,
        )


@dataclass(frozen=True, slots=True)
class Trailer:
    """The last page of a sealed segment."""

    segment: int
    epoch: int
    first_seq: int
    """What the table's sequence numbers are relative to."""
    records: int
    table_offset: Bytes
    table_crc: int

    def pack(self) -> bytes:
        body = _TRAILER.pack(
            _TRAILER_MAGIC,
            VERSION,
            0,
            self.segment,
            self.epoch,
            self.first_seq,
            self.records,
            self.table_offset,
            self.table_crc,
        )
        return _page(body)

    @staticmethod
    def unpack(page: bytes) -> Trailer | None:
        """The trailer in a page; None if it is none."""
        if len(page) < _TRAILER.size:
            return None
        magic, version, _, *fields = _TRAILER.unpack_from(page)
        if magic != _TRAILER_MAGIC or version != VERSION or not _checked(page, _TRAILER.size):
            return None
        return Trailer(*fields)

    def fits(self, table: bytes) -> bool:
        """True if these bytes are the table that was sealed."""
        return len(table) == self.records * ENTRY_BYTES and crc32(table) == self.table_crc


def _page(body: bytes) -> bytes:
    """A page of these bytes and their checksum. Errors: ValueError if they do not fit."""
    if len(body) + _CRC.size > PAGE:
        raise ValueError(f"{len(body)} bytes do not fit into a page")
    return (body + _CRC.pack(crc32(body))).ljust(PAGE, b"\0")


def _checked(page: bytes | bytearray | memoryview, end: int) -> bool:
    """True if the checksum at `end` is that of the bytes before it."""
    if end + _CRC.size > len(page):
        return False
    expected: int
    (expected,) = _CRC.unpack_from(page, end)
    return crc32(memoryview(page)[:end]) == expected


def _ascii(text: str, size: int) -> bytes:
    packed = text.encode("ascii")
    if len(packed) > size:
        raise ValueError(f"{text!r} is longer than {size} characters")
    return packed


def _text(packed: bytes) -> str:
    return packed.rstrip(b"\0").decode("ascii", "replace")

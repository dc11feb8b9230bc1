"""The disk tier's format, version 1: bytes that must not change, and bytes that are refused."""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256

import pytest

from pdserve.kv.tiers.disk.format import (
    ENTRY_BYTES,
    PAGE,
    RecordEntry,
    RecordHeader,
    Superblock,
    Trailer,
    pack_entries,
    record_bytes,
    table_bytes,
    unpack_entries,
)
from pdserve.transfer.copying import crc32

SUPERBLOCK = Superblock(b"d" * 16, 42, 3, 1 << 30, b'{"content":"m"}')
HEADER = RecordHeader(
    seq=7,
    epoch=3,
    segment=42,
    offset=8 * PAGE,
    fingerprint=b"f" * 16,
    key=b"k" * 16,
    parent=b"p" * 16,
    root=b"r" * 16,
    tokens=512,
    turns=2,
    rank=1,
    ranks=2,
    group=3,
    dtype="float8_e4m3fn",
    scales="per-head float32",
    payload_bytes=123_456,
    payload_crc=0xDEADBEEF,
)
ENTRY = RecordEntry(b"k" * 16, b"p" * 16, b"r" * 16, 8 * PAGE, 123_456, 512, 107, 2)
TRAILER = Trailer(42, 3, 100, 1, 9 * PAGE, crc32(pack_entries([ENTRY], 100)))
GOLDEN = ["85023a2865b501ff", "35957e1f4a7cabf2", "d23759b37b43402a", "58a4168d280f3b9e"]
"""Digests of the parts above."""
PAGES = {
    "superblock": (SUPERBLOCK, Superblock),
    "header": (HEADER, RecordHeader),
    "trailer": (TRAILER, Trailer),
}


@pytest.mark.parametrize(("part", "kind"), PAGES.values(), ids=PAGES)
def test_a_part_is_one_page_and_comes_back(part, kind):
    page = part.pack()
    assert len(page) == PAGE
    assert kind.unpack(page) == part


@pytest.mark.parametrize(("part", "kind"), PAGES.values(), ids=PAGES)
def test_every_flipped_bit_of_a_part_is_noticed(part, kind):
    page = bytearray(part.pack())
    used = len(bytes(page).rstrip(b"\0"))
    for bit in range(8 * used):
        page[bit // 8] ^= 1 << bit % 8
        assert kind.unpack(bytes(page)) is None
        page[bit // 8] ^= 1 << bit % 8


@pytest.mark.parametrize(("part", "kind"), PAGES.values(), ids=PAGES)
@pytest.mark.parametrize("content", [b"", b"\0" * PAGE, b"\xff" * PAGE, b"PDKVREC1"])
def test_other_bytes_are_no_part(part, kind, content: bytes):
    assert kind.unpack(content) is None


def test_the_bytes_of_version_1_do_not_change():
    """A tier outlives an upgrade: another layout needs another version."""
    parts = [SUPERBLOCK.pack(), HEADER.pack(), pack_entries([ENTRY], 100), TRAILER.pack()]
    assert [sha256(part).hexdigest()[:16] for part in parts] == GOLDEN


def test_a_table_comes_back():
    entries = [ENTRY, replace(ENTRY, key=b"x" * 16, seq=100, turns=70_000)]
    table = pack_entries(entries, 100)
    assert len(table) == 2 * ENTRY_BYTES
    first, second = unpack_entries(table, 100)
    assert first == ENTRY
    assert (second.seq, second.turns) == (100, 0xFFFF)
    assert TRAILER.fits(pack_entries([ENTRY], 100))
    assert not TRAILER.fits(table)
    assert not TRAILER.fits(bytes(ENTRY_BYTES))


def test_sizes_are_whole_pages():
    assert record_bytes(1) == record_bytes(PAGE) == 2 * PAGE
    assert record_bytes(PAGE + 1) == 3 * PAGE
    assert table_bytes(1) == table_bytes(PAGE // ENTRY_BYTES) == 2 * PAGE
    assert table_bytes(PAGE // ENTRY_BYTES + 1) == 3 * PAGE

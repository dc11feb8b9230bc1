"""The segments of a directory: places, room, commands."""

from __future__ import annotations

import errno as codes

import pytest

from pdserve.kv.tiers.block import TierBlock
from pdserve.kv.tiers.disk.format import RecordEntry
from pdserve.kv.tiers.disk.records import (
    EraseRecords,
    NewRecord,
    RecordPlace,
    RemoveDirectory,
    SealSegment,
    UnlinkSegment,
    WriteBatch,
)
from pdserve.kv.tiers.disk.segment import SegmentState
from pdserve.kv.tiers.disk.segment_log import SegmentLog
from tests.support.disk_tiers import PAYLOAD, name, segment_of

SIZE = segment_of(4)


def log(segments: int = 4, leftovers: int = 0) -> SegmentLog:
    return SegmentLog(
        segments * SIZE,
        SIZE,
        epoch=3,
        next_segment=7,
        leftovers=[(f"tier-{number}", SIZE) for number in range(leftovers)],
    )


def put(log: SegmentLog, number: int) -> RecordPlace:
    """Write one record."""
    place = log.reserve(PAYLOAD, 1.0)
    entry = RecordEntry(name(number), b"p" * 16, bytes(16), place.offset, PAYLOAD, 1, place.seq)
    log[place.segment].entries[place.offset] = entry
    return place


def test_places_go_from_one_segment_to_the_next():
    segments = log()
    places = [put(segments, number) for number in range(5)]
    assert [place.segment for place in places] == [7, 7, 7, 7, 8]
    assert [place.seq for place in places] == [1, 2, 3, 4, 5]
    assert {place.epoch for place in places} == {3}
    assert segments[7].state is SegmentState.FULL
    assert segments.allocated == 2 * SIZE
    segments.check([])


def test_what_is_missing_is_counted_in_segments():
    segments = log(4)
    assert segments.missing(12, PAYLOAD) == 0
    for number in range(14):
        put(segments, number)
    assert segments.missing(2, PAYLOAD) == 0
    assert segments.missing(3, PAYLOAD) == 1
    assert segments.missing(7, PAYLOAD) == 2
    with pytest.raises(ValueError, match="never fit"):
        segments.missing(16, PAYLOAD)


def test_a_full_segment_is_sealed_when_its_writers_are_done():
    segments = log()
    batch = WriteBatch(0, (NewRecord(TierBlock(name(0), b""), put(segments, 0)),))
    segments.begin(batch)
    segments.fill_up_open()
    assert segments.commands(0.0) == []
    assert not segments.idle
    segments.end(batch)
    (seal,) = segments.commands(0.0)
    assert isinstance(seal, SealSegment)
    assert segments.sealed(seal, 0, 0.0) is None
    assert segments[7].state is SegmentState.SEALED
    assert segments.allocated == segments[7].size == segment_of(1)
    assert segments.idle


def test_a_seal_or_an_erasure_that_failed_costs_the_segment():
    segments = log()
    place = put(segments, 0)
    put(segments, 1)
    segments.fill_up_open()
    (seal,) = segments.commands(0.0)
    assert isinstance(seal, SealSegment)
    assert segments.sealed(seal, codes.EIO, 0.0) is segments[7]
    (again,) = segments.commands(0.0)
    assert segments.sealed(seal, 0, 0.0) is None
    assert again == seal
    del segments[7].entries[place.offset]
    segments.erase(place)
    (erase,) = segments.commands(0.0)
    assert isinstance(erase, EraseRecords)
    assert segments.erased(erase, codes.EROFS, 0.0) is None
    assert segments.commands(29.0) == []
    assert segments.commands(30.0) == [erase]
    assert segments.erased(erase, codes.EIO, 30.0) is segments[7]


def test_where_nothing_can_be_written_a_segment_is_sealed_later():
    segments = log()
    put(segments, 0)
    segments.fill_up_open()
    (seal,) = segments.commands(0.0)
    assert isinstance(seal, SealSegment)
    assert segments.sealed(seal, codes.EROFS, 5.0) is None
    assert segments.commands(34.0) == []
    assert segments.commands(35.0) == [seal]


def test_a_segment_without_blocks_is_removed():
    segments = log()
    place = put(segments, 0)
    segments.fill_up_open()
    segments.claim(place)
    segments[7].entries.clear()
    segments.attend(segments[7])
    assert segments.commands(0.0) == []
    segments.release(place)
    (unlink,) = segments.commands(0.0)
    assert unlink == UnlinkSegment(7, 3)
    segments.unlinked(unlink, codes.EIO, 5.0)
    assert segments.commands(34.0) == []
    assert segments.commands(35.0) == [unlink]
    segments.unlinked(unlink, 0, 35.0)
    assert len(segments) == segments.allocated == 0


def test_leftovers_count_until_they_are_gone():
    segments = log(4, leftovers=2)
    assert segments.allocated == 2 * SIZE
    assert not segments.short_of(2)
    assert segments.short_of(3)
    assert segments.remove_leftover()
    assert not segments.short_of(3)
    assert segments.commands(0.0) == [RemoveDirectory("tier-0")]
    assert segments.allocated == 2 * SIZE
    segments.leftover_removed("tier-0")
    assert segments.allocated == SIZE
    assert segments.remove_leftover()
    assert not segments.remove_leftover()


def test_only_sealed_segments_are_victims():
    segments = log(6)
    for number in range(9):
        put(segments, number)
    assert segments.victim() is None
    for command in segments.commands(0.0):
        assert isinstance(command, SealSegment)
        segments.sealed(command, 0, 0.0)
    first, second = segments[7], segments[8]
    for offset in list(first.entries)[:2]:
        first.use(offset)
    assert segments.victim() is second
    assert segments.victim() is first  # its second chance is over

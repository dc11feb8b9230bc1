"""The twin without files refuses what the files refuse."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdserve.kv.tiers.disk.index import DiskIndex
from pdserve.kv.tiers.disk.memory_segments import MemorySegments
from pdserve.kv.tiers.disk.records import (
    EraseRecords,
    MoveRecords,
    TierReadError,
    TierWriteError,
    UnlinkSegment,
)
from tests.support.disk_tiers import PAYLOAD, chain, name, payload_of, segment_of


def test_it_serves_what_is_at_a_place_and_nothing_else():
    store = MemorySegments()
    index = DiskIndex(4 * segment_of(4), segment_of(4))
    batch = index.append(chain(0, 2), PAYLOAD, 0.0)
    assert batch is not None
    store.write(batch, [memoryview(payload_of(r.block.hash)) for r in batch.records])
    first, second = (record.place for record in batch.records)
    into = memoryview(bytearray(PAYLOAD))
    store.read(first, name(0, 0), into)
    assert bytes(into) == payload_of(name(0, 0))
    with pytest.raises(TierReadError, match="another record"):
        store.read(second, name(0, 0), into)
    with pytest.raises(TierReadError, match="no record"):
        store.read(replace(first, seq=99), name(0, 0), into)
    store.run(EraseRecords(0, 1, (first,), None))
    with pytest.raises(TierReadError, match="no record"):
        store.read(first, name(0, 0), into)
    with pytest.raises(TierWriteError):
        store.run(MoveRecords(batch, (first, second)))
    store.run(UnlinkSegment(0, 1))
    with pytest.raises(TierReadError, match="no record"):
        store.read(second, name(0, 1), into)


def test_names_suffice_for_a_simulation():
    store = MemorySegments()
    index = DiskIndex(4 * segment_of(4), segment_of(4))
    batch = index.append(chain(0, 2), PAYLOAD, 0.0)
    assert batch is not None
    store.write(batch)
    store.read(batch.records[1].place, name(0, 1))
    store.close()

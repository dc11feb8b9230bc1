"""One segment: what fits, what was used, what is worth keeping."""

from __future__ import annotations

import pytest

from pdserve.kv.tiers.disk.format import PAGE, RecordEntry, record_bytes, table_bytes
from pdserve.kv.tiers.disk.segment import Segment, records_that_fit
from tests.support.disk_tiers import PAYLOAD, name, segment_of


def segment(records: int = 16) -> Segment:
    """A full segment."""
    full = Segment(1, 1, 1, segment_of(records), 0.0)
    for at in range(records):
        place = full.reserve(PAYLOAD, at + 1)
        assert place is not None
        full.entries[place.offset] = RecordEntry(
            name(at), b"p" * 16, bytes(16), place.offset, PAYLOAD, 16, place.seq
        )
    return full


@pytest.mark.parametrize("payload", [1, PAYLOAD, 70_000])
@pytest.mark.parametrize("size", [3 * PAGE, 100 * PAGE, 1000 * PAGE + 17])
def test_as_many_records_fit_as_their_table_leaves_room_for(payload: int, size: int):
    count = records_that_fit(size, PAGE, 0, payload)
    for more, fits in ((0, True), (1, False)):
        end = PAGE + (count + more) * record_bytes(payload) + table_bytes(count + more)
        assert (end <= size) is fits or count == 0
    partly = min(5, count)
    end = PAGE + partly * record_bytes(payload)
    assert records_that_fit(size, end, partly, payload) == count - partly


def test_places_lie_side_by_side_until_it_is_full():
    full = segment(4)
    assert sorted(full.entries) == [PAGE + at * record_bytes(PAYLOAD) for at in range(4)]
    assert full.reserve(PAYLOAD, 99) is None


def test_much_use_is_more_than_a_quarter():
    full = segment()
    for at in sorted(full.entries)[:4]:
        full.use(at)
        full.use(at)
    assert not full.worn
    full.use(max(full.entries))
    assert full.worn
    full.forgive()
    assert not full.worn
    assert set(full.uses.values()) == {1}


def test_the_best_are_pinned_then_used_most_then_youngest():
    full = segment()
    places = sorted(full.entries)
    for at, uses in ((0, 1), (1, 3), (2, 1), (3, 2), (4, 2)):
        for _ in range(uses):
            full.use(places[at])
    best = full.best({places[9]})
    assert [entry.key for entry in best] == [name(9), name(1), name(4), name(3)]
    assert full.best(set())[-1].key == name(2)


def test_it_is_quiet_only_without_any_thread():
    full = segment(2)
    assert full.quiet
    for field in ("writing", "claims", "moving", "busy"):
        setattr(full, field, 1)
        assert not full.quiet
        setattr(full, field, 0)

"""Blocks that other workers sealed, read from their subdirectories."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from pdserve.clock import ManualClock
from pdserve.kv.tiers.disk import sealed_reader
from pdserve.kv.tiers.disk.records import TierReadError
from pdserve.kv.tiers.disk.sealed_reader import SealedReader
from pdserve.kv.tiers.disk.tier import DiskTier
from tests.support.disk_tiers import (
    FINGERPRINT,
    PAYLOAD,
    Machine,
    chain,
    name,
    payload_of,
    segment_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pdserve.kv.tiers.disk.fingerprint import Fingerprint


class Owner:
    """Another worker with an open tier."""

    def __init__(self, root: Path, owner: str, fingerprint: Fingerprint = FINGERPRINT) -> None:
        self.tier = DiskTier.open(
            root,
            10 * segment_of(4),
            fingerprint,
            clock=ManualClock(),
            owner=owner,
            segment_bytes=segment_of(4),
        )
        self.machine = Machine(self.tier.index, self.tier.files)
        assert self.tier.path is not None
        self.path = self.tier.path


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[Owner]:
    owner = Owner(tmp_path, "a")
    yield owner
    owner.tier.close()


def reader(root: Path, own: str = "own", most: int = 100) -> SealedReader:
    return SealedReader(root, FINGERPRINT, root / own, most=most)


def look(reader: SealedReader) -> None:
    reader.apply(reader.scan(reader.known(), reader.room))


def read(reader: SealedReader, hash: bytes) -> bytes:
    place = reader.place(hash)
    assert place is not None
    into = bytearray(PAYLOAD)
    reader.read(place, hash, memoryview(into))
    return bytes(into)


def test_sealed_segments_of_a_living_owner_are_served(tmp_path: Path, owner: Owner):
    owner.machine.store_all(chain(0, 4))
    owner.machine.store_all(chain(1, 2))
    shared = reader(tmp_path)
    look(shared)
    assert len(shared) == 4  # the open segment is not for others
    assert read(shared, name(0, 2)) == payload_of(name(0, 2))
    assert name(1, 0) not in shared
    owner.machine.store_all(chain(2, 3))
    look(shared)
    assert read(shared, name(1, 0)) == payload_of(name(1, 0))


def test_its_own_subdirectory_is_left_out(tmp_path: Path, owner: Owner):
    owner.machine.store_all(chain(0, 5))
    shared = reader(tmp_path, owner.path.name)
    look(shared)
    assert len(shared) == 0


def test_other_fingerprints_are_left_out(tmp_path: Path):
    other = Owner(tmp_path, "a", replace(FINGERPRINT, rank=1, ranks=2))
    other.machine.store_all(chain(0, 5))
    shared = reader(tmp_path)
    look(shared)
    assert len(shared) == 0
    other.tier.close()


def test_what_vanishes_is_a_miss(tmp_path: Path, owner: Owner):
    owner.machine.store_all(chain(0, 5))
    shared = reader(tmp_path)
    look(shared)
    place = shared.place(name(0, 1))
    assert place is not None
    owner.machine.index.clear()
    owner.machine.known = set()
    owner.machine.index.drain_events()
    owner.machine.settle()
    with pytest.raises(TierReadError) as error:
        read(shared, name(0, 1))
    assert error.value.reason == "absent"
    shared.failed(place, name(0, 1))
    assert name(0, 1) not in shared
    assert name(0, 2) in shared
    look(shared)
    assert len(shared) == 0


def test_what_the_owner_erases_is_a_miss(tmp_path: Path, owner: Owner):
    owner.machine.store_all(chain(0, 5))
    shared = reader(tmp_path)
    look(shared)
    owner.machine.index.drop(name(0, 1), erase=True)
    owner.machine.settle()
    with pytest.raises(TierReadError) as error:
        read(shared, name(0, 1))
    assert error.value.reason == "format"
    assert read(shared, name(0, 0)) == payload_of(name(0, 0))


def test_a_whole_subdirectory_may_vanish(tmp_path: Path):
    owner = Owner(tmp_path, "a")
    owner.machine.store_all(chain(0, 5))
    shared = reader(tmp_path)
    look(shared)
    owner.tier.close()
    for file in owner.path.iterdir():
        file.unlink()
    owner.path.rmdir()
    with pytest.raises(TierReadError):
        read(shared, name(0, 1))
    look(shared)
    assert len(shared) == 0


def test_nothing_is_written_or_locked(tmp_path: Path, owner: Owner):
    owner.machine.store_all(chain(0, 5))
    before = {path: path.stat().st_mtime_ns for path in owner.path.iterdir()}
    shared = reader(tmp_path)
    look(shared)
    read(shared, name(0, 1))
    assert {path: path.stat().st_mtime_ns for path in owner.path.iterdir()} == before


def test_of_two_owners_the_one_that_is_left_serves(tmp_path: Path):
    first, second = Owner(tmp_path, "a"), Owner(tmp_path, "b")
    for owner in (first, second):
        owner.machine.store_all(chain(0, 5))
    shared = reader(tmp_path)
    look(shared)
    place = shared.place(name(0, 0))
    assert place is not None
    holder = first if place.segment.path == first.path else second
    holder.tier.index.clear()
    holder.machine.known = set()
    holder.tier.index.drain_events()
    holder.machine.settle()
    look(shared)
    assert name(0, 0) not in shared  # its twin is found by the next look
    look(shared)
    assert read(shared, name(0, 0)) == payload_of(name(0, 0))
    for owner in (first, second):
        owner.tier.close()


def test_the_number_of_known_blocks_is_bounded(tmp_path: Path, owner: Owner):
    for number in range(5):
        owner.machine.store_all(chain(number, 4))
    shared = reader(tmp_path, most=6)
    look(shared)
    assert len(shared) == 8  # whole segments


def test_a_dropped_block_does_not_come_back_from_another_copy(tmp_path: Path, owner: Owner):
    second, third = Owner(tmp_path, "b"), Owner(tmp_path, "c")
    for each in (owner, second):
        each.machine.store_all(chain(0, 5))
    third.machine.store_all(chain(1, 5))
    shared = reader(tmp_path)
    look(shared)
    shared.drop(lambda hash: hash == name(0, 1))
    for file in third.path.glob("seg-*"):
        file.unlink()
    for _ in range(3):
        look(shared)
    assert name(1, 0) not in shared
    assert name(0, 1) not in shared
    assert name(0, 2) in shared
    second.tier.close()
    third.tier.close()


def test_a_scan_reads_few_tables_and_says_that_there_are_more(
    tmp_path: Path, owner: Owner, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sealed_reader, "_MOST_READ", 8)
    for number in range(3):
        owner.machine.store_all(chain(number, 4))
    owner.machine.store_all(chain(9, 1))
    shared = reader(tmp_path)
    found = []
    for _ in range(4):
        scan = shared.scan(shared.known(), shared.room)
        shared.apply(scan)
        found.append((len(scan.added), scan.more))
    assert found == [(2, True), (1, False), (0, False), (0, False)]
    assert len(shared) == 12


def test_tables_are_not_read_for_nothing(tmp_path: Path, owner: Owner):
    for number in range(3):
        owner.machine.store_all(chain(number, 4))
    owner.machine.store_all(chain(9, 1))
    shared = reader(tmp_path, most=4)
    look(shared)
    assert (len(shared), shared.room) == (4, 0)
    scan = shared.scan(shared.known(), shared.room)
    assert (scan.added, scan.more) == ((), False)
    shared.apply(scan)
    assert len(shared) == 4

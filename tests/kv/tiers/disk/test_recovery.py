"""What a crash leaves: cut the power at every write, and serve whole records only."""

from __future__ import annotations

import errno as codes
from contextlib import suppress
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING

import pytest

from pdserve.kv.tiers.disk.directory import SegmentName
from pdserve.kv.tiers.disk.files import SegmentFiles
from pdserve.kv.tiers.disk.format import PAGE, record_bytes
from pdserve.kv.tiers.disk.records import SealSegment, TierReadError
from pdserve.kv.tiers.disk.recovery import find_segment, find_segments
from tests.support.disk_tiers import (
    DIRECTORY,
    FINGERPRINT,
    FOLDER,
    PAYLOAD,
    Machine,
    chain,
    name,
    payload_of,
)
from tests.support.faulty_disk import FaultyDisk, PowerCut

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet

FIRST = SegmentName(1, 0)


def fill(disk: FaultyDisk, blocks: int, *, settle: bool = True) -> Machine:
    """Write one chain; with `settle`, full segments get sealed."""
    machine = Machine.boot(disk)
    for block in chain(0, blocks):
        assert machine.append([block])
        machine.write(machine.batches[0])
        if settle:
            machine.settle()
    return machine


def test_a_sealed_segment_comes_back_by_its_table():
    disk = FaultyDisk()
    machine = fill(disk, 8)
    machine.index.seal_open()
    machine.settle()
    (found,), bad = find_segments(disk, FOLDER, DIRECTORY, FINGERPRINT)
    assert bad == []
    assert found.sealed
    assert [entry.key for entry in found.entries] == [name(0, at) for at in range(8)]
    again = Machine.boot(disk, 2)
    assert again.served() == {name(0, at) for at in range(8)}
    block = again.index.block(name(0, 2))
    assert block is not None
    assert (block.parent, block.root, block.tokens) == (name(0, 1), b"r" * 16, 48)


def test_an_open_segment_comes_back_by_its_headers_and_is_sealed():
    disk = FaultyDisk()
    fill(disk, 5)
    again = Machine.boot(disk, 2)
    assert again.served() == {name(0, at) for at in range(5)}
    again.settle()
    found = find_segment(disk, FOLDER, FIRST, DIRECTORY, FINGERPRINT, sealed_only=True)
    assert found is not None
    assert len(found.entries) == 5
    assert disk.allocated() == again.index.counts().allocated


def test_a_hole_of_a_batch_that_was_not_written_is_skipped():
    disk = FaultyDisk()
    machine = Machine.boot(disk)
    for block in chain(0, 4):
        assert machine.append([block])
    for batch in (machine.batches[3], machine.batches[0]):
        machine.write(batch)
    assert Machine.boot(disk, 2).served() == {name(0, 0), name(0, 3)}


@pytest.mark.parametrize("piece", ["trailer", "table"])
def test_without_a_whole_table_the_headers_count(piece: str):
    disk = FaultyDisk()
    machine = fill(disk, 5)
    machine.index.seal_open()
    machine.settle()
    (path,) = disk.paths()
    end = PAGE + 5 * record_bytes(PAYLOAD)
    disk.flip(path, end + (PAGE if piece == "trailer" else 40))
    (found,), _ = find_segments(disk, FOLDER, DIRECTORY, FINGERPRINT)
    assert not found.sealed
    assert Machine.boot(disk, 2).served() == {name(0, at) for at in range(5)}


@pytest.mark.parametrize("records", [0, 1, 3])
def test_a_truncated_file_keeps_its_first_records(records: int):
    disk = FaultyDisk()
    fill(disk, 5)
    (path,) = disk.paths()
    disk.shorten(path, PAGE + records * record_bytes(PAYLOAD) + PAGE + 100)
    assert Machine.boot(disk, 2).served() == {name(0, at) for at in range(records)}


def test_a_file_without_superblock_may_go():
    disk = FaultyDisk()
    fill(disk, 3)
    (path,) = disk.paths()
    disk.flip(path, 20)
    assert find_segments(disk, FOLDER, DIRECTORY, FINGERPRINT) == ([], [FIRST])
    # Its number is not used again: what is in it must never be taken for something new.
    again = Machine.boot(disk, 2)
    again.store_all(chain(1, 1))
    assert len(disk.paths()) == 2


@pytest.mark.parametrize(
    "other",
    [
        replace(FINGERPRINT, content="another model"),
        replace(FINGERPRINT, secret_id=b"secret-2"),
        replace(FINGERPRINT, layout="hnd"),
        replace(FINGERPRINT, dtype="float16"),
        replace(FINGERPRINT, rank=1, ranks=2),
        replace(FINGERPRINT, group=1),
        replace(FINGERPRINT, scales="token"),
        replace(FINGERPRINT, block_bytes=PAYLOAD + 1),
    ],
    ids=lambda fingerprint: str(fingerprint.id.hex()[:6]),
)
def test_no_other_fingerprint_finds_the_records(other):
    disk = FaultyDisk()
    machine = fill(disk, 3)
    assert find_segments(disk, FOLDER, DIRECTORY, other) == ([], [FIRST])
    # Not even with the right place in hand.
    place = machine.index.place(name(0, 1))
    assert place is not None
    files = SegmentFiles(FOLDER, other, directory=DIRECTORY, segment_bytes=1, ops=disk)
    with pytest.raises(TierReadError, match="another record"):
        files.read(place, name(0, 1), memoryview(bytearray(PAYLOAD)))
    files.close()


def test_another_directory_s_file_is_none_of_ours():
    disk = FaultyDisk()
    fill(disk, 3)
    assert find_segments(disk, FOLDER, bytes(16), FINGERPRINT) == ([], [FIRST])


def test_what_a_removed_file_left_on_the_medium_does_not_count():
    """The new file lies where the old one was: same number, same offsets, and a whole table."""
    disk = FaultyDisk()
    machine = fill(disk, 5)
    machine.index.seal_open()
    machine.settle()
    machine.index.clear()
    machine.settle()
    assert disk.paths() == []
    again = Machine.boot(disk, 2)
    for block in chain(1, 2):
        assert again.append([block])
    again.write(again.batches[0])
    disk.sync_directory(FOLDER)
    served = [Machine.boot(disk.after_cut(Random(seed)), 3).served() for seed in range(80)]
    assert set().union(*served) == {name(1, 0)}


def test_an_error_while_reading_a_segment_loses_that_segment():
    disk = FaultyDisk()
    fill(disk, 20)
    bad = disk.paths()[0]
    disk.fault = lambda operation, path: codes.EIO if (operation, path) == ("read", bad) else 0
    found, gone = find_segments(disk, FOLDER, DIRECTORY, FINGERPRINT)
    assert gone == [FIRST]
    assert [segment.number for segment in found] == [1, 2]


# ---------------------------------------------------------------- the power fails


def durable(machine: Machine) -> set[bytes]:
    """Blocks that must survive: valid ones in segments whose seal has returned."""
    sealed = {c.segment for c in machine.ended if isinstance(c, SealSegment)}
    places = {hash: machine.index.place(hash) for hash in machine.known}
    return {hash for hash, place in places.items() if place and place.segment in sealed}


def run_until_cut(seed: int, steps: int, cut_after: int | None) -> tuple[FaultyDisk, Machine]:
    """Random work on a fresh disk, until the power fails or the steps are done."""
    disk = FaultyDisk()
    machine = Machine.boot(disk, segments=4, records=4)
    disk.cut_after = cut_after
    with suppress(PowerCut):
        machine.work(Random(seed), steps, fresh=0)
    disk.cut_after = None
    return disk, machine


def check_crash(
    after: FaultyDisk, machine: Machine, epoch: int, torn: AbstractSet[bytes] = frozenset()
) -> None:
    """Open what a cut left, and check what is served. Nothing is evicted for lack of room."""
    again = Machine.boot(after, epoch, segments=50, records=4)
    assert durable(machine) - torn <= again.served()


@pytest.mark.timeout(600)
def test_the_power_fails_after_every_change(seed: int, long: bool):
    random = Random(seed)
    survived = 0
    for _ in range(40 if long else 1):
        work = random.getrandbits(32)
        disk, _ = run_until_cut(work, 120, None)
        for cut in range(1, disk.steps, 1 if long else max(1, disk.steps // 60)):
            crashed, machine = run_until_cut(work, 120, cut)
            check_crash(crashed.after_cut(random), machine, 2)
            survived += len(durable(machine))
    assert survived


def test_the_power_fails_again_and_again(seed: int, long: bool):
    """Each life works on what the one before it left."""
    random = Random(seed)
    for _ in range(60 if long else 3):
        disk, machine = run_until_cut(random.getrandbits(32), 80, random.randint(20, 200))
        fresh = 1000
        torn: set[bytes] = set()
        for epoch in range(2, 8):
            disk = disk.after_cut(random)
            check_crash(disk, machine, epoch, torn)
            machine = Machine.boot(disk, epoch, segments=4, records=4)
            torn = machine.known - machine.served()  # whole headers, but not whole payloads
            disk.cut_after = disk.steps + random.randint(1, 150)
            with suppress(PowerCut):
                machine.work(random, 80, fresh)
            fresh += 100
            disk.cut_after = None


def test_erased_blocks_do_not_come_back(seed: int, long: bool):
    """Whatever the power failure leaves of later work: an erasure that has ended is durable."""
    random = Random(seed)
    for _ in range(100 if long else 5):
        disk = FaultyDisk()
        disk.shows_removed = False  # of removed files, the file system must show nothing
        machine = Machine.boot(disk, segments=4, records=4)
        fresh = machine.work(random, 60, 0)
        gone = random.sample(sorted(machine.known), min(4, len(machine.known)))
        for hash in gone:
            machine.index.drop(hash, erase=True)
        machine.settle()
        machine.work(random, 30, fresh)
        after = disk.after_cut(random)
        again = Machine.boot(after, 2, segments=50, records=4)
        assert again.served().isdisjoint(gone)
        assert not any(after.find(payload_of(hash, 64)) for hash in gone)


def test_flipped_bits_are_never_served(seed: int, long: bool):
    random = Random(seed)
    for _ in range(200 if long else 12):
        disk, _ = run_until_cut(random.getrandbits(32), 60, None)
        for path in disk.paths():
            for _ in range(3):
                disk.flip(path, random.randrange(disk.allocated() // len(disk.paths())))
        Machine.boot(disk, 2, segments=50, records=4).served()


def test_payloads_read_back_as_they_were():
    machine = fill(FaultyDisk(), 3)
    assert machine.read(name(0, 2)) == payload_of(name(0, 2))

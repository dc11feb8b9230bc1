"""Bugs that the other tests of the disk tier must see.

Each one was seen in the field, or is one edit away. A check runs with the bug planted and has to
fail; without it the same check passes.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING

import pytest

from pdserve.kv.tiers.change_log import ChangeLog
from pdserve.kv.tiers.disk import files, index, recovery
from pdserve.kv.tiers.disk.files import SegmentFiles
from pdserve.kv.tiers.disk.fingerprint import Fingerprint
from pdserve.kv.tiers.disk.format import PAGE, Superblock, Trailer
from pdserve.kv.tiers.disk.index import DiskIndex
from pdserve.kv.tiers.disk.segment import Segment, SegmentState
from pdserve.kv.tiers.disk.segment_log import SegmentLog
from tests.kv.tiers.disk import test_index, test_recovery, test_segment
from tests.support.disk_tiers import FINGERPRINT, PAYLOAD, Machine
from tests.support.faulty_disk import FaultyDisk

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.kv.tiers.disk.records import WriteBatch

Patch = pytest.MonkeyPatch


# ---------------------------------------------------------------- the bugs


def table_trusted_without_checksum(patch: Patch) -> None:
    patch.setattr(Trailer, "fits", lambda self, table: True)


def epoch_not_checked(patch: Patch) -> None:
    """What an earlier file of that number left is taken for new."""
    unpack = Superblock.unpack

    def blind(page: bytes) -> Superblock | None:
        block = unpack(page)
        return block and replace(block, epoch=2)

    patch.setattr(Superblock, "unpack", staticmethod(blind))
    patch.setattr(recovery, "_life", lambda part: part.segment)
    patch.setattr(recovery, "_belongs", lambda header, block, at, size, of: header.offset == at)
    patch.setattr(files, "_matches", lambda header, place, hash, identity: header.key == hash)


def payload_checksum_skipped(patch: Patch) -> None:
    patch.setattr(files, "crc32", lambda payload: 0)


def rank_forgotten_in_the_fingerprint(patch: Patch) -> None:
    packed = Fingerprint.packed
    patch.setattr(Fingerprint, "packed", lambda self: packed(replace(self, rank=0, ranks=1)))


def secret_forgotten_in_the_fingerprint(patch: Patch) -> None:
    packed = Fingerprint.packed
    patch.setattr(Fingerprint, "packed", lambda self: packed(replace(self, secret_id=b"")))


def stored_published_at_reserve(patch: Patch) -> None:
    append = DiskIndex.append

    def early(self: DiskIndex, *args) -> WriteBatch | None:
        batch = append(self, *args)
        for record in () if batch is None else batch.records:
            self._changes.stored(record.block)
        return batch

    patch.setattr(DiskIndex, "append", early)


def status_of_a_write_ignored(patch: Patch) -> None:
    patch.setattr(
        DiskIndex, "failed", lambda self, batch, errno, now: DiskIndex.written(self, batch, now)
    )


def removed_not_published(patch: Patch) -> None:
    patch.setattr(ChangeLog, "removed", lambda self, block_hash: None)


def claims_do_not_keep_the_segment(patch: Patch) -> None:
    def hasty(self: Segment) -> bool:
        return not (self.writing or self.moving or self.busy)

    patch.setattr(Segment, "quiet", property(hasty))


def seal_not_synced(patch: Patch) -> None:
    patch.setattr(FaultyDisk, "sync", lambda self, fd: self._step())


def names_not_synced(patch: Patch) -> None:
    patch.setattr(FaultyDisk, "sync_directory", lambda self, path: self._step())


def drop_leaves_the_payload(patch: Patch) -> None:
    patch.setattr(SegmentFiles, "_erase", lambda self, command: None)


def drop_forgets_what_is_being_copied(patch: Patch) -> None:
    patch.setattr(
        DiskIndex, "_rename", lambda self, record, source: DiskIndex._take_in(self, record)
    )


def room_counted_before_it_is_free(patch: Patch) -> None:
    retire = SegmentLog.retire

    def early(self: SegmentLog, segment: Segment) -> None:
        if segment.state is not SegmentState.RETIRING:
            retire(self, segment)
            self.allocated -= segment.size
            self._going -= segment.size
            segment.size = segment.end = 0

    patch.setattr(SegmentLog, "retire", early)


def later_copy_beats_the_durable_one(patch: Patch) -> None:
    patch.setattr(index, "_durable", lambda segment: True)


def table_not_counted_in_the_segment(patch: Patch) -> None:
    """The file grows beyond its bytes when it is sealed."""
    patch.setattr("pdserve.kv.tiers.disk.segment.table_bytes", lambda records: 0)


def walk_stops_at_a_hole(patch: Patch) -> None:
    patch.setattr(recovery, "record_bytes", lambda payload: 1 << 40)


def segment_kept_after_a_failed_write(patch: Patch) -> None:
    patch.setattr(DiskIndex, "_close", lambda self, batch: None)


# ---------------------------------------------------------------- the checks


def crashes(seed: int) -> None:
    """The power fails at some places of a random run."""
    random = Random(seed)
    work = random.getrandbits(32)
    disk, _ = test_recovery.run_until_cut(work, 120, None)
    for cut in range(1, disk.steps, max(1, disk.steps // 25)):
        crashed, machine = test_recovery.run_until_cut(work, 120, cut)
        test_recovery.check_crash(crashed.after_cut(random), machine, 2)


def claimed_reads(seed: int) -> None:
    random = Random(seed)
    machine = Machine.boot(FaultyDisk(), segments=4, records=4)
    fresh = machine.work(random, 60, 0)
    claimed = []
    for hash in sorted(machine.known):
        place = machine.index.place(hash)
        assert place is not None
        machine.index.claim(place)
        claimed.append((place, hash))
    machine.work(random, 60, fresh)
    erased = {place for c in machine.ended for place in getattr(c, "places", ())}
    for place, hash in claimed:
        if place not in erased:
            assert machine.read_place(place, hash)


def faults(seed: int) -> None:
    test_index.test_random_faults(seed, False)


def random_work(seed: int) -> None:
    test_index.test_random_work(seed, False, "files")


def erasing(seed: int) -> None:
    test_index.test_erased_payloads_are_gone_from_every_file(seed)


def other_fingerprints(seed: int) -> None:
    for other in (
        replace(FINGERPRINT, rank=1, ranks=2),
        replace(FINGERPRINT, secret_id=b"secret-2"),
    ):
        test_recovery.test_no_other_fingerprint_finds_the_records(other)


def damaged_tables(seed: int) -> None:
    test_recovery.test_without_a_whole_table_the_headers_count("table")


def left_on_the_medium(seed: int) -> None:
    test_recovery.test_what_a_removed_file_left_on_the_medium_does_not_count()


def copied_and_dropped(seed: int) -> None:
    test_index.test_a_block_that_is_being_copied_can_be_dropped()


def holes(seed: int) -> None:
    test_recovery.test_a_hole_of_a_batch_that_was_not_written_is_skipped()


def two_copies(seed: int) -> None:
    test_index.test_of_two_copies_the_durable_one_counts_else_the_later((True, False))


def sizes(seed: int) -> None:
    for size in (3 * PAGE, 100 * PAGE):
        test_segment.test_as_many_records_fit_as_their_table_leaves_room_for(PAYLOAD, size)


def failed_batches(seed: int) -> None:
    test_index.test_a_failed_batch_closes_its_segment()


BUGS: list[tuple[Callable[[Patch], None], Callable[[int], None]]] = [
    (table_trusted_without_checksum, damaged_tables),
    (epoch_not_checked, left_on_the_medium),
    (payload_checksum_skipped, crashes),
    (rank_forgotten_in_the_fingerprint, other_fingerprints),
    (secret_forgotten_in_the_fingerprint, other_fingerprints),
    (stored_published_at_reserve, random_work),
    (status_of_a_write_ignored, faults),
    (removed_not_published, random_work),
    (claims_do_not_keep_the_segment, claimed_reads),
    (seal_not_synced, crashes),
    (names_not_synced, crashes),
    (drop_leaves_the_payload, erasing),
    (drop_forgets_what_is_being_copied, copied_and_dropped),
    (room_counted_before_it_is_free, random_work),
    (later_copy_beats_the_durable_one, two_copies),
    (table_not_counted_in_the_segment, sizes),
    (walk_stops_at_a_hole, holes),
    (segment_kept_after_a_failed_write, failed_batches),
]
TRIES = 20
"""Seeds that a random check may take to meet a bug."""


@pytest.mark.parametrize(("plant", "check"), BUGS, ids=lambda part: part.__name__)
def test_a_planted_bug_is_caught(plant, check, monkeypatch: Patch):
    check(0)
    plant(monkeypatch)
    for seed in range(TRIES):
        caught = True
        with suppress(AssertionError, pytest.fail.Exception, ValueError, KeyError):
            check(seed)
            caught = False
        if caught:
            return
    pytest.fail(f"{plant.__name__} was not caught by {check.__name__}")

"""The index of the disk tier: single rules by example, all of them together in random runs."""

from __future__ import annotations

import errno as codes
from random import Random
from typing import TYPE_CHECKING

import pytest

from pdserve.errors import ConfigError
from pdserve.kv.tiers.block import TierBlock
from pdserve.kv.tiers.disk.format import PAGE, RecordEntry, record_bytes
from pdserve.kv.tiers.disk.index import DiskIndex, chain_order, segment_size
from pdserve.kv.tiers.disk.memory_segments import MemorySegments
from pdserve.kv.tiers.disk.records import (
    EraseRecords,
    MoveRecords,
    RemoveDirectory,
    SealSegment,
    UnlinkSegment,
)
from pdserve.kv.tiers.disk.segment import FoundSegment
from pdserve.messages.kv_events import BlockRemoved, BlockStored, PoolCleared
from tests.support.disk_tiers import PAYLOAD, Machine, chain, name, segment_of
from tests.support.faulty_disk import FaultyDisk

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1 << 20
GIB = 1 << 30


def machine(segments: int = 4, records: int = 4) -> Machine:
    """An index without files."""
    size = segment_of(records)
    return Machine(DiskIndex(segments * size, size), MemorySegments())


def store_chains(m: Machine, numbers: range) -> None:
    for number in numbers:
        m.store_all(chain(number, 1))


# ---------------------------------------------------------------- sizes


@pytest.mark.parametrize(
    ("capacity", "payload", "size"),
    [
        (1000 * GIB, 4 * MIB, GIB),
        (16 * GIB, 4 * MIB, GIB),
        (8 * GIB, 4 * MIB, GIB // 2),
        # Sixteen records of 4 MiB, and their headers, would be more than a quarter.
        (200 * MIB, 4 * MIB, 50 * MIB),
    ],
)
def test_segments_are_sized_by_capacity(capacity: int, payload: int, size: int):
    assert segment_size(capacity, payload) == size


def test_a_tier_holds_at_least_four_segments_of_one_record():
    least = 4 * segment_of(1)
    assert segment_size(least, PAYLOAD) == segment_of(1)
    with pytest.raises(ConfigError, match=r"; 2\.0 MiB for each worker of this process are enough"):
        segment_size(least - 1, PAYLOAD)


# ---------------------------------------------------------------- writing


def test_a_block_can_be_found_only_after_it_was_written():
    m = machine()
    batch = m.append(chain(0, 2))
    assert batch is not None
    assert name(0, 0) not in m.index
    assert m.index.knows(name(0, 0))
    assert m.index.drain_events() == []
    m.write(batch)
    assert m.index.place(name(0, 0)) == batch.records[0].place
    assert m.index.drain_events() == [
        BlockStored([name(0, 0), name(0, 1)], b"r" * 16, "disk"),
    ]


def test_events_have_one_run_per_chain():
    m = machine(records=8)
    batch = m.append([*chain(0, 2), *chain(1, 1), *chain(2, 3)[1:]])
    assert batch is not None
    m.write(batch)
    assert m.index.drain_events() == [
        BlockStored([name(0, 0), name(0, 1)], b"r" * 16, "disk"),
        BlockStored([name(1, 0)], b"r" * 16, "disk"),
        BlockStored([name(2, 1), name(2, 2)], name(2, 0), "disk"),
    ]


def test_a_known_block_is_not_written_twice():
    m = machine()
    m.store_all(chain(0, 1))
    for again in (chain(0, 1), [*chain(1, 1), *chain(1, 1)], []):
        with pytest.raises(ValueError, match="each once"):
            m.index.append(again, PAYLOAD, 0.0)
    assert m.append(chain(2, 1))
    with pytest.raises(ValueError, match="each once"):
        m.append(chain(2, 1))


def test_a_batch_may_cross_into_the_next_segment():
    m = machine()
    m.store_all(chain(0, 3))
    batch = m.append(chain(1, 3))
    assert batch is not None
    assert [record.place.segment for record in batch.records] == [0, 1, 1]


def test_a_batch_that_never_fits_is_a_mistake():
    m = machine(segments=4, records=4)
    assert m.append(chain(0, 12))
    with pytest.raises(ValueError, match="never fit"):
        m.append(chain(1, 13))
    with pytest.raises(ValueError, match="never fit"):
        m.index.append(chain(1, 1), 5 * record_bytes(PAYLOAD), 0.0)


def test_a_failed_batch_closes_its_segment():
    m = machine()
    m.store_all(chain(0, 1))
    failed = m.append(chain(1, 1))
    assert failed is not None
    m.batches.clear()
    m.index.failed(failed, codes.EIO, 0.0)
    assert not m.index.knows(name(1, 0))
    m.store_all(chain(1, 1))
    places = [m.index.place(name(number, 0)) for number in (0, 1)]
    assert [place and place.segment for place in places] == [0, 1]
    assert m.index.counts().errors == {codes.EIO: 1}


def test_what_a_failed_batch_left_is_erased():
    m = machine()
    m.store_all(chain(0, 1))
    failed = m.append(chain(1, 2))
    assert failed is not None
    m.batches.clear()
    m.index.failed(failed, codes.EIO, 0.0)
    m.settle()
    erased = [place for c in m.ended if isinstance(c, EraseRecords) for place in c.places]
    assert erased == [record.place for record in failed.records]
    assert m.known == {name(0, 0)}


def test_a_full_disk_pauses_writing_and_gives_the_oldest_segment_back():
    m = machine(segments=6)
    store_chains(m, range(9))
    batch = m.append(chain(50, 1))
    assert batch is not None
    m.batches.clear()
    m.index.failed(batch, codes.ENOSPC, 10.0)
    m.settle()
    assert name(0, 0) not in m.index
    assert name(4, 0) in m.index
    assert m.index.append(chain(51, 1), PAYLOAD, 39.0) is None
    assert m.index.append(chain(51, 1), PAYLOAD, 40.0)


# ---------------------------------------------------------------- eviction


def test_the_oldest_segment_goes_first():
    m = machine()
    store_chains(m, range(16))
    # Three segments are full or open; the fourth's room is kept free.
    assert m.known == {name(number, 0) for number in range(4, 16)}
    assert m.index.counts().evicted == 4


def test_what_was_used_is_copied_to_the_open_segment():
    m = machine()
    store_chains(m, range(8))
    m.index.touch(name(2, 0), 1.0)
    store_chains(m, range(8, 13))
    assert name(2, 0) in m.index
    assert name(1, 0) not in m.index
    moved = [command for command in m.ended if isinstance(command, MoveRecords)]
    assert len(moved) == 1
    assert m.index.counts().moved_bytes == record_bytes(PAYLOAD)
    assert m.index.place(name(2, 0)) == moved[0].batch.records[0].place
    assert name(2, 0) in m.served()
    # It has to be used again to stay once more.
    store_chains(m, range(13, 40))
    assert name(2, 0) not in m.index


def test_a_copied_block_was_never_away():
    m = machine()
    store_chains(m, range(8))
    m.index.touch(name(2, 0), 1.0)
    m.index.drain_events()
    store_chains(m, range(8, 12))
    m.append(chain(12, 1))
    m.collect()
    (move,) = (command for command in m.commands if isinstance(command, MoveRecords))
    old = m.index.place(name(2, 0))
    assert old == move.sources[0]
    m.perform(move)
    assert m.index.place(name(2, 0)) not in (None, old)
    removed = [e for e in m.index.drain_events() if isinstance(e, BlockRemoved)]
    assert all(name(2, 0) not in event.hashes for event in removed)


def test_no_more_than_a_quarter_of_a_segment_is_copied():
    m = machine(records=16)
    store_chains(m, range(48))
    for number in range(48):
        m.index.touch(name(number, 0), 1.0)
        if number in (1, 3, 5, 7, 9, 11):
            m.index.touch(name(number, 0), 1.0)
    store_chains(m, range(48, 50))
    # Every segment was used much, so the first one goes after all: the best of it stay.
    assert [number for number in range(16) if name(number, 0) in m.index] == [5, 7, 9, 11]


def test_a_segment_that_was_used_much_gets_a_second_chance():
    m = machine()
    store_chains(m, range(12))
    for number in range(3):
        m.index.touch(name(number, 0), 1.0)
    store_chains(m, range(12, 16))
    assert all(name(number, 0) in m.index for number in range(4))
    assert not any(name(number, 0) in m.index for number in range(4, 8))
    # One only: it was not used again.
    store_chains(m, range(16, 28))
    assert not any(name(number, 0) in m.index for number in range(4))


def test_pinned_blocks_are_copied_until_their_time():
    m = machine()
    blocks = chain(0, 1)
    pinned = TierBlock(blocks[0].hash, blocks[0].parent, pin_until=100.0)
    m.store_all([pinned])
    store_chains(m, range(1, 30))
    assert pinned.hash in m.index
    m.now = 101.0
    store_chains(m, range(30, 50))
    assert pinned.hash not in m.index


def test_room_comes_only_when_nobody_reads_any_more():
    m = machine()
    store_chains(m, range(12))
    place = m.index.place(name(1, 0))
    assert place is not None
    m.index.claim(place)
    store_chains(m, range(12, 16))
    # The last free segment is in use, and the oldest one waits for its reader.
    assert m.append(chain(50, 1)) is None
    m.settle()
    assert m.append(chain(50, 1)) is None
    assert m.read_place(place, name(1, 0)) is not None
    m.index.release(place)
    m.settle()
    assert m.append(chain(50, 1))
    with pytest.raises(ValueError, match="no claim"):
        m.index.release(m.index.place(name(15, 0)) or place)


def test_a_removal_that_fails_is_tried_again():
    m = machine()
    store_chains(m, range(12))
    m.append(chain(12, 1))
    m.settle_batches()
    m.collect()
    (unlink,) = (command for command in m.commands if isinstance(command, UnlinkSegment))
    m.commands.remove(unlink)
    for command in list(m.commands):
        m.perform(command)
    m.index.finished(unlink, 0.0, codes.EBUSY)
    assert m.index.commands(29.0) == []
    assert m.index.commands(30.0) == [unlink]
    m.index.finished(unlink, 30.0)
    m.index.check()


def test_a_table_that_was_not_made_durable_costs_the_segment():
    m = machine()
    for block in chain(0, 5):
        m.append([block])
    m.settle_batches()
    (seal,) = m.index.commands(0.0)
    assert isinstance(seal, SealSegment)
    m.index.finished(seal, 0.0, codes.EIO)
    assert not any(name(0, at) in m.index for at in range(4))
    assert name(0, 4) in m.index
    assert m.index.commands(0.0) == [UnlinkSegment(seal.segment, seal.epoch)]


def test_leftovers_go_before_own_blocks():
    size = segment_of(4)
    index = DiskIndex(4 * size, size, leftovers=[("tier-old", size), ("tier-new", size)])
    m = Machine(index, MemorySegments())
    store_chains(m, range(4))
    m.append(chain(4, 1))
    assert m.index.counts().allocated == 4 * size
    m.collect()
    assert RemoveDirectory("tier-old") in m.commands
    m.settle()
    store_chains(m, range(5, 12))
    removed = [c.name for c in m.ended if isinstance(c, RemoveDirectory)]
    assert removed == ["tier-old", "tier-new"]
    assert len(m.known) == 12


def test_leftovers_can_be_removed_at_once():
    size = segment_of(4)
    index = DiskIndex(9 * size, size, leftovers=[("tier-a", size), ("tier-b", size)])
    assert index.drop_unreachable() == 2
    assert index.drop_unreachable() == 0
    assert not index.idle
    m = Machine(index, MemorySegments())
    m.settle()
    assert [c for c in m.ended if isinstance(c, RemoveDirectory)] == [
        RemoveDirectory("tier-a"),
        RemoveDirectory("tier-b"),
    ]
    assert index.idle
    assert index.counts().allocated == 0


def test_a_leftover_that_is_in_use_again_does_not_count():
    size = segment_of(4)
    index = DiskIndex(4 * size, size, leftovers=[("tier-back", 2 * size)])
    m = Machine(index, MemorySegments())
    store_chains(m, range(4))
    m.append(chain(4, 1))
    (command,) = (c for c in m.index.commands(0.0) if isinstance(c, RemoveDirectory))
    m.index.finished(command, 0.0, codes.EBUSY)
    m.settle()
    store_chains(m, range(5, 12))
    assert len(m.known) == 12
    assert m.index.trouble.text(0.0) == ""


# ---------------------------------------------------------------- reads that fail


def test_a_bad_record_is_dropped_and_two_of_them_cost_the_segment():
    m = machine()
    store_chains(m, range(5))
    first, second = m.index.place(name(0, 0)), m.index.place(name(1, 0))
    assert first is not None
    assert second is not None
    m.index.read_failed(first, name(0, 0), "crc", 0.0)
    assert name(0, 0) not in m.index
    assert name(1, 0) in m.index
    # The same failure, told again by a second reader.
    m.index.read_failed(first, name(0, 0), "crc", 0.0)
    assert name(1, 0) in m.index
    m.index.read_failed(second, name(1, 0), "io", 0.0, codes.EIO)
    assert not any(name(number, 0) in m.index for number in range(4))
    assert name(4, 0) in m.index
    assert m.index.counts().failed_reads == 2
    m.settle()


def test_a_file_that_is_gone_costs_its_segment_at_once():
    m = machine()
    store_chains(m, range(5))
    place = m.index.place(name(0, 0))
    assert place is not None
    m.index.read_failed(place, name(0, 0), "absent", 0.0, codes.ENOENT)
    assert m.known == {name(number, 0) for number in range(5)}
    m.settle()
    assert m.known == {name(4, 0)}
    assert m.index.trouble.text(0.0) == ""


# ---------------------------------------------------------------- dropping


def test_a_drop_erases_the_payload_and_rewrites_the_table():
    m = machine()
    store_chains(m, range(5))
    place = m.index.place(name(1, 0))
    assert m.index.drop(name(1, 0), erase=True)
    assert not m.index.drop(name(1, 0), erase=True)
    m.collect()
    (erase,) = m.commands
    assert isinstance(erase, EraseRecords)
    assert erase.places == (place,)
    assert erase.seal is not None
    assert name(1, 0) not in erase.seal.table
    assert name(2, 0) in erase.seal.table
    m.settle()


def test_a_block_that_is_being_written_can_be_dropped():
    m = machine()
    batch = m.append(chain(0, 2))
    assert batch is not None
    assert m.index.drop(name(0, 0), erase=True)
    m.write(batch)
    assert name(0, 0) not in m.index
    assert name(0, 1) in m.index
    m.collect()
    assert [c.places for c in m.commands if isinstance(c, EraseRecords)] == [
        (batch.records[0].place,)
    ]


def test_a_block_that_is_being_copied_can_be_dropped():
    m = machine()
    store_chains(m, range(8))
    m.index.touch(name(2, 0), 1.0)
    store_chains(m, range(8, 12))
    m.append(chain(12, 1))
    m.collect()
    (move,) = (command for command in m.commands if isinstance(command, MoveRecords))
    m.index.drop(name(2, 0), erase=True)
    m.perform(move)
    assert name(2, 0) not in m.index
    m.settle()
    erased = [place for c in m.ended if isinstance(c, EraseRecords) for place in c.places]
    assert move.batch.records[0].place in erased


def test_a_tenant_s_chains_are_dropped_by_their_root():
    m = machine(segments=8)
    mine, other = b"m" * 16, b"o" * 16
    m.store_all(chain(0, 3, mine))
    m.store_all(chain(1, 3, other))
    # Stored without its root, which its parent knows.
    orphan = TierBlock(name(0, 9), name(0, 2))
    m.store_all([orphan])
    writing = m.append(chain(2, 2, mine))
    assert m.index.drop_chain(mine) == 6
    assert writing is not None
    m.settle()
    assert m.known == {name(1, at) for at in range(3)}
    block = m.index.block(name(1, 1))
    assert block is not None
    assert block.root == other


def test_clearing_takes_everything_also_what_is_under_way():
    m = machine()
    store_chains(m, range(6))
    batch = m.append(chain(20, 2))
    m.index.clear()
    assert m.index.drain_events() == [PoolCleared("disk")]
    m.known = set()
    assert batch is not None
    m.settle()
    assert m.known == set()
    assert m.index.counts().allocated == 0
    m.store_all(chain(0, 1))
    assert m.known == {name(0, 0)}


def test_chains_are_announced_from_their_beginning():
    blocks = [*chain(0, 3), *chain(1, 2), TierBlock(name(9), name(8))]
    Random(3).shuffle(blocks)
    order = [block.hash for block in chain_order(blocks)]
    assert sorted(order) == sorted(block.hash for block in blocks)
    for block in blocks:
        if block.parent in order:
            assert order.index(block.parent) == order.index(block.hash) - 1


@pytest.mark.parametrize("sealed", [(True, False), (False, True), (True, True), (False, False)])
def test_of_two_copies_the_durable_one_counts_else_the_later(sealed: tuple[bool, bool]):
    """The later one may have a whole header and a torn payload."""
    size = segment_of(4)
    found = [
        FoundSegment(
            number,
            1,
            seq,
            size,
            PAGE + record_bytes(PAYLOAD),
            is_sealed,
            (RecordEntry(name(0, 0), b"r" * 16, b"r" * 16, PAGE, PAYLOAD, 16, seq),),
        )
        for number, seq, is_sealed in zip((0, 1), (5, 9), sealed, strict=True)
    ]
    index = DiskIndex(4 * size, size, epoch=2, found=found)
    index.check()
    place = index.place(name(0, 0))
    assert place is not None
    assert place.segment == (0 if sealed == (True, False) else 1)
    # The other one goes, with its segment: it has nothing else.
    unlinked = [c for c in index.commands(0.0) if isinstance(c, UnlinkSegment)]
    assert [command.segment for command in unlinked] == [1 - place.segment]


# ---------------------------------------------------------------- together


@pytest.mark.parametrize("store", ["memory", "files"])
def test_random_work(seed: int, long: bool, store: str):
    """Every step leaves sound books and true events; every block that is here reads right; the
    files never take more than the capacity."""
    random = Random(seed)
    for _ in range(100 if long else 4):
        m = machine() if store == "memory" else Machine.boot(FaultyDisk(), segments=4, records=4)
        claims: list = []
        fresh = 0
        for _ in range(300):
            fresh = m.step(random, fresh)
            if random.random() < 0.1 and m.known:
                hash = random.choice(sorted(m.known))
                place = m.index.place(hash)
                assert place is not None
                m.index.claim(place)
                claims.append((place, hash))
            if claims and random.random() < 0.12:
                place, hash = claims.pop(random.randrange(len(claims)))
                m.read_claimed(place, hash)
                m.index.release(place)
            if store == "files":
                assert m.disk.allocated() <= m.index.capacity
        for place, _ in claims:
            m.index.release(place)
        m.settle()
        assert m.served() == m.known
        assert m.index.counts().claims == m.index.counts().writing == 0


def test_random_faults(seed: int, long: bool):
    """Operations fail at random: nothing wrong is served, the bound holds, and when the faults end
    the tier works."""
    random = Random(seed)
    for _ in range(100 if long else 6):
        disk = FaultyDisk()
        m = Machine.boot(disk, segments=4, records=4)
        errors = random.choices([codes.EIO, codes.ENOSPC, codes.EROFS, codes.ENOENT], k=2)

        def fault(operation: str, path: Path, errors: list[int] = errors) -> int:
            errno = random.choice(errors) if random.random() < 0.05 else 0
            absent = errno == codes.ENOENT and operation not in ("open", "create")
            return codes.EIO if absent else errno  # a file that is there can be unlinked

        disk.fault = fault
        fresh = 0
        for _ in range(250):
            m.now += random.choice([0.0, 0.0, 20.0])
            fresh = m.step(random, fresh)
            assert disk.allocated() <= m.index.capacity
            if random.random() < 0.05:
                m.read_all()
        disk.fault = lambda operation, path: 0
        m.now += 2000.0
        m.settle()
        assert m.served() == m.known
        m.store_all(chain(10_000, 3))
        assert name(10_000, 2) in m.served()
        assert m.index.trouble.text(m.now) == ""
        assert disk.allocated() == m.index.counts().allocated


def test_erased_payloads_are_gone_from_every_file(seed: int):
    random = Random(seed)
    disk = FaultyDisk()
    m = Machine.boot(disk, segments=4, records=4)
    fresh = 0
    dropped: set[bytes] = set()
    for _ in range(15):
        fresh = m.work(random, 10, fresh)
        for hash in random.sample(sorted(m.known), min(2, len(m.known))):
            m.index.drop(hash, erase=True)
            dropped.add(hash)
        m.settle()
        assert dropped.isdisjoint(m.known)
        assert not any(m.on_disk(hash) for hash in dropped)
    assert dropped
    assert all(m.on_disk(hash) for hash in m.known)

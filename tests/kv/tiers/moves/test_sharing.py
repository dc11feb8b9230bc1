"""Blocks that another worker has sealed below the same directory, fetched to the own device."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from bench.atomic_tiers import PLAIN
from pdserve.clock import ManualClock
from pdserve.kv.block_pool import BlockPool
from pdserve.kv.storage import BlockMemory
from pdserve.kv.tiers.admission import DiskAdmission, HostAdmission, WriteBudget
from pdserve.kv.tiers.disk import sealed_reader
from pdserve.kv.tiers.disk.tier import DiskTier
from pdserve.kv.tiers.host_index import HostIndex
from pdserve.kv.tiers.job_runner import JobRunner, MemoryCopier
from pdserve.kv.tiers.lower_tiers import LowerTiers
from pdserve.kv.tiers.moves.sharing import LOOK_EVERY, LOOK_ON
from pdserve.kv.tiers.virtual_io import VirtualTierIo
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

    from pdserve.kv.tiers.lower_tiers import FetchDone
    from pdserve.messages.tiers import TierStats

RECORDS = 4
"""Records of a segment."""
BLOCKS = 8
TOKENS = 16
"""Tokens of a block."""


def opened(root: Path, owner: str) -> DiskTier:
    size = segment_of(RECORDS)
    return DiskTier.open(
        root, 10 * size, FINGERPRINT, clock=ManualClock(), owner=owner, segment_bytes=size
    )


class Worker:
    """A device and the tiers below it, on real files and simulated time."""

    def __init__(self, root: Path, owner: str = "mine") -> None:
        self.clock = ManualClock()
        self.disk = opened(root, owner)
        self.device = BlockMemory(BLOCKS, (PAYLOAD,))
        self.arena = BlockMemory(BLOCKS, (PAYLOAD,))
        self.copier = MemoryCopier(self.device.view(), self.arena.view(), PAYLOAD)
        self.runner = JobRunner(self.copier, self.arena, self.disk.files, self.disk.shared)
        self.lower = LowerTiers(
            HostIndex(BLOCKS, order=PLAIN),
            HostAdmission("all", BLOCKS),
            VirtualTierIo(self.clock, PAYLOAD, self.runner),
            self.disk.index,
            DiskAdmission("all", 40, WriteBudget(1 << 40, 0.0)),
            block_bytes=PAYLOAD,
            block_size=TOKENS,
            device=BlockPool(BLOCKS, TOKENS),
            shared=self.disk.shared,
        )

    def wait(self, seconds: float) -> list[FetchDone]:
        """Let time pass; the fetches that have ended."""
        ended: list[FetchDone] = []
        until = self.clock.now() + seconds
        while True:
            ended += self.lower.advance(self.clock.now())
            self.lower.check()
            due = self.lower.next_deadline()
            if due is None or due > until:
                break
            self.clock.advance(max(1e-6, due - self.clock.now()))
        self.clock.advance(max(0.0, until - self.clock.now()))
        return ended + self.lower.advance(self.clock.now())

    def fetch(self, names: list[bytes]) -> FetchDone:
        """Bring blocks to the first places of the device."""
        now = self.clock.now()
        self.lower.fetch(1, names, b"", list(range(len(names))), now, now + 5.0)
        (done,) = self.wait(1.0)
        return done

    def on_device(self, place: int) -> bytes:
        return bytes(self.device.view(place))

    @property
    def stats(self) -> TierStats:
        return self.lower.stats(self.clock.now())[1]

    def close(self) -> None:
        self.lower.close()
        self.disk.close()
        self.copier.close()
        self.device.close()
        self.arena.close()


class Other:
    """Another worker, which stores blocks."""

    def __init__(self, root: Path) -> None:
        self.tier = opened(root, "other")
        self.machine = Machine(self.tier.index, self.tier.files)
        assert self.tier.path is not None
        self.path = self.tier.path

    def seal(self, number: int) -> list[bytes]:
        """Store a chain that fills a segment, and begin the next segment, so that the first one is
        sealed; the chain's hashes."""
        self.machine.store_all(chain(number, RECORDS))
        self.machine.store_all(chain(100 + number, 1))
        return [name(number, index) for index in range(RECORDS)]

    def files(self) -> dict[str, tuple[int, bytes]]:
        return {p.name: (p.stat().st_mtime_ns, p.read_bytes()) for p in self.path.iterdir()}

    def remove(self) -> None:
        for segment in self.path.glob("seg-*"):
            segment.unlink()


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Other]:
    other = Other(tmp_path)
    yield other
    other.tier.close()


@pytest.fixture
def worker(tmp_path: Path, other: Other) -> Iterator[Worker]:
    worker = Worker(tmp_path)
    yield worker
    worker.close()


def test_sealed_blocks_of_another_worker_come_from_disk(worker: Worker, other: Other) -> None:
    names = other.seal(0)
    before = other.files()
    worker.wait(0.1)
    assert worker.lower.run(names) == ["disk"] * RECORDS
    done = worker.fetch(names)
    assert (done.blocks, done.sources, done.reason) == (RECORDS, ("disk",) * RECORDS, "")
    assert [worker.on_device(place) for place in range(RECORDS)] == list(map(payload_of, names))
    stats = worker.stats
    assert (stats.shared_blocks, stats.shared_read, stats.shared_failed) == (RECORDS, RECORDS, 0)
    assert stats.hit_tokens == RECORDS * TOKENS
    assert other.files() == before


def test_what_was_read_is_an_own_block_from_then_on(worker: Worker, other: Other) -> None:
    names = other.seal(0)
    worker.wait(0.1)
    worker.fetch(names)
    other.remove()
    assert worker.fetch(names).sources == ("host",) * RECORDS
    for block in names:
        worker.lower.used(block, 1, worker.clock.now())
    worker.wait(5.0)
    assert all(block in worker.disk.index for block in names)


def test_the_own_disk_comes_first(worker: Worker, other: Other) -> None:
    names = other.seal(0)
    mine = Machine(worker.disk.index, worker.disk.files)
    mine.store_all(chain(0, RECORDS))
    worker.wait(0.1)
    assert worker.fetch(names).sources == ("disk",) * RECORDS
    assert worker.stats.shared_blocks == RECORDS
    assert worker.stats.shared_read == 0


def test_later_segments_are_found_by_the_next_look(worker: Worker, other: Other) -> None:
    worker.wait(1.0)
    names = other.seal(0)
    worker.wait(LOOK_EVERY - 2.0)
    assert not worker.lower.has(names[0])
    worker.wait(2.0)
    assert worker.lower.has(names[0])
    assert worker.lower.parent(names[1]) == names[0]


def test_files_that_vanish_are_misses(
    worker: Worker, other: Other, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = other.seal(0), other.seal(1)
    worker.wait(0.1)
    other.remove()
    with caplog.at_level(logging.WARNING):
        for names in (first, second):
            done = worker.fetch(names)
            assert (done.blocks, done.reason) == (0, "absent")
            assert worker.lower.run(names) == []  # none of the segment is tried again
    assert len([r for r in caplog.records if "another worker" in r.message]) == 1
    assert worker.stats.shared_failed >= 2
    assert worker.stats.failed == 0  # the own disk is well
    assert worker.stats.trouble == ""


def test_a_flipped_bit_is_a_miss(worker: Worker, other: Other) -> None:
    names = other.seal(0)
    worker.wait(0.1)
    for segment in other.path.glob("seg-*"):
        whole = segment.read_bytes()
        at = whole.find(payload_of(names[2]))
        if at >= 0:
            segment.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    done = worker.fetch(names)
    assert (done.blocks, done.reason) == (2, "crc")
    assert [worker.on_device(place) for place in range(2)] == list(map(payload_of, names[:2]))
    assert worker.stats.shared_failed == 1


def test_what_an_operator_drops_is_not_read_from_others(worker: Worker, other: Other) -> None:
    mine, theirs = other.seal(0), other.seal(1)[: RECORDS - 1]
    worker.wait(0.1)
    assert {block.hash for block in worker.lower.blocks()} >= {*mine, *theirs}
    worker.lower.drop(set(mine), 0.0, worker.clock.now(), 0.0)
    worker.wait(2 * LOOK_EVERY)
    assert worker.lower.run(mine) == []
    assert worker.lower.run(theirs) == ["disk"] * len(theirs)


def test_a_look_under_way_does_not_bring_back_what_is_dropped(worker: Worker, other: Other) -> None:
    names = other.seal(0)
    worker.lower.advance(worker.clock.now())  # the look has begun
    worker.lower.drop(set(names), 0.0, worker.clock.now(), 0.0)
    for block in names:  # the owner has the same order
        other.tier.index.drop(block, erase=True)
    worker.wait(LOOK_EVERY / 2)
    assert worker.lower.run(names) == []
    other.machine.settle()
    later = other.seal(1)
    worker.wait(LOOK_EVERY)
    assert worker.lower.run(names) == []
    assert worker.lower.has(later[0])


def test_many_tables_are_read_by_looks_that_follow_at_once(
    worker: Worker, other: Other, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sealed_reader, "_MOST_READ", RECORDS)
    first, second = other.seal(0), other.seal(1)
    worker.lower.advance(worker.clock.now())
    worker.wait(2 * LOOK_ON)
    assert worker.lower.has(first[0])
    assert worker.lower.has(second[0])


def test_a_drop_removes_what_another_secret_has_left(tmp_path: Path) -> None:
    size, other = segment_of(RECORDS), replace(FINGERPRINT, secret_id=b"secret-0")
    old = DiskTier.open(
        tmp_path, 10 * size, other, clock=ManualClock(), owner="mine", segment_bytes=size
    )
    Machine(old.index, old.files).store_all(chain(0, 2))
    old.close()
    worker = Worker(tmp_path)
    assert old.path is not None
    worker.lower.drop(set(), 60.0, 0.0, 0.0)
    worker.wait(1.0)
    assert old.path.exists()
    worker.lower.drop({name(1, 0)}, 0.0, 0.0, 0.0)
    worker.wait(1.0)
    assert not old.path.exists()
    worker.close()


def test_after_everything_was_cleared_others_are_not_asked(worker: Worker, other: Other) -> None:
    names = other.seal(0)
    worker.wait(0.1)
    worker.lower.clear()
    other.seal(1)
    worker.wait(2 * LOOK_EVERY)
    assert worker.lower.run(names) == []
    assert not worker.lower.has(name(1, 0))


def test_another_secret_reads_nothing_of_the_old_one(worker: Worker, other: Other) -> None:
    names = other.seal(0)
    worker.wait(0.1)
    worker.lower.rename()
    assert worker.lower.run(names) == []
    worker.disk = worker.disk.renamed(b"another.")
    worker.lower.reopen_disk(worker.disk.index, shared=worker.disk.shared)
    worker.runner.files, worker.runner.shared = worker.disk.files, worker.disk.shared
    worker.wait(2 * LOOK_EVERY)
    assert worker.lower.run(names) == []

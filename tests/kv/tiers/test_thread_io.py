"""What carries out the jobs of lower tiers: threads and simulated time keep the same promises."""

from __future__ import annotations

import threading
import time
from array import array
from errno import ENOSPC
from typing import TYPE_CHECKING

import pytest

from pdserve.clock import ManualClock
from pdserve.kv.storage import BlockMemory
from pdserve.kv.tiers.block import TierBlock
from pdserve.kv.tiers.disk.records import TierWriteError
from pdserve.kv.tiers.disk.tier import DiskTier
from pdserve.kv.tiers.job_runner import JobRunner, MemoryCopier
from pdserve.kv.tiers.jobs import CopyIn, CopyOut, Fill, Spill
from pdserve.kv.tiers.thread_io import ThreadTierIo
from pdserve.kv.tiers.virtual_io import VirtualTierIo

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pdserve.kv.tiers.jobs import JobDone, TierIo, TierJob

SIZE = 4096
BLOCKS = 8


class Storage:
    """A device pool, an arena and a disk in memory, with either `TierIo`."""

    def __init__(self, kind: str) -> None:
        self.clock = ManualClock()
        self.pool, self.arena = BlockMemory(BLOCKS, (SIZE,)), BlockMemory(BLOCKS, (SIZE,))
        for block in range(BLOCKS):
            self.pool.view(block)[:] = bytes([block + 1]) * SIZE
        self.disk = DiskTier.in_memory(1 << 20, SIZE, clock=self.clock)
        self.copier = MemoryCopier(self.pool.view(), self.arena.view(), SIZE)
        self.runner = JobRunner(self.copier, self.arena, self.disk.files)
        self.woken = threading.Event()
        self.io: TierIo
        if kind == "threads":
            self.io = ThreadTierIo(self.runner, disk=True)
        else:
            self.io = VirtualTierIo(self.clock, SIZE, self.runner)
        self.io.start(self.woken.set)

    def frame(self, number: int) -> set[int]:
        """The bytes that occur in a frame."""
        return set(self.arena.view(number))

    def done(self, count: int) -> list[JobDone]:
        """The next `count` ends."""
        found: list[JobDone] = []
        until = time.monotonic() + 10.0
        while len(found) < count:
            assert time.monotonic() < until, "a job has not ended"
            due = self.io.next_due()
            if due is None:
                self.woken.wait(0.1)
            else:
                self.clock.advance(max(0.0, due - self.clock.now()))
            found += self.io.poll()
        return found

    def do(self, job: TierJob) -> JobDone:
        self.io.submit(job)
        (done,) = self.done(1)
        assert done.job is job
        return done

    def close(self) -> None:
        self.io.close()
        self.io.close()
        self.copier.close()
        self.pool.close()
        self.arena.close()


@pytest.fixture(params=["threads", "simulated time"])
def storage(request: pytest.FixtureRequest) -> Iterator[Storage]:
    made = Storage(request.param)
    yield made
    made.close()


def content(number: int) -> TierBlock:
    return TierBlock(bytes([number]) * 16, bytes(16))


def spill(storage: Storage, numbers: list[int], frames: list[int]) -> Spill:
    batch = storage.disk.index.append([content(number) for number in numbers], SIZE, 0.0)
    assert batch is not None
    return Spill(batch, frames)


def test_blocks_are_copied_to_frames_and_back(storage: Storage) -> None:
    out = CopyOut([3, 0], [1, 2], [content(3), content(0)], [0, 0])
    assert not storage.do(out).error
    assert (storage.frame(1), storage.frame(2), storage.frame(0)) == ({4}, {1}, {0})
    assert not storage.do(CopyIn(1, 0, [1, 2], [6, 7])).error
    assert set(storage.pool.view(6)) == {4}
    assert set(storage.pool.view(7)) == {1}


def test_what_is_written_is_read_into_another_frame(storage: Storage) -> None:
    storage.do(CopyOut([3, 5], [0, 1], [content(3), content(5)], [0, 0]))
    job = spill(storage, [3, 5], [0, 1])
    assert not storage.do(job).error
    storage.disk.index.written(job.batch, 0.0)
    place = storage.disk.index.place(content(5).hash)
    assert place is not None
    assert not storage.do(Fill(content(5).hash, place, 7)).error
    assert storage.frame(7) == {6}


def test_a_read_that_fails_says_why(storage: Storage) -> None:
    job = spill(storage, [3], [0])
    place = job.batch.records[0].place
    done = storage.do(Fill(content(3).hash, place, 7))
    assert done.error
    assert done.reason == "absent"


def test_a_write_that_fails_has_its_number(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise TierWriteError(ENOSPC, "no space left on device")

    monkeypatch.setattr(storage.disk.files, "write", full)
    done = storage.do(spill(storage, [3], [0]))
    assert done.errno == ENOSPC
    assert "no space" in done.error


def test_any_other_error_is_an_end_too(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage.copier, "copy_out", lambda *_: 1 / 0)
    done = storage.do(CopyOut([3], [0], [content(3)], [0]))
    assert "ZeroDivisionError" in done.error
    assert not storage.do(CopyIn(1, 0, [1], [6])).error, "the thread goes on"


def test_copies_begin_in_their_order(storage: Storage) -> None:
    jobs = [CopyOut([block], [0], [content(block)], [0]) for block in range(BLOCKS)]
    for job in jobs:
        storage.io.submit(job)
    assert [done.job for done in storage.done(len(jobs))] == jobs
    assert storage.frame(0) == {BLOCKS}


def test_a_read_that_hangs_delays_no_copy() -> None:
    storage = Storage("threads")
    hangs = threading.Event()
    place = spill(storage, [3], [0]).batch.records[0].place
    files = storage.disk.files
    files.read = lambda *_: hangs.wait(10.0)  # type: ignore[method-assign, assignment]
    storage.io.submit(Fill(content(3).hash, place, 7))
    assert not storage.do(CopyOut([3], [1], [content(3)], [0])).error
    hangs.set()
    (done,) = storage.done(1)
    assert isinstance(done.job, Fill)
    storage.close()


def test_a_copy_out_of_its_memory_is_refused() -> None:
    storage = Storage("threads")
    done = storage.do(CopyOut([BLOCKS], [0], [content(0)], [0]))
    assert "leaves its memory" in done.error
    assert array("B", storage.arena.view(0)).tobytes() == bytes(SIZE)
    storage.close()

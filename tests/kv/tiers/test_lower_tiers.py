"""Host and disk below a device pool: random requests, slow jobs and faults, with content.

Each place of each tier has a content, which is a block's hash. What a fetch delivers, and what any
tier says that it has, must be there.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Literal

import pytest

from bench.atomic_tiers import PLAIN
from pdserve.clock import ManualClock
from pdserve.kv.block_pool import BlockPool
from pdserve.kv.tiers.admission import DiskAdmission, HostAdmission, WriteBudget
from pdserve.kv.tiers.cleaner import BlockUse, Cleaner
from pdserve.kv.tiers.disk.format import record_bytes
from pdserve.kv.tiers.disk.index import DiskIndex, segment_size
from pdserve.kv.tiers.disk.memory_segments import MemorySegments
from pdserve.kv.tiers.disk.records import TierReadError
from pdserve.kv.tiers.host_index import HostIndex
from pdserve.kv.tiers.jobs import CopyIn, CopyOut, Fill, JobDone, Maintain, Spill
from pdserve.kv.tiers.lower_tiers import LowerTiers
from pdserve.kv.tiers.virtual_io import LaneRate, VirtualTierIo
from pdserve.messages.kv_events import BlockRemoved, BlockStored, PoolCleared

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.kv.tiers.disk.records import ReadFault
    from pdserve.kv.tiers.jobs import TierJob
    from pdserve.kv.tiers.lower_tiers import FetchDone
    from pdserve.messages.kv_events import KvEvent

PAYLOAD = 4096
RATES = dict.fromkeys(("d2h", "h2d", "disk_read", "disk_write"), LaneRate(PAYLOAD / 0.002, 0.001))
"""A block takes 2 ms on each lane, so that jobs overlap with steps of a few ms."""


class Contents:
    """The bytes of all places: which block's they are. Carries out jobs."""

    def __init__(self) -> None:
        self.device: dict[int, bytes] = {}
        self.frames: dict[int, bytes] = {}
        self.segments = MemorySegments()

    def run(self, job: TierJob, submitted: float, clock: Callable[[], float]) -> JobDone:
        match job:
            case CopyOut():
                for block, frame in zip(job.blocks, job.frames, strict=True):
                    self.frames[frame] = self.device[block]
            case CopyIn():
                for frame, block in zip(job.frames, job.blocks, strict=True):
                    self.device[block] = self.frames[frame]
            case Fill():
                try:
                    self.segments.read(job.place, job.hash)
                except TierReadError as error:
                    return JobDone(job, 0.0, str(error), error.reason)
                self.frames[job.frame] = job.hash
            case Spill():
                written = [record.block.hash for record in job.batch.records]
                assert [self.frames[frame] for frame in job.frames] == written
                self.segments.write(job.batch)
            case Maintain():
                self.segments.run(job.command)
        return JobDone(job, 0.0)


@dataclass
class Active:
    """A request whose fetch has not ended."""

    names: list[bytes]
    shared: list[int]
    fresh: list[int]
    asked: int


@dataclass
class Told:
    """What events say that a tier has."""

    host: set[bytes] = field(default_factory=set)
    disk: set[bytes] = field(default_factory=set)

    def hear(self, event: KvEvent) -> None:
        tier: Literal["host", "disk"] = "host" if event.tier == "host" else "disk"
        assert event.tier == tier
        known: set[bytes] = getattr(self, tier)
        match event:
            case BlockStored():
                assert known.isdisjoint(event.hashes), "a block is told twice"
                known.update(event.hashes)
            case BlockRemoved():
                assert known.issuperset(event.hashes), "a block goes that was not there"
                known.difference_update(event.hashes)
            case PoolCleared():
                known.clear()


class World:
    """A pool, lower tiers, and requests that come, fetch, compute and go."""

    def __init__(self, random: Random, faults: float) -> None:
        self.random = random
        self.clock = ManualClock()
        self.contents = Contents()
        self.pool = BlockPool(48, 16)
        self.io = VirtualTierIo(self.clock, PAYLOAD, self.contents, RATES)  # type: ignore[arg-type]
        self.io.fault = lambda job: self.fault(job, faults)
        capacity = 90 * record_bytes(PAYLOAD)
        disk = DiskIndex(capacity, segment_size(capacity, PAYLOAD))
        budget = WriteBudget(10**12, 0.0)
        self.lower = LowerTiers(
            HostIndex(24, order=PLAIN),
            HostAdmission("all", 24),
            self.io,
            disk,
            DiskAdmission("all", 90, budget),
            block_bytes=PAYLOAD,
            block_size=16,
            device=self.pool,
        )
        self.cleaner = Cleaner(self.pool, self.lower)
        self.active: dict[int, Active] = {}
        self.ended: set[int] = set()
        self.told = Told()
        self.hits = 0
        self.stems: list[list[bytes]] = [[b"root"]]
        self.made = 0

    def fault(self, job: TierJob, share: float) -> tuple[str, ReadFault, int] | None:
        if self.random.random() >= share or isinstance(job, Maintain):
            return None
        reason: ReadFault = self.random.choice(("io", "crc", "absent"))
        return ("planted", reason, self.random.choice((0, errno.EIO)))

    def prompt(self) -> list[bytes]:
        """A prompt that continues an earlier one, or a part of it."""
        stem = self.random.choice(self.stems[-25:])
        names = stem[: self.random.randint(1, len(stem))]
        for _ in range(self.random.randint(0, 4)):
            self.made += 1
            names.append(self.made.to_bytes(8, "big") * 2)
        self.stems.append(names[:16])
        return names[:16]

    def begin(self) -> None:
        names = self.prompt()
        shared = self.pool.match(names)
        fresh = self.pool.reserve(len(names) - len(shared), shared=shared)
        if fresh is None:
            return
        for block in fresh:
            self.contents.device[block] = b"what was there before"
        number = len(self.active) + len(self.ended)
        rest = names[len(shared) :]
        asked = len(self.lower.run(rest))
        self.active[number] = Active(names, shared, fresh, asked)
        now = self.clock.now()
        parent = names[len(shared) - 1] if shared else b""
        deadline = now + self.random.choice((0.005, 0.05, 5.0))
        self.lower.fetch(number, rest[:asked], parent, fresh[:asked], now, deadline)

    def step(self) -> None:
        """Some time passes."""
        self.follow()
        if self.random.random() < 0.5:
            self.begin()
        if self.active and self.random.random() < 0.05:
            self.lower.cancel(self.random.choice(list(self.active)), self.clock.now())
        self.follow()
        self.cleaner.clean(self.random.randint(0, 6), self.clock.now())
        self.clock.advance(self.random.choice((0.0, 0.002, 0.02)))
        for done in self.lower.advance(self.clock.now()):
            self.end(done)
        self.follow()
        self.check()

    def end(self, done: FetchDone) -> None:
        """A fetch has ended: the rest of the prompt is computed, and the request leaves."""
        assert done.number not in self.ended, "a fetch ends twice"
        request = self.active.pop(done.number)
        self.ended.add(done.number)
        self.hits += done.blocks
        assert len(done.sources) == done.blocks <= request.asked
        names = request.names[len(request.shared) :]
        device = self.contents.device
        for name, block in zip(names[: done.blocks], request.fresh, strict=False):
            assert device[block] == name, "a fetched block has not its content"
        for name, block in zip(names, request.fresh, strict=True):
            device[block] = name
        parent = request.names[len(request.shared) - 1] if request.shared else b""
        blocks = request.shared + self.pool.commit_run(request.fresh, names, parent)
        self.cleaner.left(request.names, BlockUse(), self.clock.now())
        self.pool.release(blocks)

    def follow(self) -> None:
        events = self.pool.drain_events()
        self.lower.follow(events, self.clock.now())
        self.cleaner.follow(events)
        for event in self.lower.drain_events():
            self.told.hear(event)

    def check(self) -> None:
        self.lower.check()
        self.pool.check()
        host, frames = self.lower.host, self.contents.frames
        assert self.told.host == set(host.names())
        for name in host.names():
            frame = host.frame(name)
            assert frame is not None
            assert frames[frame] == name, "a frame has not the content of its block"

    def settle(self) -> None:
        """No more requests, and all jobs end."""
        self.io.fault = lambda job: None
        for _ in range(2000):
            self.clock.advance(0.05)
            for done in self.lower.advance(self.clock.now()):
                self.end(done)
            self.follow()
            if not self.active and self.io.next_due() is None:
                return
        raise AssertionError("jobs or fetches are left")


@pytest.mark.parametrize("faults", [0.0, 0.04], ids=["sound", "faults"])
def test_what_comes_back_is_what_went_down(seed: int, faults: float, long: bool) -> None:
    world = World(Random(seed), faults)
    for _ in range(20_000 if long else 700):
        world.step()
    world.settle()
    world.check()
    counts, disk = world.lower.host.counts(), world.lower.disk
    assert counts.claimed == counts.filling == 0
    assert disk is not None
    assert disk.counts().claims == disk.counts().writing == 0
    assert world.told.disk == set(disk.hashes())
    assert [lane.backlog for lane in world.lower.lanes()] == [0, 0, 0, 0]
    stats = {record.tier: record for record in world.lower.stats(world.clock.now())}
    assert sum(record.hit_tokens for record in stats.values()) == 16 * world.hits > 0
    if not faults:
        assert min(record.hit_tokens for record in stats.values()) > 0, "a tier was never used"
        assert stats[2].failed == 0


def test_a_failed_job_does_not_count_as_a_fast_one() -> None:
    world = World(Random(1), 0.0)
    for _ in range(200):
        world.step()
    before = {lane.lane: (lane.bandwidth, lane.latency) for lane in world.lower.lanes()}
    assert max(before["h2d"]) > 0
    world.io.fault = lambda job: ("planted", "io", 0)
    for _ in range(60):
        world.step()
    for lane in world.lower.lanes():
        assert (lane.bandwidth, lane.latency) == pytest.approx(before[lane.lane], rel=1e-9)


def test_many_bad_blocks_share_a_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    world = World(Random(1), 0.0)
    for _ in range(400):
        world.step()
    world.io.fault = lambda job: ("planted", "io", 0) if isinstance(job, Fill) else None
    began = world.clock.now()
    for _ in range(200):
        world.step()
    lines = [record for record in caplog.records if "was not read from disk" in record.message]
    stats = {record.tier: record for record in world.lower.stats(world.clock.now())}
    assert stats[2].failed >= 5
    assert 1 <= len(lines) <= 1 + (world.clock.now() - began) / 10.0

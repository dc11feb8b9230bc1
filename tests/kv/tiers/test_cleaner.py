"""How far ahead of evictions device blocks are stored: as many as a step has evicted lately."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.clock import ManualClock
from pdserve.kv.block_pool import BlockPool
from pdserve.kv.tiers.admission import HostAdmission
from pdserve.kv.tiers.cleaner import BURST_HALVES, LOOK_FAR, MOST_AHEAD, WINDOW, Cleaner
from pdserve.kv.tiers.eviction import EvictionOrder
from pdserve.kv.tiers.host_index import HostIndex
from pdserve.kv.tiers.lower_tiers import LowerTiers
from pdserve.kv.tiers.virtual_io import VirtualTierIo

if TYPE_CHECKING:
    import pytest

BLOCKS, LONG = 1000, 200
UNSAVED_ONCE = LONG - WINDOW
"""Of the first long prompt, which nothing has announced."""


class Worker:
    """A device pool and its host tier; each prompt takes all its blocks at once."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.pool = BlockPool(BLOCKS, 16)
        self.tiers = LowerTiers(
            HostIndex(4 * BLOCKS, order=EvictionOrder()),
            HostAdmission("all", 4 * BLOCKS),
            VirtualTierIo(self.clock, 1 << 20),
            block_bytes=1 << 20,
            block_size=16,
            device=self.pool,
        )
        self.cleaner = Cleaner(self.pool, self.tiers)
        self.made = 0

    def serve(self, blocks: int) -> None:
        """A prompt comes and goes, and then a second passes."""
        fresh = self.pool.reserve(blocks)
        assert fresh is not None
        names = [(self.made + place).to_bytes(16, "big") for place in range(blocks)]
        self.made += blocks
        self.pool.release(self.pool.commit_run(fresh, names, b"root"))
        self.step()
        self.wait(LOOK_FAR)

    def step(self) -> None:
        events = self.pool.drain_events()
        self.tiers.advance(self.clock.now())
        self.tiers.follow(events, self.clock.now())
        self.cleaner.follow(events)
        self.cleaner.clean(4, self.clock.now(), busy=True)

    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.step()

    @property
    def unsaved(self) -> int:
        return self.tiers.stats(self.clock.now())[0].blocks_unsaved


def full() -> Worker:
    worker = Worker()
    while worker.pool.free:
        worker.serve(50)
    return worker


def test_a_long_prompt_loses_blocks_once() -> None:
    worker = full()
    worker.serve(LONG)
    assert worker.unsaved == UNSAVED_ONCE
    for _ in range(5):
        worker.serve(LONG)
    assert worker.unsaved == UNSAVED_ONCE


def test_a_burst_is_forgotten() -> None:
    worker = full()
    worker.serve(LONG)
    worker.wait(20 * BURST_HALVES)
    stored = worker.tiers.host.counts().valid
    for _ in range(8):
        worker.serve(1)
    assert worker.tiers.host.counts().valid <= stored + 8


def test_most_of_the_pool_is_not_stored_ahead() -> None:
    worker = full()
    worker.serve(600)
    before = worker.tiers.host.counts().valid
    worker.wait(LOOK_FAR)
    ahead = sum(name in worker.tiers.host for _, name in worker.pool.oldest(BLOCKS))
    assert ahead <= int(MOST_AHEAD * BLOCKS)
    assert worker.tiers.host.counts().valid <= before + int(MOST_AHEAD * BLOCKS)


def test_what_is_stored_is_not_looked_at_in_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = full()
    worker.serve(LONG)
    looked: list[int] = []
    oldest = worker.pool.oldest

    def note(count: int) -> list[tuple[int, bytes]]:
        looked.append(count)
        return oldest(count)

    monkeypatch.setattr(worker.pool, "oldest", note)
    for _ in range(20):
        worker.wait(LOOK_FAR / 10)
    assert max(looked) > LONG // 2
    assert sum(count > WINDOW for count in looked) <= 3

"""Random lives of a core with a host tier and a disk, whose copies and reads fail at random.

All that `test_random_schedules` demands holds too: the tokens are those of a core without a cache.
Besides, no frame, claim or byte is lost, and the KV events say what is where.
"""

from __future__ import annotations

import random
from collections import Counter
from errno import EIO, ENOSPC
from typing import TYPE_CHECKING, cast

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from pdserve.engine_core.tiers.core_tiers import TierStorage
from pdserve.kv.storage import BlockMemory
from pdserve.kv.tiers.disk.tier import DiskTier
from pdserve.kv.tiers.job_runner import JobRunner, MemoryCopier
from pdserve.kv.tiers.jobs import Maintain
from pdserve.kv.tiers.virtual_io import LaneRate, VirtualTierIo
from pdserve.messages.kv_events import BlockRemoved, BlockStored
from pdserve.messages.tiers import TierSpec
from pdserve.token_ids import token_ids
from tests.engine_core.test_random_schedules import BLOCK, MAX_LEN, CoreMachine
from tests.engine_core.tiers.lives import CORNERS, TieredLife
from tests.support.seeds import is_long

if TYPE_CHECKING:
    from pdserve.engine_core.executor import ModelInfo
    from pdserve.kv.tiers.disk.records import ReadFault
    from pdserve.kv.tiers.jobs import TierJob
    from pdserve.messages.kv_events import KvEvent
    from pdserve.messages.tiers import LaneName

BLOCK_BYTES = BLOCK * 16
LANES: tuple[LaneName, ...] = ("d2h", "h2d", "disk_read", "disk_write")


class TieredMachine(CoreMachine):
    """A core whose lower tiers take simulated time."""

    @initialize(
        blocks=st.integers(12, 40),
        batch=st.integers(6, 40),
        sequences=st.integers(1, 6),
        frames=st.integers(2, 60),
        records=st.sampled_from([0, 0, 24, 200]),
        faults=st.sampled_from([0.0, 0.0, 0.1, 0.5]),
        slowness=st.sampled_from([0.0, 0.01, 1.0]),
        dice=st.integers(0, 1000),
    )
    def start(
        self,
        blocks: int,
        batch: int,
        sequences: int,
        frames: int,
        records: int,
        faults: float,
        slowness: float,
        dice: int,
    ) -> None:
        """`records`: room of the disk; `faults`: share of the jobs that fail; `slowness`: seconds
        of each job."""
        self.frames, self.records = frames, records
        self.faults, self.slowness, self.dice = faults, slowness, random.Random(dice)
        self.lower: dict[str, set[bytes]] = {"host": set(), "disk": set()}
        super().start(blocks, batch, True, sequences, 100, 0)

    def prepare(self) -> None:
        disk = {"disk_path": "memory", "disk_bytes": 1 << 20} if self.records else {}
        tiers = TierSpec(host_bytes=self.frames * BLOCK_BYTES, **disk)  # type: ignore[arg-type]
        self.spec = msgspec.structs.replace(self.spec, tiers=tiers)
        self.core._open_storage = self.open_storage  # type: ignore[method-assign]
        # Steps take no time here, but a fetch has to be worth it.
        self.core._step_cost.prefill = lambda length, cached=0: float(length - cached)  # type: ignore[method-assign]

    def open_storage(self, spec: TierSpec, info: ModelInfo, secret_id: bytes) -> TierStorage:
        arena = BlockMemory(self.frames, (BLOCK_BYTES,))
        region = self.executor.region()
        assert region.view is not None
        view, device = arena.view(), region.view
        disk = None
        if self.records:
            disk = DiskTier.in_memory(self.records * 8192, BLOCK_BYTES, clock=self.clock)
        copier = MemoryCopier(device, view, BLOCK_BYTES)
        runner = JobRunner(copier, arena, None if disk is None else disk.files)
        rates = {lane: LaneRate(1e9, self.slowness) for lane in LANES}
        io = VirtualTierIo(self.clock, BLOCK_BYTES, runner, rates)
        io.fault = self.fault

        def free() -> None:
            copier.close()
            arena.close()

        return TierStorage(self.frames, BLOCK_BYTES, io, disk, runner, free)

    def fault(self, job: TierJob) -> tuple[str, ReadFault, int] | None:
        if isinstance(job, Maintain) or self.dice.random() >= self.faults:
            return None
        reason = cast("ReadFault", self.dice.choice(["io", "crc", "absent", "format"]))
        return "the dice say so", reason, self.dice.choice([EIO, ENOSPC])

    def fetching(self) -> int:
        onboarder = self.core._onboarder
        assert onboarder is not None
        held = {block for one in onboarder._onboardings.values() for block in one.shared}
        return onboarder.in_flight + len(held)

    def take_lower(self, event: KvEvent) -> None:
        index = self.lower[event.tier]
        match event:
            case BlockStored():
                assert not index & set(event.hashes), "a block was stored twice"
                index |= set(event.hashes)
            case BlockRemoved():
                assert index >= set(event.hashes), "a block was removed that was not there"
                index -= set(event.hashes)
            case _:
                index.clear()

    @rule(seconds=st.sampled_from([0.001, 0.02, 0.6]))
    def let_copies_end(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.one_step()

    @precondition(lambda self: self.engine.ledgers)
    @rule(data=st.data(), more=st.lists(st.integers(3, 12), max_size=6), count=st.integers(1, 8))
    def come_again(self, data: st.DataObject, more: list[int], count: int) -> None:
        """Conversations that go on after others have taken the device."""
        before = data.draw(st.sampled_from([one.request for one in self.engine.ledgers.values()]))
        prompt = (before.prompt + token_ids(more))[: MAX_LEN - 2]
        for _ in range(2):
            self.engine.submit(msgspec.structs.replace(before, prompt=prompt, block_names=b""))
        self.crowd(6, 3, 12)
        self.engine.submit(msgspec.structs.replace(before, prompt=prompt, block_names=b""))
        for _ in range(count):
            self.let_copies_end(0.02)

    @invariant()
    def the_tiers_are_whole(self) -> None:
        assert self.core._tiers is not None
        self.core._tiers.lower.check()

    def next_wake(self) -> float | None:
        """What waits for a disk that takes nothing may wait for ever."""
        assert self.core._tiers is not None
        at, due = self.core.wake_at(), self.core._tiers.lower._jobs.io.next_due()
        return at if due is not None or not self.core._tiers.lower._spilling.no_room else None

    def run_to_the_end(self) -> None:
        tiers = self.core._tiers
        assert tiers is not None
        super().run_to_the_end()
        held = tiers.lower.host.counts()
        assert held.claimed == held.filling == held.leaving == 0
        assert self.lower["host"] == set(tiers.lower.host.names())
        if tiers.lower.disk is not None:
            assert self.lower["disk"] == set(tiers.lower.disk.hashes())
        for lane in tiers.lower._jobs._lanes.values():
            assert lane.backlog == 0


@pytest.mark.timeout(900)  # minutes in long mode
def test_random_lives_with_tiers_keep_every_rule() -> None:
    lives = settings(max_examples=1500 if is_long() else 8, stateful_step_count=30)
    run_state_machine_as_test(TieredMachine, settings=lives)


@pytest.mark.timeout(900)  # minutes in long mode
def test_lives_that_begin_with_full_tiers_keep_every_rule_and_visit_every_corner(
    seed: int, long: bool
) -> None:
    seen: Counter[str] = Counter()
    for number in range(1500 if long else 100):
        life = TieredLife(seed + number)
        life.run()
        seen += life.seen
        if not long and number >= 7 and seen.keys() >= CORNERS:
            break
    assert {corner for corner in CORNERS if not seen[corner]} == set()

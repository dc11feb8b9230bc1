"""Stores device blocks on the host, and makes room for them there.

Device blocks that will soon be evicted are copied to frames of the host arena, if admission takes
them. A frame is in no index while a job writes to it. A frame whose block is on the device too, and
stays there for a while, is a *shadow*, which is the first to be evicted: so placement is exclusive
in effect.

Pure but for the jobs: times are arguments.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from pdserve.kv.tiers.jobs import CopyOut
from pdserve.kv.tiers.moves.job_lanes import parts
from pdserve.messages.kv_events import BlockRemoved, BlockStored, KvEvent, PoolCleared

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.ids import Seconds
    from pdserve.kv.tiers.admission import HostAdmission
    from pdserve.kv.tiers.block import TierBlock
    from pdserve.kv.tiers.moves.indexes import TierIndexes
    from pdserve.kv.tiers.moves.job_lanes import JobLanes
    from pdserve.kv.tiers.moves.spilling import Spilling

__all__ = ["DeviceBlock", "DevicePool", "Storing"]

OUT_SHARE: Final = 0.25
"""Most of the arena, as a share, that copies from the device fill at once."""


class DevicePool(Protocol):
    """The device pool, as far as the tiers below look at it; `BlockPool` is one."""

    def __contains__(self, block_hash: object) -> bool:
        """Whether the device has a block with this hash."""
        ...

    def generation(self, block: int) -> int:
        """As `BlockPool.generation`."""
        ...


@dataclass(frozen=True, slots=True)
class DeviceBlock:
    """A device block to be stored, and what it holds."""

    block: int
    generation: int
    content: TierBlock


class Storing:
    """What leaves the device for the host, and the host for what comes."""

    def __init__(
        self,
        tiers: TierIndexes,
        jobs: JobLanes,
        spilling: Spilling,
        device: DevicePool,
        admission: HostAdmission,
    ) -> None:
        self._tiers = tiers
        self._host = tiers.host
        self._jobs = jobs
        self._spilling = spilling
        self._device = device
        self._admission = admission
        self._refused: set[bytes] = set()
        """Device blocks that admission has refused; each is asked about once for each use."""
        self.under_way: set[bytes] = set()
        """Hashes that copies from the device are under way for."""

    def wants(self, block_hash: bytes) -> bool:
        """As `LowerTiers.wants`."""
        return (
            block_hash not in self._host
            and block_hash not in self.under_way
            and block_hash not in self._refused
        )

    # ------------------------------------------------------------------ copies

    def store(self, sources: Sequence[DeviceBlock], now: Seconds, *, spare: bool) -> int:
        """As `LowerTiers.store`."""
        budget = max(1, int(OUT_SHARE * self._host.capacity)) - len(self.under_way)
        chosen: list[DeviceBlock] = []
        frames: list[int] = []
        refused = 0
        for source in sources:
            if len(chosen) >= budget:
                break
            if not self.wants(source.content.hash):
                continue
            if not self._admission.admits(source.content, now):
                refused += 1
                self._refused.add(source.content.hash)
                continue
            frame = self.frame(now, spare=spare)
            if frame is None:
                break
            chosen.append(source)
            frames.append(frame)
        self._tiers.host_counts.refused += refused
        for part in parts(len(chosen), self._jobs.copy_blocks):
            self._copy_out(chosen[part], frames[part], now, spare=spare)
        return len(chosen) + refused

    def _copy_out(
        self, chosen: list[DeviceBlock], frames: list[int], now: Seconds, *, spare: bool
    ) -> None:
        self.under_way.update(source.content.hash for source in chosen)
        self._jobs.submit(
            CopyOut(
                [source.block for source in chosen],
                frames,
                [source.content for source in chosen],
                [source.generation for source in chosen],
                spare,
            ),
            now,
        )

    def stored(self, job: CopyOut, error: str, now: Seconds) -> None:
        """A copy ended. What it copied counts if the device's block has not changed meanwhile."""
        for block, frame, content, generation in zip(
            job.blocks, job.frames, job.contents, job.generations, strict=True
        ):
            self.under_way.discard(content.hash)
            changed = self._device.generation(block) != generation
            if error or changed:
                self._host.abandon(frame)
                continue
            if self._host.commit(frame, content, now):
                self._host.shadow(content.hash, on=job.spare)
                self._entered(content, now)

    def received(self, frame: int, content: TierBlock, now: Seconds) -> None:
        """A frame that this tier did not fill itself has a block."""
        if self._host.commit(frame, content, now):
            self._entered(content, now)

    def _entered(self, content: TierBlock, now: Seconds) -> None:
        """A block is valid on the host."""
        self._tiers.host_counts.stored += 1
        if content.pin_until > now:
            self._host.pin(content.hash, content.pin_until)
        self._spilling.offer(content.hash, now)

    # ------------------------------------------------------------------ room

    def frame(self, now: Seconds, *, spare: bool = False) -> int | None:
        """A free frame, or that of the first block in order of eviction; None if all are in use.
        With `spare`, a block is evicted only if it is on disk."""
        frame = self._host.reserve()
        if frame is None and (not spare or self._is_spare(now)) and self._evict(1, now):
            frame = self._host.reserve()
        return frame

    def _is_spare(self, now: Seconds) -> bool:
        if self._tiers.disk is None:
            return False
        victims = self._host.victims(1, now)
        return bool(victims) and self._tiers.saved(victims[0])

    def _evict(self, count: int, now: Seconds) -> int:
        victims = self._host.victims(count, now)
        for block_hash in victims:
            age = self._host.age(block_hash, now)
            shadow = self._host.is_shadow(block_hash)
            self._host.evict(block_hash)
            if not shadow:
                self._evicted(block_hash, age, now)
        return len(victims)

    def _evicted(self, block_hash: bytes, age: Seconds, now: Seconds) -> None:
        if block_hash in self._device:
            # It was stored ahead of its eviction there, and others are worth more. Stored
            # again, it would only push out the next one of its kind.
            self._refused.add(block_hash)
        self._tiers.host_counts.evicted += 1
        self._admission.evicted(block_hash, age, now)
        if self._tiers.disk is not None and not self._tiers.saved(block_hash):
            self._tiers.disk_counts.unsaved += 1

    # ------------------------------------------------------------------ uses and the device

    def keep(self, block_hash: bytes, now: Seconds) -> None:
        """As `LowerTiers.keep`."""
        if block_hash in self._host and self._host.is_shadow(block_hash):
            self._host.touch(block_hash, now, shadow=False)

    def used(self, block_hash: bytes, turns: int, now: Seconds) -> None:
        """As `LowerTiers.used`."""
        self._refused.discard(block_hash)
        if block_hash in self._host:
            self._host.touch(block_hash, now, turns, shadow=True)
            self._spilling.offer(block_hash, now)
        if self._tiers.disk is not None:
            self._tiers.disk.touch(block_hash, now)

    def follow(self, events: Sequence[KvEvent], now: Seconds) -> None:
        """As `LowerTiers.follow`."""
        for event in events:
            match event:
                case BlockStored():
                    for block_hash in event.hashes:
                        if block_hash in self._host:
                            self._host.shadow(block_hash, on=True)
                case BlockRemoved():
                    for block_hash in event.hashes:
                        self._left_device(block_hash, now)
                case PoolCleared():
                    self._refused.clear()
                    for block_hash in self._host.names():
                        self._host.shadow(block_hash, on=False)

    def _left_device(self, block_hash: bytes, now: Seconds) -> None:
        self._refused.discard(block_hash)
        if block_hash in self._host:
            self._host.touch(block_hash, now, shadow=False)
        elif not self._tiers.saved(block_hash):
            self._tiers.host_counts.unsaved += 1

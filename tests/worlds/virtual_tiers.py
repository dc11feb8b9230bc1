"""Host and disk tiers of a simulated worker: in memory, in virtual time, and faulty on demand.

Bytes are really copied, so a wrong block changes tokens.
"""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass, field
from errno import EIO, ENOSPC
from typing import TYPE_CHECKING, Final

from pdserve.engine_core.tiers.core_tiers import TierStorage, frames_of
from pdserve.kv.storage import BlockMemory
from pdserve.kv.tiers.disk.tier import DiskTier
from pdserve.kv.tiers.job_runner import JobRunner, MemoryCopier
from pdserve.kv.tiers.jobs import CopyIn, CopyOut, Fill, Spill
from pdserve.kv.tiers.virtual_io import LaneRate, VirtualTierIo

if TYPE_CHECKING:
    from collections.abc import Mapping
    from random import Random

    from pdserve.clock import Clock
    from pdserve.engine_core.core import EngineCore
    from pdserve.engine_core.executor import ModelInfo
    from pdserve.ids import Seconds
    from pdserve.kv.tiers.disk.records import ReadFault
    from pdserve.kv.tiers.jobs import TierJob
    from pdserve.messages.tiers import LaneName, TierSpec
    from pdserve.testing.scripted import ScriptedExecutor

__all__ = ["TierFaults", "blocks_below", "names_below", "open_virtual_tiers", "what_tiers_hold"]

_RATES: Final[Mapping[LaneName, LaneRate]] = {
    "d2h": LaneRate(1e8, 0.001),
    "h2d": LaneRate(1e8, 0.001),
    "disk_read": LaneRate(1e7, 0.01),
    "disk_write": LaneRate(1e7, 0.02),
}
"""Slow enough that faults fall into the middle of a read."""
_READ_FAULTS: Final[tuple[ReadFault, ...]] = ("io", "crc", "absent", "format")


@dataclass(slots=True)
class TierFaults:
    """What is wrong with the tiers of one worker now."""

    random: Random
    reads: float = 0.0
    """Share of the reads from disk that fail, in any way that they can."""
    writes: float = 0.0
    """Share of the writes that fail, though the disk has room."""
    full: float = 0.0
    """Above 0: the disk takes nothing."""
    copies: float = 0.0
    """Share of the copies between device and host that fail."""
    slow: Seconds = 0.0
    """More time that each read takes."""
    counts: Counter[str] = field(default_factory=Counter)
    """Jobs that a fault has met, by its name."""

    def __call__(self, job: TierJob) -> tuple[str, ReadFault, int] | None:
        """Says how a job fails; None: it does not."""
        if isinstance(job, Fill) and self._meets("reads"):
            reason = self.random.choice(_READ_FAULTS)
            return "this read fails", reason, EIO if reason == "io" else 0
        if isinstance(job, Spill) and self._meets("full"):
            return "the disk is full", "io", ENOSPC
        if isinstance(job, Spill) and self._meets("writes"):
            return "this write fails", "io", EIO
        if isinstance(job, (CopyIn, CopyOut)) and self._meets("copies"):
            return "this copy fails", "io", 0
        return None

    def _meets(self, name: str) -> bool:
        share: float = getattr(self, name)
        met = share > 0.0 and self.random.random() < share
        self.counts[name] += met
        return met


class _FaultyTierIo(VirtualTierIo):
    """A disk that may be slow. Reads of one moment are late together, not one after the other: soon
    after such a time the disk is as it was."""

    faults: TierFaults

    def submit(self, job: TierJob) -> None:
        late = self.faults.slow if isinstance(job, Fill) else 0.0
        if not late:
            super().submit(job)
            return
        self.faults.counts["slow"] += 1
        now = self._clock.now()
        due = self._free["disk_read"] = max(self._free.get("disk_read", now), now + late)
        self._number += 1
        heapq.heappush(self._jobs, (due, self._number, due - now, job))


def open_virtual_tiers(
    executor: ScriptedExecutor,
    clock: Clock,
    faults: TierFaults,
    spec: TierSpec,
    info: ModelInfo,
    secret_id: bytes,
) -> TierStorage:
    """Stands for `core_tiers.open_storage`."""
    block = info.layout.block_bytes
    frames = frames_of(spec, block)
    arena = BlockMemory(frames, (block,))
    view, device = arena.view(), executor.region().view
    assert device is not None
    disk = DiskTier.in_memory(spec.disk_bytes, block, clock=clock) if spec.disk_path else None
    runner = JobRunner(
        MemoryCopier(device, view, block), arena, None if disk is None else disk.files
    )
    io = _FaultyTierIo(clock, block, runner, _RATES)
    io.fault = io.faults = faults

    def free() -> None:
        view.release()
        device.release()
        arena.close()

    return TierStorage(frames, block, io, disk, runner, free)


def names_below(core: EngineCore) -> dict[bytes, bytes]:
    """Hash and parent of every block on the host and on disk."""
    if core._tiers is None:
        return {}
    return {block.hash: block.parent for block in core._tiers.blocks()}


def blocks_below(core: EngineCore) -> int:
    """Number of blocks on the host and on disk, together."""
    if core._tiers is None:
        return 0
    lower = core._tiers.lower
    return len(lower.host) + (0 if lower.disk is None else len(lower.disk.hashes()))


def what_tiers_hold(core: EngineCore) -> str:
    """What an idle core's fetches and tiers still hold, in words; empty: nothing."""
    onboarder = core._onboarder
    if onboarder is not None and (len(onboarder) or onboarder.in_flight):
        return f"{len(onboarder)} fetches of {onboarder.in_flight} blocks"
    if core._tiers is None:
        return ""
    lower = core._tiers.lower
    lower.check()
    counts = lower.host.counts()
    if counts.claimed or counts.filling or counts.leaving:
        return f"frames: {counts}"
    if lower.disk is not None and (held := lower.disk.counts()).claims:
        return f"{held.claims} claims of records on disk"
    return ""

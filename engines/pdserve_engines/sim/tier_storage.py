"""Makes simulated tiers: production code decides, lanes take simulated time.

With content, blocks are copied between the pool's memory and an arena when a job ends. Without,
only indexes and times exist, so a tier of many gigabytes costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.engine_core.tiers.core_tiers import TierStorage, frames_of
from pdserve.kv.storage import BlockMemory
from pdserve.kv.tiers.disk.tier import DiskTier
from pdserve.kv.tiers.job_runner import JobRunner, MemoryCopier
from pdserve.kv.tiers.virtual_io import LaneRate, VirtualTierIo

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdserve.clock import Clock
    from pdserve.engine_core.executor import ModelInfo
    from pdserve.messages.tiers import LaneName, TierSpec
    from pdserve_engines.sim.executor import SimExecutor
    from pdserve_engines.sim.settings import SimOptions

__all__ = ["simulated_storage"]


def simulated_storage(
    spec: TierSpec, info: ModelInfo, executor: SimExecutor, clock: Clock
) -> TierStorage:
    """The storage of a simulated worker's tiers. Block sizes are those of the simulated model."""
    block_bytes = info.layout.block_bytes
    frames = frames_of(spec, block_bytes)
    rates = _rates(executor.options)
    disk = None
    if spec.disk_path:
        disk = DiskTier.in_memory(spec.disk_bytes, block_bytes, clock=clock)
    if not executor.options.content:
        io = VirtualTierIo(clock, block_bytes, None, rates)
        return TierStorage(frames, block_bytes, io, disk)
    region = executor.region()
    view = region.view
    assert view is not None
    size = region.size // region.blocks
    arena = BlockMemory(frames, (size,))
    frames_view = arena.view()
    files = None if disk is None else disk.files
    copier = MemoryCopier(view, frames_view, size)
    runner = JobRunner(copier, arena, files)

    def free() -> None:
        copier.close()
        arena.close()

    io = VirtualTierIo(clock, block_bytes, runner, rates)
    return TierStorage(frames, block_bytes, io, disk, runner, free)


def _rates(options: SimOptions) -> Mapping[LaneName, LaneRate]:
    return {
        "d2h": LaneRate(options.host_bandwidth, 5e-5),
        "h2d": LaneRate(options.host_bandwidth, 5e-5),
        "disk_read": LaneRate(options.disk_read_bandwidth, 2e-4),
        "disk_write": LaneRate(options.disk_write_bandwidth, 2e-4),
    }

"""Counts what happens to the blocks of one tier, and makes the tier's record of statistics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdserve.kv.tiers.disk.format import record_bytes
from pdserve.messages.tiers import TierStats

if TYPE_CHECKING:
    from pdserve.ids import Seconds
    from pdserve.kv.tiers.disk.index import DiskIndex
    from pdserve.kv.tiers.host_index import HostIndex
    from pdserve.kv.tiers.moves.indexes import TierIndexes
    from pdserve.kv.tiers.moves.sharing import SharedCounts

__all__ = ["TierCounts", "disk_stats", "host_stats"]


@dataclass(slots=True)
class TierCounts:
    """Counters of one tier; they only grow."""

    stored: int = 0
    evicted: int = 0
    refused: int = 0
    unsaved: int = 0
    hit_blocks: int = 0
    failed: int = 0
    read_bytes: int = 0
    written_bytes: int = 0


def host_stats(
    host: HostIndex, counts: TierCounts, block_size: int, retention: Seconds, trouble: str
) -> TierStats:
    """The record of the host tier."""
    held = host.counts()
    return TierStats(
        tier=1,
        blocks_total=host.capacity,
        blocks_valid=held.valid,
        blocks_filling=held.filling,
        blocks_claimed=held.claimed,
        blocks_stored=counts.stored,
        blocks_evicted=counts.evicted,
        blocks_refused=counts.refused,
        blocks_unsaved=counts.unsaved,
        hit_tokens=counts.hit_blocks * block_size,
        failed=counts.failed,
        read_bytes=counts.read_bytes,
        written_bytes=counts.written_bytes,
        retention=retention,
        trouble=trouble,
    )


def disk_stats(
    tiers: TierIndexes, disk: DiskIndex, others: SharedCounts, block_size: int, now: Seconds
) -> TierStats:
    """The record of the disk tier. `others`: what was read of other workers' blocks."""
    held, counts = disk.counts(), tiers.disk_counts
    return TierStats(
        tier=2,
        blocks_total=held.block_slots or held.capacity // record_bytes(tiers.block_bytes),
        blocks_valid=held.blocks,
        blocks_filling=held.writing,
        blocks_claimed=held.claims,
        blocks_stored=counts.stored,
        blocks_evicted=held.evicted,
        blocks_refused=counts.refused,
        blocks_unsaved=counts.unsaved,
        hit_tokens=counts.hit_blocks * block_size,
        failed=counts.failed,
        read_bytes=counts.read_bytes,
        written_bytes=counts.written_bytes,
        retention=held.retention,
        trouble=disk.trouble.text(now),
        shared_blocks=0 if tiers.shared is None else len(tiers.shared),
        shared_read=others.read,
        shared_failed=others.failed,
    )

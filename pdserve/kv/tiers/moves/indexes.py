"""Looks blocks up on the host and on disk, for everything that moves them.

It takes no claims and decides nothing. `LowerTiers` owns it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pdserve.kv.tiers.moves.counts import TierCounts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.ids import Bytes
    from pdserve.kv.tiers.disk.index import DiskIndex
    from pdserve.kv.tiers.disk.sealed_reader import SealedReader, SharedPlace
    from pdserve.kv.tiers.host_index import HostIndex
    from pdserve.messages.tiers import SourceName

__all__ = ["TierIndexes"]


@dataclass(slots=True, eq=False)
class TierIndexes:
    """What is on the host and on disk, and the counters of both."""

    host: HostIndex
    disk: DiskIndex | None
    block_bytes: Bytes
    shared: SealedReader | None = None
    """What other workers have sealed below the directory of the disk; None: it is not looked at."""
    disk_paused: bool = False
    """While True nothing is looked up on disk, read or written."""
    host_counts: TierCounts = field(default_factory=TierCounts)
    disk_counts: TierCounts = field(default_factory=TierCounts)

    @property
    def open_disk(self) -> DiskIndex | None:
        """The disk, if it may be used now."""
        return None if self.disk_paused else self.disk

    @property
    def open_shared(self) -> SealedReader | None:
        """What other workers have, if it may be used now."""
        return None if self.open_disk is None else self.shared

    def on_disk(self, block_hash: bytes) -> bool:
        """Return whether a block can be read from disk now, also from another worker's part."""
        disk = self.open_disk
        if disk is None:
            return False
        return block_hash in disk or (self.shared is not None and block_hash in self.shared)

    def shared_place(self, block_hash: bytes) -> SharedPlace | None:
        """Where another worker has a block that can be read now."""
        return None if self.open_shared is None else self.open_shared.place(block_hash)

    def saved(self, block_hash: bytes) -> bool:
        """Return whether a block is on the own disk, which may be paused."""
        return self.disk is not None and block_hash in self.disk

    def parent(self, block_hash: bytes) -> bytes | None:
        """As `LowerTiers.parent`."""
        found = self.host.block(block_hash)
        if found is None and self.disk is not None:
            found = self.disk.block(block_hash)
        if found is None and (place := self.shared_place(block_hash)) is not None:
            found = place.block
        return None if found is None else found.parent

    def run(self, hashes: Sequence[bytes], start: int) -> list[SourceName]:
        """As `LowerTiers.run`."""
        found: list[SourceName] = []
        for index in range(start, len(hashes)):
            if hashes[index] in self.host:
                found.append("host")
            elif self.on_disk(hashes[index]):
                found.append("disk")
            else:
                break
        return found

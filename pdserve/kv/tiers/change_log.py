"""Collects what enters and leaves a lower tier, and makes KV events of it."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from pdserve.messages.kv_events import BlockRemoved, BlockStored, KvEvent, PoolCleared

if TYPE_CHECKING:
    from pdserve.kv.tiers.block import TierBlock
    from pdserve.messages.kv_events import Tier

__all__ = ["ChangeLog"]


class _Run:
    """Stored blocks of one chain, without gaps."""

    def __init__(self, block: TierBlock) -> None:
        self.hashes = deque([block.hash])
        self.parent = block.parent

    def extend(self, block: TierBlock) -> bool:
        """Adds the block that follows the run, or the one before it; False: it is neither."""
        if block.parent == self.hashes[-1]:
            self.hashes.append(block.hash)
        elif block.hash == self.parent:
            self.hashes.appendleft(block.hash)
            self.parent = block.parent
        else:
            return False
        return True


class ChangeLog:
    """The changes of one tier since the last `drain`.

    Consecutive changes become one event where they can. A device pool evicts leaves first, so
    blocks of a chain arrive in either direction; an event names parents before their children.
    """

    def __init__(self, tier: Tier) -> None:
        self._tier: Tier = tier
        self._changes: list[_Run | list[bytes] | None] = []
        """Runs of stored blocks, lists of removed ones; None: the tier was cleared."""

    def stored(self, block: TierBlock) -> None:
        """The block can be read from now on."""
        last = self._changes[-1] if self._changes else None
        if not (isinstance(last, _Run) and last.extend(block)):
            self._changes.append(_Run(block))

    def removed(self, block_hash: bytes) -> None:
        """The block can no longer be read."""
        last = self._changes[-1] if self._changes else None
        if isinstance(last, list):
            last.append(block_hash)
        else:
            self._changes.append([block_hash])

    def cleared(self) -> None:
        """No block of the tier can be read any longer. What happened before does not matter."""
        self._changes = [None]

    def drain(self) -> list[KvEvent]:
        """The events since the last call, in order. The owner calls this after every step."""
        changes, self._changes = self._changes, []
        return [self._event(change) for change in changes]

    def _event(self, change: _Run | list[bytes] | None) -> KvEvent:
        if change is None:
            return PoolCleared(tier=self._tier)
        if isinstance(change, list):
            return BlockRemoved(hashes=change, tier=self._tier)
        return BlockStored(hashes=list(change.hashes), parent=change.parent, tier=self._tier)

"""Remembers whose cached blocks are and who may have them, in a core without lower tiers.

A block that another worker absorbs takes its owner's mark along, by which that worker finds it when
the owner's blocks are dropped. Blocks of requests that share nothing beyond the device (cache scope
`never`) are not given away. With lower tiers their cleaner knows both. The engine core owns this.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

from pdserve.kv.tiers.cleaner import BlockUse
from pdserve.messages.kv_events import BlockRemoved, PoolCleared

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdserve.engine_core.scheduler.sequence import Sequence as EngineSequence
    from pdserve.messages.kv_events import KvEvent

__all__ = ["BlockUses", "DeviceUses"]

_PLAIN: Final = BlockUse()


class BlockUses(Protocol):
    """What is known of the last use of cached blocks."""

    def use(self, block_hash: bytes) -> BlockUse:
        """The last use of a block on the device."""
        ...

    def absorbed(self, hashes: Sequence[bytes], use: BlockUse) -> None:
        """These blocks have come from another worker, where they were used like this."""
        ...


class DeviceUses:
    """Implements `BlockUses`; only what differs from a plain use takes memory."""

    def __init__(self, mark: Callable[[str], bytes]) -> None:
        """`mark` returns the mark of a cache salt's owner."""
        self._mark = mark
        self._uses: dict[bytes, BlockUse] = {}

    def left(self, sequence: EngineSequence) -> None:
        """A sequence is about to give back its blocks."""
        request = sequence.request
        private = request.cache_scope == "never"
        mark = self._mark(request.cache_salt) if request.cache_salt else b""
        use = BlockUse(root=mark, private=private)
        if use != _PLAIN or self._uses:
            self.absorbed(sequence.hashes[: sequence.num_committed], use)

    def absorbed(self, hashes: Sequence[bytes], use: BlockUse) -> None:
        if use != _PLAIN:
            self._uses.update(dict.fromkeys(hashes, use))
            return
        for block_hash in hashes:
            self._uses.pop(block_hash, None)

    def use(self, block_hash: bytes) -> BlockUse:
        return self._uses.get(block_hash, _PLAIN)

    def follow(self, events: Sequence[KvEvent]) -> None:
        """Forget blocks that have left the device."""
        for event in events if self._uses else ():
            if isinstance(event, BlockRemoved):
                for block_hash in event.hashes:
                    self._uses.pop(block_hash, None)
            elif isinstance(event, PoolCleared):
                self._uses.clear()

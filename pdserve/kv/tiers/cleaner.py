"""Chooses which blocks of the device pool are copied to lower tiers, ahead of their eviction.

Two kinds of blocks are chosen. Those that are evicted next, when few blocks are free: for them room
is made on the host. A prompt takes all its blocks at once, so as many are stored ahead as one step
has evicted lately. And while nothing is computed, every block that a sequence has left, if the
host has frames to spare, so that a worker that ends early loses little. An allocation never waits
for a copy: what was not copied in time is lost, and counted.

It knows how blocks were used last (`BlockUse`), which the pool does not. Pure; the engine core owns
it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from pdserve.kv.tiers.block import TierBlock
from pdserve.kv.tiers.lower_tiers import DeviceBlock, DevicePool
from pdserve.messages.kv_events import BlockRemoved, PoolCleared

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.ids import Seconds
    from pdserve.kv.tiers.lower_tiers import LowerTiers
    from pdserve.messages.kv_events import KvEvent

__all__ = ["BlockUse", "CleanedPool", "Cleaner"]

WINDOW: Final = 64
"""Blocks that are stored ahead of eviction at least."""

AHEAD: Final = 2.5
"""Steps whose allocations are covered."""

MOST_AHEAD: Final = 0.25
"""Most of the pool that is stored ahead, as a share: what both tiers have is room lost."""

BURST_HALVES: Final[Seconds] = 60.0
"""Seconds after which half as many blocks are expected to be evicted at once."""

LOOK_FAR: Final[Seconds] = 1.0
"""Seconds after which all blocks that a burst may evict are looked at again. Between, it is done
when a quarter of them is gone."""

BACKGROUND: Final = 32
"""Most blocks of one step that are stored without need."""


@dataclass(frozen=True, slots=True)
class BlockUse:
    """What the last request that used a block says about it."""

    turns: int = 1
    root: bytes = b""
    pin_until: Seconds = 0.0
    private: bool = False
    """True: it is never stored below the device."""


_UNKNOWN: Final = BlockUse()


class CleanedPool(DevicePool, Protocol):
    """A device pool that tells what it evicts next; `BlockPool` does."""

    @property
    def num_blocks(self) -> int: ...

    @property
    def block_size(self) -> int: ...

    @property
    def free(self) -> int:
        """Blocks that hold nothing."""
        ...

    def oldest(self, count: int) -> list[tuple[int, bytes]]:
        """Up to `count` blocks that are evicted next, in order, each with its hash."""
        ...

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """The blocks of the leading hashes that are cached."""
        ...

    def parent(self, block: int) -> bytes:
        """Hash of the block before a cached one."""
        ...


@dataclass(slots=True)
class _Burst:
    """How many blocks a step may evict, from what steps have evicted."""

    evicted: int = 0
    """Blocks since the last step."""
    _size: float = 0.0
    _gone: int = 0
    """Blocks since all of them were looked at."""
    _at: Seconds = 0.0
    _looked: Seconds = 0.0

    def next(self, most: int, now: Seconds) -> int:
        """A step is over: the number of blocks to look at, `most` at most; 0: they have been."""
        fading = 0.5 ** (max(0.0, now - self._at) / BURST_HALVES)
        self._size = max(self._size * fading, min(self.evicted, most))
        self._gone += self.evicted
        self.evicted, self._at = 0, now
        if self._gone * 4 < self._size and now - self._looked < LOOK_FAR:
            return 0
        self._gone, self._looked = 0, now
        return int(self._size)


class Cleaner:
    """Stores the blocks of one device pool on one set of lower tiers."""

    def __init__(self, pool: CleanedPool, tiers: LowerTiers) -> None:
        self._pool = pool
        self._tiers = tiers
        self._uses: dict[bytes, BlockUse] = {}
        """Of blocks on the device."""
        self._left: deque[bytes] = deque()
        """Blocks for the background, oldest first."""
        self._burst = _Burst()

    # ------------------------------------------------------------------ use

    def left(self, hashes: Sequence[bytes], use: BlockUse, now: Seconds) -> None:
        """A request gives back the blocks with these hashes, a whole chain."""
        if not hashes:
            return
        uses, tiers = self._uses, self._tiers
        # A chain is touched from its tail, so that a leaf is evicted before its parent.
        for block_hash in reversed(hashes):
            uses[block_hash] = use
            tiers.used(block_hash, use.turns, now)
        if not use.private:
            self._left.extend(block_hash for block_hash in hashes if tiers.wants(block_hash))
            while len(self._left) > self._pool.num_blocks:
                self._left.popleft()

    def came(self, hashes: Sequence[bytes], use: BlockUse) -> None:
        """Blocks with these hashes have come to the device for a request, which does not have them
        yet."""
        for block_hash in hashes:
            self._uses[block_hash] = use

    def follow(self, events: Sequence[KvEvent]) -> None:
        """Forget how blocks were used that have left the device. One that has come back meanwhile
        keeps its use: it may be private."""
        pool = self._pool
        for event in events:
            if isinstance(event, BlockRemoved):
                self._burst.evicted += len(event.hashes)
                for block_hash in event.hashes:
                    if block_hash not in pool:
                        self._uses.pop(block_hash, None)
            elif isinstance(event, PoolCleared):
                self._uses = {name: use for name, use in self._uses.items() if name in pool}
                self._left = deque(name for name in self._left if name in pool)

    # ------------------------------------------------------------------ choosing

    def clean(self, soon: int, now: Seconds, *, busy: bool = False) -> None:
        """Begin the copies of this step. `soon`: blocks that a step may allocate; `busy`: there is
        something to compute, from which nothing without need is to take time."""
        # More than the host can hold would push out what was stored a moment ago.
        window = max(WINDOW, int(AHEAD * soon))
        burst = self._burst.next(int(MOST_AHEAD * self._pool.num_blocks), now)
        window = min(max(window, burst), self._tiers.host.capacity // 2) - self._pool.free
        if window > 0:
            self._store(self._pool.oldest(window), now)
        if self._left and not busy:
            self._store_left(now)

    def _store(self, blocks: Sequence[tuple[int, bytes]], now: Seconds) -> None:
        for _, name in blocks:
            self._tiers.keep(name, now)
        wanted = [self._source(block, name) for block, name in blocks if self._wants(name)]
        if wanted:
            self._tiers.store(wanted, now)

    def _wants(self, block_hash: bytes) -> bool:
        return self._tiers.wants(block_hash) and not self.use(block_hash).private

    def use(self, block_hash: bytes) -> BlockUse:
        """The last use of a block on the device."""
        return self._uses.get(block_hash, _UNKNOWN)

    def _source(self, block: int, block_hash: bytes) -> DeviceBlock:
        pool, use = self._pool, self.use(block_hash)
        content = TierBlock(
            block_hash,
            pool.parent(block),
            turns=use.turns,
            tokens=pool.block_size,
            pin_until=use.pin_until,
            root=use.root,
        )
        return DeviceBlock(block, pool.generation(block), content)

    def lend(self, hashes: Sequence[bytes], now: Seconds) -> int:
        """Begin to copy leading blocks of these to the host, because a peer wants them; returns
        how many. It ends before a block that is not on the device, is private, or is on the host
        or on its way there."""
        wanted: list[DeviceBlock] = []
        for block, name in zip(self._pool.match(hashes), hashes, strict=False):
            if not self._wants(name):
                break
            wanted.append(self._source(block, name))
        self._tiers.store(wanted, now)
        return next(
            (
                place
                for place, source in enumerate(wanted)
                if not self._tiers.comes(source.content.hash)
            ),
            len(wanted),
        )

    def _store_left(self, now: Seconds) -> None:
        """Store blocks without need, while the host has frames to spare."""
        for _ in range(BACKGROUND):
            if not self._left:
                return
            block_hash = self._left[0]
            found = self._pool.match((block_hash,))
            if found and self._wants(block_hash):
                stored = self._tiers.store([self._source(found[0], block_hash)], now, spare=True)
                if not stored:
                    return
            self._left.popleft()

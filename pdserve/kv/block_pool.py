"""Tracks the blocks of one KV pool: who holds each, and which free ones hold reusable content.

A block is in exactly one of four states:

    free         holds nothing worth keeping
    cached       without references, but with a known hash: reusable as prefix, evictable at once
    used         referenced by one or more sequences (or leases); may have a hash too
    quarantined  a peer may still write to it: not usable until that is impossible

Blocks with a hash form trees: each continues the block with its parent hash. Eviction takes the
least recently used *leaf*. That needs no search: a holder of a block also holds all blocks before
it, and `release` frees the tail first, so in order of release every cached block comes after all
its cached descendants. One ordered list has both the age and the leaf order.

The pool knows no bytes, tokens, sequences or time, and is not thread-safe. Its owner is one engine
core (or one node, for a tier that the node keeps), which also drains the events.

KV transfers use it at both ends: blocks that a peer fills are reserved, then committed when they
have been verified, or quarantined when their attempt was aborted.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from pdserve.messages.kv_events import BlockRemoved, BlockStored, KvEvent, PoolCleared, Tier

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

__all__ = ["BlockPool", "PoolCounts"]


@dataclass(frozen=True, slots=True)
class PoolCounts:
    """How many blocks are in each state."""

    free: int
    cached: int
    used: int
    quarantined: int


class BlockPool:
    """Reference counts, prefix cache and events of `num_blocks` blocks, ids 0 to num_blocks - 1.

    Every operation takes time in proportion to the blocks it names, not to the pool's size. Misuse
    (a block that is not held, a hash that is taken) raises ValueError before anything has changed.
    """

    def __init__(self, num_blocks: int, block_size: int, *, tier: Tier = "device") -> None:
        """`block_size` is in tokens. Errors: ValueError unless both are positive."""
        if num_blocks <= 0 or block_size <= 0:
            raise ValueError("a pool needs at least one block of at least one token")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.tier: Tier = tier
        self._refs = [0] * num_blocks
        self._hash: list[bytes | None] = [None] * num_blocks
        self._parent: list[bytes] = [b""] * num_blocks
        self._generation = [0] * num_blocks
        self._by_hash: dict[bytes, int] = {}
        self._children: dict[bytes, int] = {}
        """Number of blocks that continue the block with this hash, or begin at this root."""
        # Ids are popped from the end, so a fresh pool hands them out in ascending order.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._quarantined: set[int] = set()
        self._events: list[KvEvent] = []
        self._in_order = True
        """A named block is held, and kept, no longer than the one before it."""
        self.releases = 0
        """Grows whenever blocks became available: what did not fit need not be tried before."""

    # ------------------------------------------------------------------ reading

    @property
    def available(self) -> int:
        """Number of blocks that `reserve` can hand out now: free and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def free(self) -> int:
        """Number of blocks that `reserve` can hand out without eviction."""
        return len(self._free)

    def counts(self) -> PoolCounts:
        """Number of blocks by state; the four add up to `num_blocks`."""
        free, cached, quarantined = len(self._free), len(self._cached), len(self._quarantined)
        return PoolCounts(free, cached, self.num_blocks - free - cached - quarantined, quarantined)

    def match(self, hashes: Iterable[bytes]) -> list[int]:
        """Blocks of the longest leading run of `hashes` that is in the pool. Takes no reference."""
        found: list[int] = []
        by_hash = self._by_hash
        for block_hash in hashes:
            block = by_hash.get(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def __contains__(self, block_hash: object) -> bool:
        """Whether a block with this hash can be matched."""
        return block_hash in self._by_hash

    def names(self) -> dict[bytes, bytes]:
        """Every hash that can be matched, with its parent's. O(all), for audits."""
        return {name: self._parent[block] for name, block in self._by_hash.items()}

    def name(self, block: int) -> bytes | None:
        """Hash of `block`; None if it has none."""
        return self._hash[block]

    def parent(self, block: int) -> bytes:
        """Hash before that of `block`, which has a hash; for a chain's first block its root."""
        return self._parent[block]

    def generation(self, block: int) -> int:
        """A number that grows whenever `block` loses its hash. While it stays the same, the content
        of a block with a hash does not change, even if nobody holds the block."""
        return self._generation[block]

    def oldest(self, count: int) -> list[tuple[int, bytes]]:
        """The next `count` blocks that eviction would take, in order, with their hashes. Takes no
        reference."""
        found: list[tuple[int, bytes]] = []
        for block in islice(self._cached, count):
            block_hash = self._hash[block]
            assert block_hash is not None
            found.append((block, block_hash))
        return found

    def references(self, block: int) -> int:
        """Number of holders of `block`."""
        return self._refs[block]

    # ------------------------------------------------------------------ taking and giving back

    def reserve(
        self, count: int, *, shared: Sequence[int] = (), spare: int = 0
    ) -> list[int] | None:
        """Take `count` fresh blocks, and one more reference to each of `shared`; None, and no
        change, if there are too few.

        `shared` are blocks in use or just returned by `match`, in chain order. At least `spare`
        blocks stay available. If the free blocks do not suffice, cached ones are evicted, oldest
        leaf first.
        """
        cached = self._cached
        waking = sum(block in cached for block in shared) if shared else 0
        if count + spare > len(self._free) + len(cached) - waking:
            return None
        if shared:
            self.acquire(shared)
        free, refs = self._free, self._refs
        if count > len(free):
            self._evict(count - len(free))
        fresh = [free.pop() for _ in range(count)]
        for block in fresh:
            refs[block] = 1
        return fresh

    def acquire(self, blocks: Sequence[int]) -> None:
        """Take one more reference to each of `blocks`, which are in use or cached."""
        refs, cached = self._refs, self._cached
        for block in blocks:
            if not refs[block] and block not in cached:
                raise ValueError(f"block {block} is not in use and not cached: it cannot be shared")
        for block in blocks:
            if not refs[block]:
                del cached[block]
            refs[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Give back one reference to each of `blocks`, listed in token order.

        A block without holders stays cached if it has a hash, else it is free.
        """
        refs, hashes = self._refs, self._hash
        for block in blocks:
            if not refs[block]:
                raise ValueError(f"block {block} is not held")
        for block in reversed(blocks):
            refs[block] -= 1
            if refs[block]:
                continue
            if hashes[block] is None:
                self._free.append(block)
            else:
                self._cached[block] = None
        self.releases += 1

    def release_early(self, blocks: Sequence[int]) -> None:
        """`release`, for blocks that are not worth keeping: they are evicted next, the leaf first.
        A block that has another holder, or that another block continues, is kept as usual, and so
        are those before it."""
        self.release(blocks)
        hashes, cached, children = self._hash, self._cached, self._children
        early: list[int] = []
        for block in reversed(blocks):
            block_hash = hashes[block]
            if block_hash is None:
                continue
            if block not in cached or children.get(block_hash, 0) != bool(early):
                break
            early.append(block)
        for block in reversed(early):
            cached.move_to_end(block, last=False)

    # ------------------------------------------------------------------ content

    def commit(self, block: int, block_hash: bytes, parent: bytes) -> int:
        """Give a full block, which the caller holds, its hash; returns the block to use.

        `parent` is the hash of the block before it, which the caller holds too, or the chain's
        root. If another block has this content already, the caller's reference moves to that block,
        which is returned, and its own copy is freed: so no content is stored twice.
        """
        if not self._refs[block]:
            raise ValueError(f"block {block} is not held")
        if self._hash[block] is not None:
            raise ValueError(f"block {block} has been committed before")
        twin = self._by_hash.get(block_hash)
        if twin is not None:
            self.acquire((twin,))
            self.release((block,))
            return twin
        self._hash[block] = block_hash
        self._parent[block] = parent
        self._by_hash[block_hash] = block
        self._children[parent] = self._children.get(parent, 0) + 1
        self._note_stored([block_hash], parent)
        return block

    def commit_run(
        self, blocks: Sequence[int], hashes: Sequence[bytes], parent: bytes
    ) -> list[int]:
        """`commit` for consecutive blocks, the first of which follows `parent`; returns the blocks
        to use. A block that has its hash already keeps it. After misuse, the blocks before the
        misused one stay committed."""
        refs, names, parents, by_hash = self._refs, self._hash, self._parent, self._by_hash
        children = self._children
        used: list[int] = []
        fresh: list[bytes] = []
        before = parent
        for block, block_hash in zip(blocks, hashes, strict=True):
            if names[block] is None and block_hash not in by_hash and refs[block]:
                names[block] = block_hash
                parents[block] = parent
                by_hash[block_hash] = block
                children[parent] = children.get(parent, 0) + 1
                fresh.append(block_hash)
            else:
                self._note_stored(fresh, before)
                fresh, before = [], block_hash
                if names[block] != block_hash:
                    block = self.commit(block, block_hash, parent)
            used.append(block)
            parent = block_hash
        self._note_stored(fresh, before)
        return used

    def clear(self) -> int:
        """Free all cached blocks; returns their number. Blocks in use keep their hashes."""
        count = len(self._cached)
        cleared = count == len(self._by_hash)
        removed = [self._forget(block) for block in self._cached]
        self._free.extend(self._cached)
        self._cached.clear()
        if cleared:
            self._events.append(PoolCleared(tier=self.tier))
        elif removed:
            self._events.append(BlockRemoved(hashes=removed, tier=self.tier))
        return count

    def drop(self, hashes: Collection[bytes]) -> int:
        """Free the cached blocks with these hashes; returns their number. The caller names whole
        chains, so that no block is left without its parent. Blocks in use keep their hashes."""
        dropped = [block for block in self._cached if self._hash[block] in hashes]
        for block in dropped:
            del self._cached[block]
        self._free.extend(dropped)
        removed = [self._forget(block) for block in dropped]
        if removed:
            self._note_removed(removed)
        return len(removed)

    def unname(self) -> None:
        """Remove all hashes: cached blocks become free, and blocks in use may be committed again
        with other hashes. O(num_blocks)."""
        self._free.extend(self._cached)
        self._cached.clear()
        self._by_hash.clear()
        self._children.clear()
        self._hash = [None] * self.num_blocks
        self._generation = [number + 1 for number in self._generation]
        self.releases += 1
        self._events.append(PoolCleared(tier=self.tier))

    def disown(self, blocks: Sequence[int]) -> None:
        """Remove the hashes of these blocks, because their content is not to be trusted. The caller
        holds them; other holders keep them."""
        named = [block for block in blocks if self._hash[block] is not None]
        if any(self._refs[block] > 1 for block in named):
            # Another holder may commit blocks after such a block, whose hash then names another
            # block or none.
            self._in_order = False
        if named:
            self._note_removed([self._forget(block) for block in named])

    def _evict(self, count: int) -> None:
        """Turn the `count` oldest cached leaves into free blocks."""
        removed = []
        for _ in range(count):
            block, _none = self._cached.popitem(last=False)
            removed.append(self._forget(block))
            self._free.append(block)
        self._note_removed(removed)

    def _forget(self, block: int) -> bytes:
        """Take a block's name away; returns it."""
        block_hash = self._hash[block]
        assert block_hash is not None
        self._hash[block] = None
        self._generation[block] += 1
        del self._by_hash[block_hash]
        parent = self._parent[block]
        self._children[parent] -= 1
        if not self._children[parent]:
            del self._children[parent]
        return block_hash

    # ------------------------------------------------------------------ quarantine

    def quarantine(self, blocks: Sequence[int]) -> None:
        """Give up blocks that a peer may still write to: the caller's reference ends.

        Only the caller may hold them, and they must never have been committed: content that a peer
        still writes has no hash.
        """
        for block in blocks:
            if self._refs[block] != 1 or self._hash[block] is not None:
                raise ValueError(f"block {block} is shared, has a hash or is not held")
        for block in blocks:
            self._refs[block] = 0
            self._quarantined.add(block)

    def unquarantine(self, blocks: Sequence[int]) -> None:
        """The peer can no longer write: the blocks are free again."""
        for block in blocks:
            if block not in self._quarantined:
                raise ValueError(f"block {block} is not quarantined")
        self._quarantined.difference_update(blocks)
        self._free.extend(blocks)
        self.releases += 1

    # ------------------------------------------------------------------ events

    def drain_events(self) -> list[KvEvent]:
        """The events since the last call, in order. The owner calls this after every step, so that
        one step bounds the list."""
        events, self._events = self._events, []
        return events

    def _note_stored(self, hashes: list[bytes], parent: bytes) -> None:
        """Notes stored blocks of one chain, without gaps. Blocks that follow the last noted ones
        join their event."""
        if not hashes:
            return
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockStored) and last.hashes[-1] == parent:
            last.hashes.extend(hashes)
            return
        self._events.append(BlockStored(hashes=hashes, parent=parent, tier=self.tier))

    def _note_removed(self, hashes: list[bytes]) -> None:
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockRemoved):
            last.hashes.extend(hashes)
            return
        self._events.append(BlockRemoved(hashes=hashes, tier=self.tier))

    # ------------------------------------------------------------------ self-audit

    def check(self) -> None:
        """Raise AssertionError unless every block is in exactly one state. O(num_blocks)."""
        free, cached, quarantined = set(self._free), set(self._cached), self._quarantined
        used = {block for block, count in enumerate(self._refs) if count}
        assert len(free) == len(self._free), "a block is free twice"
        assert min(self._refs) >= 0, "a reference count is negative"
        total = len(free) + len(cached) + len(used) + len(quarantined)
        union = free | cached | used | quarantined
        assert total == self.num_blocks, (
            f"free {len(free)} + cached {len(cached)} + used {len(used)} + quarantined "
            f"{len(quarantined)} != {self.num_blocks}"
        )
        assert len(union) == total, "a block is in two states"
        self._check_names(free | quarantined, cached)

    def _check_names(self, nameless: set[int], cached: set[int]) -> None:
        named = {block for block, name in enumerate(self._hash) if name is not None}
        assert not named & nameless, "a free or quarantined block has a hash"
        assert cached <= named, "a cached block has no hash"
        assert {self._hash[block]: block for block in named} == self._by_hash
        assert Counter(self._parent[block] for block in named) == self._children
        if not self._in_order:
            return
        age = {block: position for position, block in enumerate(self._cached)}
        for block in named:
            parent = self._by_hash.get(self._parent[block])
            if parent is None or self._refs[parent]:
                continue
            assert not self._refs[block], f"block {block} is held without its parent {parent}"
            assert age[block] < age[parent], f"block {parent} would be evicted before its child"

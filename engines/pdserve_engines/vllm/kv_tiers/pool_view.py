"""Reads vLLM's block pool as a `Cleaner` needs it: what is evicted next, and under which name.

vLLM keeps blocks that nobody uses in a list, in the order of their eviction. A block is known here
from the end of a request on that had it; vLLM's own name of it, noted then, tells later whether it
still holds the same. Memory grows with the pool.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["PoolView"]


@dataclass(frozen=True, slots=True)
class _Known:
    hash: bytes
    parent: bytes
    key: Any
    """vLLM's name of the block's content."""


class PoolView:
    """The blocks of one vLLM engine that requests have left; a `cleaner.DevicePool`."""

    def __init__(self, pool: Any, block_size: int) -> None:
        """`pool`: vLLM's `BlockPool`."""
        self._pool = pool
        self.block_size = block_size
        self._known: dict[int, _Known] = {}
        self._places: dict[bytes, int] = {}
        self._cleared = 0

    @property
    def num_blocks(self) -> int:
        """Blocks that can hold KV."""
        return max(1, int(self._pool.num_gpu_blocks) - 1)

    @property
    def free(self) -> int:
        """Blocks that hold nothing."""
        unused = int(self._pool.get_num_free_blocks())
        return max(0, unused - len(self._pool.cached_block_hash_to_block))

    def left(self, blocks: Sequence[int], hashes: Sequence[bytes], root: bytes) -> int:
        """A request has these blocks, and ends. `hashes` are those of its chain, from the first
        block on, which follows `root`. Returns how many leading ones are cached."""
        parent = root
        for count, (block, name) in enumerate(zip(blocks, hashes, strict=False)):
            key = self._pool.blocks[block].block_hash
            if key is None:
                return count
            self._know(block, _Known(name, parent, key))
            parent = name
        return min(len(blocks), len(hashes))

    def _know(self, block: int, known: _Known) -> None:
        before = self._known.get(block)
        if before is not None and self._places.get(before.hash) == block:
            del self._places[before.hash]
        self._known[block] = known
        self._places[known.hash] = block

    def _current(self, block: int) -> _Known | None:
        """What is known of a block; None: it holds something else by now."""
        known = self._known.get(block)
        if known is None or self._pool.blocks[block].block_hash != known.key:
            return None
        return known

    def __contains__(self, block_hash: object) -> bool:
        return isinstance(block_hash, bytes) and bool(self.match((block_hash,)))

    def holds(self, blocks: Sequence[int]) -> bool:
        """Return whether these blocks hold what they held when they were last noted."""
        return all(self._current(block) is not None for block in blocks)

    def oldest(self, count: int) -> list[tuple[int, bytes]]:
        """Up to `count` blocks that vLLM evicts next, in order, each with its hash."""
        found: list[tuple[int, bytes]] = []
        for block in self._unused(count + self.free):
            known = self._current(block)
            if known is not None:
                found.append((block, known.hash))
        return found[:count]

    def _unused(self, most: int) -> Iterator[int]:
        """The first blocks of vLLM's list of unused ones."""
        block = self._pool.free_block_queue.fake_free_list_head.next_free_block
        while most and block is not None and block.next_free_block is not None:
            yield int(block.block_id)
            block = block.next_free_block
            most -= 1

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """The blocks of the leading hashes that are known and still cached."""
        found: list[int] = []
        for name in hashes:
            block = self._places.get(name)
            known = None if block is None else self._current(block)
            if block is None or known is None or known.hash != name:
                break
            found.append(block)
        return found

    def parent(self, block: int) -> bytes:
        """Hash of the block before one that `oldest` or `match` has returned."""
        return self._known[block].parent

    def generation(self, block: int) -> int:
        """The same for all blocks until they are cleared: a copy that was ordered comes before
        vLLM reuses its block (`step_io`)."""
        return self._cleared

    def clear(self) -> None:
        """What the blocks hold is of no use any more, also where it is being copied."""
        self._cleared += 1
        self._known.clear()
        self._places.clear()

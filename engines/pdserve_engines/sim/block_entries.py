"""Keeps what tokens write to the sim engine's KV blocks: in one pool, or in the pools of ranks.

A token writes an *entry*, and may read it again. With `kv_heads` each head has a part of its own
that follows from the entry, stored as keys and values are: [k|v][head][token][dim]. So a head
that is missing, stale, or on the wrong rank is noticed when the entry is read: what is read then is
no entry of any token. It knows bytes; `block_content` knows sequences.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Protocol

from pdserve.engine_core.kv_transfer.kv_region import (
    layouts_of_ranks,
    region_in_memory,
    region_of_ranks,
)
from pdserve.kv.storage import BlockMemory
from pdserve.transfer.copy_plan import heads_on
from pdserve_engines.sim.tokens import ENTRY_BYTES

if TYPE_CHECKING:
    from pdserve.messages.transfer import RankKvLayout
    from pdserve.transfer.base import Region

__all__ = ["BlockEntries", "HeadEntries", "PlainEntries", "head_part", "make_entries"]

_HALF = ENTRY_BYTES // 2
"""Bytes of a head's keys, or values, for one token."""


class BlockEntries(Protocol):
    """Entries by block and slot (the token's place in the block)."""

    def write(self, block: int, slot: int, entry: bytes) -> None:
        """Store the entry of a token."""
        ...

    def read(self, block: int, slot: int) -> bytes:
        """The entry of a token; other bytes if what is stored is no entry."""
        ...

    def joined(self, block: int, count: int) -> bytes | memoryview:
        """The entries of the first `count` tokens of a block."""
        ...

    def copy(self, source: int, destination: int) -> None:
        """Copy all entries of one block to another."""
        ...

    def region(self, layout: RankKvLayout) -> Region:
        """The memory for transfers; `layout` is that of the whole model."""
        ...

    def close(self) -> None:
        """Free the memory. Idempotent."""
        ...


class PlainEntries:
    """One pool without heads, in which entries lie one after the other."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._memory = BlockMemory(num_blocks, (block_size, ENTRY_BYTES))

    def write(self, block: int, slot: int, entry: bytes) -> None:
        self._memory.view(block)[slot * ENTRY_BYTES : (slot + 1) * ENTRY_BYTES] = entry

    def read(self, block: int, slot: int) -> bytes:
        return bytes(self._memory.view(block)[slot * ENTRY_BYTES : (slot + 1) * ENTRY_BYTES])

    def joined(self, block: int, count: int) -> memoryview:
        return self._memory.view(block)[: count * ENTRY_BYTES]

    def copy(self, source: int, destination: int) -> None:
        self._memory.copy(source, destination)

    def region(self, layout: RankKvLayout) -> Region:
        return region_in_memory(layout, self._memory)

    def close(self) -> None:
        self._memory.close()


class HeadEntries:
    """KV heads that are divided among the pools of tensor-parallel ranks."""

    def __init__(self, num_blocks: int, block_size: int, heads: int, ranks: int) -> None:
        """Raises `PlanError` if so many ranks cannot hold the heads evenly."""
        self._size = block_size
        self._held = [heads_on(heads, ranks, rank) for rank in range(ranks)]
        self._memories = [
            BlockMemory(num_blocks, (2, len(held), block_size, _HALF)) for held in self._held
        ]

    def write(self, block: int, slot: int, entry: bytes) -> None:
        for held, memory in zip(self._held, self._memories, strict=True):
            view = memory.view(block)
            for place, head in enumerate(held):
                part = head_part(entry, head)
                for kv, at in enumerate(self._offsets(held, place, slot)):
                    view[at : at + _HALF] = part[kv * _HALF : (kv + 1) * _HALF]

    def read(self, block: int, slot: int) -> bytes:
        parts = [
            (head, b"".join(bytes(view[at : at + _HALF]) for at in places))
            for held, memory in zip(self._held, self._memories, strict=True)
            for view in (memory.view(block),)
            for place, head in enumerate(held)
            for places in (self._offsets(held, place, slot),)
        ]
        _, entry = parts[0]
        if all(part == head_part(entry, head) for head, part in parts):
            return entry
        return blake2b(b"".join(part for _, part in parts), digest_size=ENTRY_BYTES).digest()

    def joined(self, block: int, count: int) -> bytes:
        return b"".join(self.read(block, slot) for slot in range(count))

    def copy(self, source: int, destination: int) -> None:
        for memory in self._memories:
            memory.copy(source, destination)

    def region(self, layout: RankKvLayout) -> Region:
        layouts = layouts_of_ranks(layout, len(self._memories))
        return region_of_ranks(
            layout, [region_in_memory(*pair) for pair in zip(layouts, self._memories, strict=True)]
        )

    def close(self) -> None:
        for memory in self._memories:
            memory.close()

    def _offsets(self, held: range, place: int, slot: int) -> tuple[int, int]:
        """Where a token's keys and values of the head at this place are in a rank's block."""
        keys, values = place, len(held) + place
        return (keys * self._size + slot) * _HALF, (values * self._size + slot) * _HALF


def head_part(entry: bytes, head: int) -> bytes:
    """What a head stores for a token: the entry itself for the first head."""
    if not head:
        return entry
    return blake2b(entry, digest_size=ENTRY_BYTES, salt=head.to_bytes(8, "little")).digest()


def make_entries(num_blocks: int, block_size: int, heads: int, ranks: int) -> BlockEntries:
    """The memory of a model with so many KV heads on so many ranks; 0 heads: a single one, which is
    not divided. Raises `PlanError` as `HeadEntries` does."""
    if not heads:
        return PlainEntries(num_blocks, block_size)
    return HeadEntries(num_blocks, block_size, heads, ranks)

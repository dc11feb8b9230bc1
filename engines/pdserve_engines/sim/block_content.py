"""Simulates the content of KV blocks, so that a wrong block changes the sim engine's output.

`DigestContent` keeps bytes (`block_entries`). Each token writes an entry to its block that depends
on the entry before, as attention does. When a sequence becomes active (admitted, resumed, forked),
all entries of its blocks are read and digested; each step reads the last entry and one earlier
block again. So a block that is lost, stale, mixed up or overwritten changes the output. `NoContent`
keeps none, for replays of long prompts: tokens follow from a few prompt tokens. The executor owns
one of the two.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Protocol

from pdserve.engine_core.kv_transfer.kv_region import region_in_memory
from pdserve.kv.storage import BlockMemory
from pdserve_engines.sim.tokens import (
    chosen,
    digested,
    entry_of,
    lora_key,
    start_of,
    vector_of,
    walk,
    word_at,
)

if TYPE_CHECKING:
    from pdserve.engine_core.executor import ScheduledChunk
    from pdserve.engine_core.scheduler.sequence import Sequence
    from pdserve.ids import SequenceKey, TokenId
    from pdserve.messages.transfer import RankKvLayout
    from pdserve.transfer.base import Region
    from pdserve_engines.sim.block_entries import BlockEntries

__all__ = ["BlockContent", "DigestContent", "NoContent"]


class BlockContent(Protocol):
    """Simulated content of one pool's blocks."""

    def region(self, layout: RankKvLayout) -> Region:
        """The storage that peers read and write; `layout` is that of the whole model."""
        ...

    def copy(self, source: int, destination: int) -> None:
        """Copy the content of one block to another."""
        ...

    def write(self, chunk: ScheduledChunk) -> None:
        """Write a chunk's tokens to its blocks."""
        ...

    def next_token(self, sequence: Sequence) -> TokenId:
        """The next token, after all tokens of a sequence have been written."""
        ...

    def vector(self, sequence: Sequence) -> bytes:
        """The embedding of a prompt that has been written completely (`Finish.embedding`)."""
        ...

    def foreseen(self, sequence: Sequence, steps: int) -> list[TokenId]:
        """The next `steps` tokens, or fewer up to a stop id; empty if they cannot be known in
        advance."""
        ...

    def release(self, sequence: Sequence) -> None:
        """Drop the sequence's state."""
        ...

    def close(self) -> None:
        """Free all memory. Idempotent."""
        ...


class NoContent:
    """Blocks without content; a few bytes per token stand for it when blocks are transferred."""

    def __init__(self, words: tuple[TokenId, ...], num_blocks: int, block_size: int) -> None:
        self._shape = (num_blocks, (2, block_size))
        self._memory: BlockMemory | None = None
        self._words = words
        self._some = frozenset(words)
        self._starts: dict[SequenceKey, int] = {}

    def region(self, layout: RankKvLayout) -> Region:
        """Storage that is allocated at the first call."""
        if self._memory is None:
            self._memory = BlockMemory(*self._shape)
        return region_in_memory(layout, self._memory)

    def copy(self, source: int, destination: int) -> None:
        pass

    def write(self, chunk: ScheduledChunk) -> None:
        pass

    def next_token(self, sequence: Sequence) -> TokenId:
        start, position = self._start(sequence), len(sequence.tokens) - sequence.prompt_len
        if position < sequence.request.sampling.min_tokens:
            return word_at(self._words, start, position, sequence.request.sampling)
        return self._words[(start + position) % len(self._words)]

    def vector(self, sequence: Sequence) -> bytes:
        request = sequence.request
        content = array("I", sequence.tokens).tobytes() + request.lora.encode()
        return vector_of(content, request.pooling)

    def _start(self, sequence: Sequence) -> int:
        key = (sequence.handle, sequence.choice)
        start = self._starts.get(key)
        if start is None:
            start = self._starts[key] = start_of(sequence.request, sequence.choice)
        return start

    def foreseen(self, sequence: Sequence, steps: int) -> list[TokenId]:
        start, position = self._start(sequence), len(sequence.tokens) - sequence.prompt_len
        sampling = sequence.request.sampling
        if position < sampling.min_tokens and not self._some.isdisjoint(
            sampling.stop_token_ids + sampling.eos_token_ids
        ):
            return []
        tokens = walk(self._words, start, position, steps)
        stops = sequence.stop_ids
        if stops and not stops.isdisjoint(self._some):
            for index, token in enumerate(tokens):
                if token in stops:
                    return tokens[: index + 1]
        return tokens

    def release(self, sequence: Sequence) -> None:
        self._starts.pop((sequence.handle, sequence.choice), None)

    def close(self) -> None:
        self._starts.clear()
        if self._memory is not None:
            self._memory.close()
            self._memory = None


@dataclass(slots=True)
class _Digest:
    """State of an active sequence: what it has read and written."""

    position: int
    """Number of tokens included in `state`."""
    state: blake2b = field(default_factory=blake2b)
    blocks: list[bytes] = field(default_factory=list)
    """Digests of the sequence's full blocks."""
    turn: int = 0
    lora: bytes = b""
    """Key of the sequence's adapter."""


class DigestContent:
    """Blocks with content, in memory that can be exported to peers."""

    def __init__(self, words: tuple[TokenId, ...], entries: BlockEntries, block_size: int) -> None:
        """`entries`: the memory, which is closed with this object."""
        self.mismatches = 0
        """Number of blocks whose content had changed when it was checked."""
        self._words = words
        self._entries = entries
        self._size = block_size
        self._active: dict[SequenceKey, _Digest] = {}

    def region(self, layout: RankKvLayout) -> Region:
        return self._entries.region(layout)

    def copy(self, source: int, destination: int) -> None:
        self._entries.copy(source, destination)

    def write(self, chunk: ScheduledChunk) -> None:
        sequence, size = chunk.sequence, self._size
        digest = self._activated(sequence, chunk.start)
        before = self._read(sequence, chunk.start - 1) if chunk.start else b""
        for position in range(chunk.start, chunk.start + chunk.count):
            before = entry_of(sequence.tokens[position], position, before, digest.lora)
            block, slot = sequence.blocks[position // size], position % size
            self._entries.write(block, slot, before)
            digest.state.update(before)
            if slot == size - 1:
                digest.blocks.append(self._digest_of(block))
        digest.position = chunk.start + chunk.count

    def _activated(self, sequence: Sequence, start: int) -> _Digest:
        """The sequence's digest of everything before `start`; a new one is computed from its
        blocks."""
        key = (sequence.handle, sequence.choice)
        digest = self._active.get(key)
        if digest is None or digest.position != start:
            digest = self._active[key] = _Digest(start, lora=lora_key(sequence.request.lora))
            full, rest = divmod(start, self._size)
            for block in sequence.blocks[:full]:
                digest.state.update(self._entries.joined(block, self._size))
                digest.blocks.append(self._digest_of(block))
            if rest:
                digest.state.update(self._entries.joined(sequence.blocks[full], rest))
        return digest

    def _read(self, sequence: Sequence, position: int) -> bytes:
        block, slot = sequence.blocks[position // self._size], position % self._size
        return self._entries.read(block, slot)

    def _digest_of(self, block: int) -> bytes:
        return blake2b(self._entries.joined(block, self._size), digest_size=8).digest()

    def next_token(self, sequence: Sequence) -> TokenId:
        digest = self._active[(sequence.handle, sequence.choice)]
        self._recheck(sequence, digest)
        number = digested(digest.state.digest(), sequence.request, sequence.choice)
        position = len(sequence.tokens) - sequence.prompt_len
        return chosen(self._words, number, sequence.request.sampling, position)

    def vector(self, sequence: Sequence) -> bytes:
        digest = self._active[(sequence.handle, sequence.choice)]
        self._recheck(sequence, digest)
        return vector_of(digest.state.digest(), sequence.request.pooling)

    def _recheck(self, sequence: Sequence, digest: _Digest) -> None:
        """Check one block per step, in turn, to find content that changed under a running
        sequence."""
        if not digest.blocks:
            return
        index = digest.turn % len(digest.blocks)
        digest.turn += 1
        found = self._digest_of(sequence.blocks[index])
        if found != digest.blocks[index]:
            self.mismatches += 1
            digest.state.update(found)

    def foreseen(self, sequence: Sequence, steps: int) -> list[TokenId]:
        """Empty: tokens depend on the bytes."""
        return []

    def release(self, sequence: Sequence) -> None:
        self._active.pop((sequence.handle, sequence.choice), None)

    def close(self) -> None:
        self._active.clear()
        self._entries.close()

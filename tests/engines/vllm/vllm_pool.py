"""A model of vLLM's block pool that emits its events, and a mirror of what routers hear of them.

Read in vLLM 0.32.0, `v1/core/block_pool.py`: `cache_full_blocks` reports a run of blocks with the
hash of the block before it, every copy of a block anew; `_remove_cached_block_hashes` reports each
copy that goes; `reset_prefix_cache` refuses while a request holds a block, and else reports that
all is cleared. `extra_keys` carry the adapter's name and, for a first block, the salt.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pdserve.messages.kv_events import BlockRemoved, BlockStored, KvEvent, PoolCleared

if TYPE_CHECKING:
    import random


def stored(**fields: Any) -> Any:
    """vLLM's record of stored blocks; the names of classes are what `BlockNames` reads."""
    defaults: dict[str, Any] = {
        "parent_block_hash": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": None,
        "group_idx": 0,
    }
    return type("BlockStored", (), defaults | fields)()


def removed(*keys: Any, medium: str | None = "GPU", group_idx: int | None = 0) -> Any:
    """vLLM's record of removed blocks."""
    fields = {"block_hashes": list(keys), "medium": medium, "group_idx": group_idx}
    return type("BlockRemoved", (), fields)()


def cleared() -> Any:
    """vLLM's record of a pool that was cleared."""
    return type("AllBlocksCleared", (), {})()


@dataclass
class Sequence:
    """One request of vLLM: its tokens, and what its first block is salted with."""

    tokens: list[int]
    salt: str
    lora: str | None = None
    cached: int = 0
    """Number of blocks that are cached."""
    held: list[int] = field(default_factory=list)
    """Numbers of its physical blocks, one a cached block."""


class VllmPool:
    """Blocks, who holds them, and what each is named by vLLM."""

    def __init__(self, rng: random.Random, block_size: int) -> None:
        self.block_size = block_size
        self.events: list[Any] = []
        self._rng = rng
        self._names: dict[int, Any] = {}
        """Physical block -> vLLM's name of it."""
        self._users: dict[int, int] = {}
        self._next = 0

    @property
    def names(self) -> set[Any]:
        """What is cached, by vLLM's names."""
        return set(self._names.values())

    def name(self, sequence: Sequence, number: int) -> Any:
        """vLLM's name of a sequence's block: a hash of the chain, here the chain itself."""
        head = tuple(sequence.tokens[: (number + 1) * self.block_size])
        return hash((head, sequence.salt, sequence.lora))

    def begin(self, sequence: Sequence) -> None:
        """Take the longest cached prefix, as a new request or a preempted one does."""
        sequence.cached, sequence.held = 0, []
        by_name = {name: block for block, name in self._names.items()}
        for number in range(len(sequence.tokens) // self.block_size):
            block = by_name.get(self.name(sequence, number))
            if block is None or self._rng.random() < 0.1:  # two that begin in one step find nothing
                break
            self._use(sequence, block)

    def _use(self, sequence: Sequence, block: int) -> None:
        self._users[block] = self._users.get(block, 0) + 1
        sequence.held.append(block)
        sequence.cached += 1

    def compute(self, sequence: Sequence, most: int) -> None:
        """Cache up to `most` more blocks of a sequence, and report them in one event."""
        first = sequence.cached
        last = min(first + most, len(sequence.tokens) // self.block_size)
        if first >= last:
            return
        names = [self.name(sequence, number) for number in range(first, last)]
        for name in names:
            self._names[self._next] = name
            self._use(sequence, self._next)
            self._next += 1
        start, end = first * self.block_size, last * self.block_size
        lora = () if sequence.lora is None else (sequence.lora,)
        extra = [(*lora, sequence.salt) if i == 0 else lora or None for i in range(first, last)]
        self.events.append(
            stored(
                block_hashes=names,
                parent_block_hash=None if not first else self.name(sequence, first - 1),
                token_ids=sequence.tokens[start:end],
                block_size=self.block_size,
                lora_name=sequence.lora,
                extra_keys=extra,
            )
        )

    def release(self, sequence: Sequence) -> None:
        """A request ends or is preempted: its blocks stay cached, and may be evicted."""
        for block in sequence.held:
            self._users[block] -= 1
        sequence.held = []

    def evict(self) -> None:
        """Reuse one block that nobody holds."""
        free = [block for block in self._names if not self._users[block]]
        if free:
            name = self._names.pop(self._rng.choice(free))
            self.events.append(removed(name))

    def reset(self) -> bool:
        """Clear the pool, unless a block is held."""
        if any(self._users[block] for block in self._names):
            return False
        self._names.clear()
        self.events.append(cleared())
        return True

    def noise(self) -> None:
        """What other features of vLLM report: a further group of layers, a part of a block, and
        blocks of a connector."""
        tokens = [self._rng.randrange(50) for _ in range(self.block_size)]
        fields: dict[str, Any] = {"block_hashes": [self._rng.random()], "token_ids": tokens}
        fields |= {"block_size": self.block_size, "extra_keys": [("pdserve:" + "ab" * 16,)]}
        kind = self._rng.randrange(3)
        if kind == 0:
            self.events.append(stored(**fields, group_idx=1))
        elif kind == 1:
            fields |= {"token_ids": tokens[:-1], "block_size": self.block_size - 1}
            self.events.append(stored(**fields))
        else:
            self.events.append(removed(self._rng.random(), group_idx=self._rng.choice([0, 1])))

    def take(self) -> list[Any]:
        """The events since the last call."""
        events, self.events = self.events, []
        return events


class Router:
    """Hears events, and fails on a hash that is stored twice or removed without being there."""

    def __init__(self) -> None:
        self.blocks: dict[str, set[bytes]] = {}
        self.parents: dict[bytes, bytes] = {}

    def hear(self, events: list[KvEvent]) -> None:
        """Apply events in order."""
        for event in events:
            here = self.blocks.setdefault(event.tier, set())
            match event:
                case BlockStored():
                    parent = event.parent
                    for name in event.hashes:
                        assert name not in here, "stored twice"
                        here.add(name)
                        self.parents[name] = parent
                        parent = name
                case BlockRemoved():
                    assert event.hashes, "an event without blocks"
                    for name in event.hashes:
                        assert name in here, "removed what is not stored"
                        here.remove(name)
                case PoolCleared():
                    here.clear()

    @property
    def device(self) -> set[bytes]:
        """Blocks on the device."""
        return self.blocks.get("device", set())

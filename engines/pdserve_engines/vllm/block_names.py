"""Renames vLLM's KV events: its block hashes become pdserve's, so that routers know the blocks.

vLLM names a block by a hash of its own. Its events carry the tokens of new blocks and the name of
the block before them, from which pdserve's hashes are made. The root of a chain travels as the
request's `cache_salt`, which keeps blocks of tenants, adapters and secrets apart in vLLM, too.

vLLM may hold one block twice and reports each copy; routers hear only of the first one that comes
and the last one that goes. Pure: it knows no vLLM, only the fields of its events.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pdserve.blocks.hashing import block_hashes, prompt_root
from pdserve.messages.kv_events import TIERS, BlockRemoved, BlockStored, PoolCleared

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Iterator

    from pdserve.blocks.hashing import BlockHash
    from pdserve.messages.kv_events import KvEvent, Tier

__all__ = ["BlockNames"]

_SALT = "pdserve:"
"""Begins a `cache_salt` that carries a root."""

_TIERS: dict[str | None, Tier] = {None: "device", "GPU": "device", "CPU": "host", "STORAGE": "disk"}
"""vLLM's `medium` -> tier."""


class _Block:
    """One block that vLLM holds at least once."""

    __slots__ = ("copies", "name")

    def __init__(self, name: BlockHash) -> None:
        self.name = name
        self.copies: dict[Tier, int] = {}


class BlockNames:
    """The names of all blocks that one vLLM engine holds. Memory grows with its pool, not with
    its requests."""

    def __init__(self, secret: bytes, block_size: int, model: str, group: int = 0) -> None:
        """`model` is the compat hash, equal for all workers whose blocks have the same content.
        `group`: the group of layers whose blocks are named."""
        self._secret = secret
        self._block_size = block_size
        self._model = model
        self._group = group
        self._blocks: dict[Hashable, _Block] = {}

    def __len__(self) -> int:
        """Number of different blocks that are held."""
        return len(self._blocks)

    def salt(self, cache_salt: str, lora: str) -> str:
        """The `cache_salt` for vLLM of a request with this salt and adapter."""
        return _SALT + prompt_root(self._secret, self._model, cache_salt, lora).hex()

    def rekey(self, secret: bytes) -> list[KvEvent]:
        """Use another secret. Blocks that vLLM still holds are forgotten: no later request can
        reach them, since its salt differs."""
        self._secret = secret
        return self.clear()

    def clear(self) -> list[KvEvent]:
        """Forget all blocks."""
        tiers: set[Tier] = {tier for block in self._blocks.values() for tier in block.copies}
        self._blocks.clear()
        return [PoolCleared(tier=tier) for tier in TIERS if tier in tiers or tier == "device"]

    def translate(self, events: Iterable[Any]) -> list[KvEvent]:
        """Our events for vLLM's `BlockStored`, `BlockRemoved` and `AllBlocksCleared`."""
        return [ours for event in events for ours in self._one(event)]

    def _one(self, event: Any) -> Iterator[KvEvent]:
        kind = type(event).__name__
        if kind == "AllBlocksCleared":
            yield from self.clear()
        elif event.group_idx not in (None, self._group):
            return  # another group of layers, whose blocks hold a part of the same tokens
        elif kind == "BlockStored":
            yield from self._stored(event)
        elif kind == "BlockRemoved":
            yield from self._removed(event)

    def _stored(self, event: Any) -> Iterator[KvEvent]:
        parent = self._parent(event)
        if parent is None or event.block_size != self._block_size:
            return
        tier = _TIERS.get(event.medium, "remote")
        names = block_hashes(event.token_ids, self._block_size, parent=parent, secret=self._secret)
        if len(names) != len(event.block_hashes):
            return  # blocks outside of a sliding window are left out; which ones is not said
        run: list[bytes] = []
        before: bytes = parent  # of the run
        for key, name in zip(event.block_hashes, names, strict=True):
            if self._add(key, name, tier):
                run.append(name)
                continue
            if run:
                yield BlockStored(hashes=run, parent=before, tier=tier)
            run, before = [], name
        if run:
            yield BlockStored(hashes=run, parent=before, tier=tier)

    def _parent(self, event: Any) -> bytes | None:
        """Our hash of the block before; None: the chain is not known, or not made by pdserve."""
        if event.parent_block_hash is not None:
            block = self._blocks.get(event.parent_block_hash)
            return None if block is None else block.name
        extra = event.extra_keys[0] if event.extra_keys else None
        for key in extra or ():
            if isinstance(key, str) and key.startswith(_SALT):
                return bytes.fromhex(key.removeprefix(_SALT))
        return None

    def _add(self, key: Hashable, name: BlockHash, tier: Tier) -> bool:
        """Count one more copy; True if it is the first in its tier."""
        block = self._blocks.get(key)
        if block is None:
            block = self._blocks[key] = _Block(name)
        block.copies[tier] = block.copies.get(tier, 0) + 1
        return block.copies[tier] == 1

    def _removed(self, event: Any) -> Iterator[KvEvent]:
        tier = _TIERS.get(event.medium, "remote")
        gone: list[bytes] = []
        for key in event.block_hashes:
            block = self._blocks.get(key)
            if block is None or tier not in block.copies:
                continue
            block.copies[tier] -= 1
            if not block.copies[tier]:
                del block.copies[tier]
                gone.append(block.name)
            if not block.copies:
                del self._blocks[key]
        if gone:
            yield BlockRemoved(hashes=gone, tier=tier)

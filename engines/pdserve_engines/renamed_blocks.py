"""Renames blocks of an engine that names them by hashes of its own: they become pdserve's, so that
routers know them.

Events of such an engine carry the tokens of new blocks and its name of the block before them, from
which pdserve's hashes are made. The root of a chain travels as the request's `cache_salt`, which
keeps blocks of tenants, adapters and secrets apart in the engine, too. An engine may hold one block
twice and report each copy; routers hear only of the first one that comes and the last one that
goes.

Pure. It knows no engine: each adapter reads its engine's events and calls `store` and `remove`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pdserve.blocks.hashing import block_hashes, prompt_root
from pdserve.messages.kv_events import TIERS, BlockRemoved, BlockStored, PoolCleared

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Iterator, Sequence

    from pdserve.blocks.hashing import BlockHash
    from pdserve.ids import TokenId
    from pdserve.messages.kv_events import KvEvent, Tier

__all__ = ["RenamedBlocks", "root_of"]

_SALT: Final = "pdserve:"
"""Begins a `cache_salt` that carries a root."""


def root_of(salt: object) -> bytes | None:
    """The root that a `cache_salt` carries; None: pdserve has not made it."""
    if isinstance(salt, str) and salt.startswith(_SALT):
        return bytes.fromhex(salt.removeprefix(_SALT))
    return None


class _Block:
    """One block that the engine holds at least once."""

    __slots__ = ("copies", "name")

    def __init__(self, name: BlockHash) -> None:
        self.name = name
        self.copies: dict[Tier, int] = {}


class RenamedBlocks:
    """The names of all blocks that one engine holds. Memory grows with its pools, not with its
    requests."""

    def __init__(self, secret: bytes, block_size: int, model: str) -> None:
        """`model` is the compat hash, equal for all workers whose blocks have the same content."""
        self._secret = secret
        self._block_size = block_size
        self._model = model
        self._blocks: dict[Hashable, _Block] = {}

    def __len__(self) -> int:
        """Number of different blocks that are held."""
        return len(self._blocks)

    def salt(self, cache_salt: str, lora: str) -> str:
        """The engine's `cache_salt` for a request with this salt and adapter."""
        return _SALT + prompt_root(self._secret, self._model, cache_salt, lora).hex()

    def rekey(self, secret: bytes) -> list[KvEvent]:
        """Use another secret. Blocks that the engine still holds are forgotten: no later request
        can reach them, since its salt differs."""
        self._secret = secret
        return self.clear()

    def clear(self) -> list[KvEvent]:
        """Forget all blocks: the pool was cleared, or events about it were lost."""
        tiers: set[Tier] = {tier for block in self._blocks.values() for tier in block.copies}
        self._blocks.clear()
        return [PoolCleared(tier=tier) for tier in TIERS if tier in tiers or tier == "device"]

    def name_of(self, key: Hashable) -> bytes | None:
        """Our hash of a block that is held; None: it is not known."""
        block = self._blocks.get(key)
        return None if block is None else block.name

    def hashes(self, tokens: Sequence[TokenId], parent: bytes) -> list[BlockHash]:
        """Our hashes of the full blocks in `tokens`, which continue the block `parent`."""
        return block_hashes(tokens, self._block_size, parent=parent, secret=self._secret)

    def store(
        self, keys: Iterable[Hashable], names: Iterable[BlockHash], parent: bytes, tier: Tier
    ) -> Iterator[KvEvent]:
        """Count a copy of each block of a run that continues `parent`; yields what is new in the
        tier. `keys` are the engine's names, `names` ours."""
        run: list[bytes] = []
        before = parent  # of the run
        for key, name in zip(keys, names, strict=False):
            if self._add(key, name, tier):
                run.append(name)
                continue
            if run:
                yield BlockStored(hashes=run, parent=before, tier=tier)
            run, before = [], name
        if run:
            yield BlockStored(hashes=run, parent=before, tier=tier)

    def remove(self, keys: Iterable[Hashable], tier: Tier) -> Iterator[KvEvent]:
        """Count one copy less of each block; yields those that have left the tier. Unknown ones
        are ignored."""
        gone = [name for key in keys if (name := self._release(key, tier))]
        if gone:
            yield BlockRemoved(hashes=gone, tier=tier)

    def _add(self, key: Hashable, name: BlockHash, tier: Tier) -> bool:
        """Count one more copy; True if it is the first in its tier."""
        block = self._blocks.get(key)
        if block is None:
            block = self._blocks[key] = _Block(name)
        block.copies[tier] = block.copies.get(tier, 0) + 1
        return block.copies[tier] == 1

    def _release(self, key: Hashable, tier: Tier) -> bytes | None:
        """Count one copy less; the block's name if it was the last one in its tier."""
        block = self._blocks.get(key)
        if block is None or tier not in block.copies:
            return None
        block.copies[tier] -= 1
        if block.copies[tier]:
            return None
        del block.copies[tier]
        if not block.copies:
            del self._blocks[key]
        return block.name

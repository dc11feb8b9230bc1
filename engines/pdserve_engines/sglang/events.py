"""Reads SGLang's KV events and renames their blocks, so that routers know them. Imports no SGLang.

Batches come over a socket that may lose some; `BatchOrder` finds gaps by their numbers. `decode`
reads a batch. `NamedBlocks` makes pdserve's hashes from the tokens in the events: SGLang names a
block by a hash of its own, which serves only as a key. The root of a chain travels as the request's
`cache_salt`, which keeps blocks of tenants, adapters and secrets apart in SGLang, too.

Pure: sockets are `event_feed`'s.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import msgspec

from pdserve.blocks.hashing import block_hashes, prompt_root
from pdserve.messages.kv_events import BlockRemoved, BlockStored, PoolCleared

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from pdserve.blocks.hashing import BlockHash
    from pdserve.ids import TokenId
    from pdserve.messages.kv_events import KvEvent, Tier

__all__ = ["END", "BatchOrder", "NamedBlocks", "decode"]

END: Final = (-1).to_bytes(8, "big", signed=True)
"""The number that ends a replay."""

_SALT: Final = "pdserve:"
"""Begins a `cache_salt` that carries a root."""

_TIERS: Final[Mapping[str | None, Tier]] = {
    None: "device",
    "GPU": "device",
    "CPU_PINNED": "host",
    "DISK": "disk",
    "EXTERNAL": "remote",
}
"""SGLang's `medium` -> tier."""

_POSITIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "BlockStored": (
        "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium",
    ),
    "BlockRemoved": ("block_hashes", "medium"),
    "AllBlocksCleared": (),
}  # fmt: skip
"""Fields of the events by place, as releases sent them before events became maps."""


def decode(payload: bytes) -> list[dict[str, Any]]:
    """The events of one batch, each a map with its class's name as `type`.

    Raises `ValueError` for bytes that are no batch.
    """
    try:
        batch = msgspec.msgpack.decode(payload)
        return [_event(event) for event in batch[1]]
    except (msgspec.DecodeError, ValueError, LookupError, TypeError) as error:
        raise ValueError(f"not a batch of KV events: {error}") from error


def _event(event: Any) -> dict[str, Any]:
    if isinstance(event, dict):
        return {"type": event["type"], **event}
    kind, *values = event
    return {"type": kind, **dict(zip(_POSITIONS[kind], values, strict=False))}


class BatchOrder:
    """Puts batches in order by their numbers, which begin with 0."""

    def __init__(self) -> None:
        self.next = 0
        """The number of the next batch."""
        self.lost = 0
        """Batches that never came."""

    def due(self, number: int) -> bool:
        """Take the next number; False for a batch that has come before.

        A gap must be filled before: `gap`.
        """
        if number < self.next:
            return False
        self.lost += number - self.next
        self.next = number + 1
        return True

    def gap(self, number: int) -> bool:
        """Whether batches before this one are missing and must be asked for, from `next` on."""
        return number > self.next


@dataclass(slots=True)
class _Block:
    name: BlockHash
    copies: dict[Tier, int] = field(default_factory=dict)


class NamedBlocks:
    """The names of all blocks that one SGLang engine holds. Memory grows with its pools, not with
    its requests."""

    def __init__(self, secret: bytes, block_size: int, model: str) -> None:
        """`model` is the compat hash, equal for all workers whose blocks have the same content."""
        self._secret = secret
        self._block_size = block_size
        self._model = model
        self._blocks: dict[int, _Block] = {}

    def __len__(self) -> int:
        """Number of different blocks that are held."""
        return len(self._blocks)

    def salt(self, cache_salt: str, lora: str) -> str:
        """The `cache_salt` for SGLang of a request with this salt and adapter."""
        return _SALT + prompt_root(self._secret, self._model, cache_salt, lora).hex()

    def rekey(self, secret: bytes) -> list[KvEvent]:
        """Use another secret. Blocks that SGLang still holds are forgotten: no later request can
        reach them, since its salt differs."""
        self._secret = secret
        return self.clear()

    def clear(self) -> list[KvEvent]:
        """Forget all blocks: the pool was cleared, or events about it were lost."""
        tiers: set[Tier] = {tier for block in self._blocks.values() for tier in block.copies}
        tiers.add("device")
        self._blocks.clear()
        return [PoolCleared(tier=tier) for tier in sorted(tiers)]

    def translate(self, events: Iterable[Mapping[str, Any]]) -> list[KvEvent]:
        """Our events for SGLang's."""
        return [ours for event in events for ours in self._one(event)]

    def _one(self, event: Mapping[str, Any]) -> Iterator[KvEvent]:
        match event["type"]:
            case "AllBlocksCleared":
                yield from self.clear()
            case "BlockStored":
                yield from self._stored(event)
            case "BlockRemoved":
                yield from self._removed(event)

    def _stored(self, event: Mapping[str, Any]) -> Iterator[KvEvent]:
        parent = self._parent(event)
        if parent is None or event["block_size"] != self._block_size:
            return  # a chain that is not known or not made by pdserve, or a partial block
        tier = _TIERS.get(event.get("medium"), "remote")
        tokens = [_token(token) for token in event["token_ids"]]
        names = block_hashes(tokens, self._block_size, parent=parent, secret=self._secret)
        run: list[bytes] = []
        before: bytes = parent
        for key, name in zip(event["block_hashes"], names, strict=False):
            if self._add(key, name, tier):
                run.append(name)
                continue
            if run:
                yield BlockStored(hashes=run, parent=before, tier=tier)
            run, before = [], name
        if run:
            yield BlockStored(hashes=run, parent=before, tier=tier)

    def _parent(self, event: Mapping[str, Any]) -> bytes | None:
        """Our hash of the block before; None: it is not known."""
        before = event.get("parent_block_hash")
        if before is not None:
            block = self._blocks.get(before)
            return None if block is None else block.name
        salt = event.get("cache_salt") or ""
        return bytes.fromhex(salt.removeprefix(_SALT)) if salt.startswith(_SALT) else None

    def _add(self, key: int, name: BlockHash, tier: Tier) -> bool:
        """Count one more copy; True if it is the first in its tier."""
        block = self._blocks.get(key)
        if block is None:
            block = self._blocks[key] = _Block(name)
        block.copies[tier] = block.copies.get(tier, 0) + 1
        return block.copies[tier] == 1

    def _removed(self, event: Mapping[str, Any]) -> Iterator[KvEvent]:
        tier = _TIERS.get(event.get("medium"), "remote")
        gone = [name for key in event["block_hashes"] if (name := self._release(key, tier))]
        if gone:
            yield BlockRemoved(hashes=gone, tier=tier)

    def _release(self, key: int, tier: Tier) -> bytes | None:
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


def _token(token: TokenId | Sequence[TokenId]) -> TokenId:
    """With some kinds of speculative decoding a block holds pairs of neighbouring tokens; the first
    of each is its own."""
    return token if isinstance(token, int) else token[0]

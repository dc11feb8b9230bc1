"""Translates TensorRT-LLM's KV events into pdserve's, with block hashes made here.

TensorRT-LLM hashes blocks in its own way, so its hashes serve as keys only: the tokens are hashed
again as pdserve's routers expect. Three of its habits matter. It announces partial blocks; they
have no hash here and are skipped, with what hangs on them. Its bounded buffer drops the oldest
events, which shows as a gap in `event_id`: then nothing is known any more, and the pool is
reported as cleared. And its events do not name the request's cache salt: `note_prompt` remembers
under which salts a first block was submitted, and a block that several salts may have stored is
not announced at all.

Owned by the core and called in its thread. Knows no engine: events come in as mappings.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from pdserve.blocks.hashing import block_hashes, pack_tokens, prompt_root
from pdserve.messages.kv_events import BlockRemoved, BlockStored, PoolCleared

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Mapping, Sequence

    from pdserve.blocks.hashing import BlockHash
    from pdserve.ids import TokenId
    from pdserve.messages.kv_events import KvEvent, Tier

__all__ = ["KvNames"]

_TIERS: Final[tuple[Tier, ...]] = ("device", "host")
"""Tier by cache level: primary blocks are on the GPU, secondary ones in host memory."""
_REMEMBERED = 1 << 16
"""First blocks whose salts are remembered. The least recently submitted ones are forgotten; what is
stored for them afterwards is announced only if no request ever had a salt."""


@dataclass(slots=True)
class _Block:
    name: BlockHash
    parent: bytes
    copies: dict[tuple[int, int], Tier] = field(default_factory=dict)
    """(attention window, attention data-parallel rank) -> where that copy is."""


class KvNames:
    """The blocks that the engine holds, by its hash, with their names in pdserve."""

    def __init__(self, block_size: int, secret: bytes, model: str) -> None:
        """`model`: the compatibility hash, part of every block's name."""
        self._block_size = block_size
        self._secret = secret
        self._model = model
        self._blocks: dict[Hashable, _Block] = {}
        self._held: dict[tuple[BlockHash, Tier], int] = {}
        """Copies by name and tier: the engine may have several blocks of one content."""
        self._salts: OrderedDict[bytes, set[str]] = OrderedDict()
        self._salted = False
        self._next: dict[int, int] = {}
        """Expected event number by attention data-parallel rank."""
        self.gaps = 0
        """Times that events were lost."""
        self.ambiguous = 0
        """Chains that were not announced because several salts may have stored them."""

    def __len__(self) -> int:
        return len(self._blocks)

    def note_prompt(self, tokens: Sequence[TokenId], salt: str) -> None:
        """A request with this prompt is about to be submitted under a cache salt ("": none)."""
        self._salted = self._salted or bool(salt)
        if len(tokens) < self._block_size:
            return
        key = pack_tokens(tokens[: self._block_size])
        self._salts.setdefault(key, set()).add(salt)
        self._salts.move_to_end(key)
        if len(self._salts) > _REMEMBERED:
            self._salts.popitem(last=False)

    def rekey(self, secret: bytes) -> list[KvEvent]:
        """Name blocks with another secret; what was named before is gone for routers."""
        self._secret = secret
        return self._clear()

    def translate(self, event: Mapping[str, Any]) -> Iterator[KvEvent]:
        """Take one event in and yield what it means for routers, in order. TensorRT-LLM writes an
        empty one where it has none."""
        if not event:
            return
        rank = int(event.get("attention_dp_rank") or 0)
        number = int(event["event_id"])
        if number != self._next.get(rank, number):
            self.gaps += 1
            yield from self._clear()
        self._next[rank] = number + 1
        place = (int(event.get("window_size") or 0), rank)
        data = event["data"]
        match data["type"]:
            case "stored":
                yield from self._stored(data, place)
            case "removed":
                yield from self._removed(data["block_hashes"], place)
            case "updated":
                yield from self._updated(data, place)
            case "created":
                return

    def _clear(self) -> list[KvEvent]:
        self._blocks.clear()
        self._held.clear()
        return [PoolCleared(tier=tier) for tier in _TIERS]

    def _stored(self, data: Mapping[str, Any], place: tuple[int, int]) -> Iterator[KvEvent]:
        blocks = data["blocks"]
        parent = self._parent(data["parent_hash"], blocks)
        for block in blocks:
            tokens = [int(token["token_id"]) for token in block["tokens"]]
            if parent is None or len(tokens) != self._block_size:
                return  # a partial block, and what would hang on it
            (name,) = block_hashes(tokens, self._block_size, parent=parent, secret=self._secret)
            tier = _tier(block.get("cache_level", 0))
            held = self._blocks.setdefault(block["block_hash"], _Block(name, parent))
            if place not in held.copies and self._place(held, place, tier):
                yield BlockStored(hashes=[held.name], parent=parent, tier=tier)
            parent = held.name

    def _parent(self, key: Hashable, blocks: Sequence[Mapping[str, Any]]) -> bytes | None:
        """The name of the block before; None: the chain is not known."""
        if key is not None:
            block = self._blocks.get(key)
            return None if block is None else block.name
        if not blocks:
            return None
        tokens = [int(token["token_id"]) for token in blocks[0]["tokens"]]
        salt = self._salt_of(tokens)
        return None if salt is None else prompt_root(self._secret, self._model, salt)

    def _salt_of(self, tokens: Sequence[TokenId]) -> str | None:
        """The salt of a first block; None: it cannot be known."""
        salts = self._salts.get(pack_tokens(tokens), set())
        if len(salts) == 1:
            return next(iter(salts))
        if not salts and not self._salted:
            return ""
        self.ambiguous += 1
        return None

    def _removed(self, keys: Sequence[Hashable], place: tuple[int, int]) -> Iterator[KvEvent]:
        for key in keys:
            block = self._blocks.get(key)
            if block is None or place not in block.copies:
                continue
            tier = block.copies.pop(place)
            if not block.copies:
                del self._blocks[key]
            if self._release(block.name, tier):
                yield BlockRemoved(hashes=[block.name], tier=tier)

    def _updated(self, data: Mapping[str, Any], place: tuple[int, int]) -> Iterator[KvEvent]:
        """A block has moved to another level."""
        change = data.get("cache_level")
        block = self._blocks.get(data["block_hash"])
        if not change or block is None or place not in block.copies:
            return
        before, after = block.copies[place], _tier(change["new_value"])
        if before == after:
            return
        if self._place(block, place, after):
            yield BlockStored(hashes=[block.name], parent=block.parent, tier=after)
        if self._release(block.name, before):
            yield BlockRemoved(hashes=[block.name], tier=before)

    def _place(self, block: _Block, place: tuple[int, int], tier: Tier) -> bool:
        """Count a copy; True if it is the first of its name in its tier."""
        block.copies[place] = tier
        count = self._held[block.name, tier] = self._held.get((block.name, tier), 0) + 1
        return count == 1

    def _release(self, name: BlockHash, tier: Tier) -> bool:
        """Count a copy less; True if it was the last of its name in its tier."""
        self._held[name, tier] -= 1
        if self._held[name, tier]:
            return False
        del self._held[name, tier]
        return True


def _tier(level: int) -> Tier:
    return _TIERS[level] if 0 <= level < len(_TIERS) else "remote"

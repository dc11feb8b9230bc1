"""Renames vLLM's KV events: its block hashes become pdserve's, so that routers know the blocks.

`RenamedBlocks` makes the hashes; this file reads vLLM's events, whose chains begin with the salt
among a block's extra keys. Pure: it knows no vLLM, only the fields of its events.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pdserve_engines.renamed_blocks import RenamedBlocks, root_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pdserve.messages.kv_events import KvEvent, Tier

__all__ = ["BlockNames"]

_TIERS: dict[str | None, Tier] = {None: "device", "GPU": "device", "CPU": "host", "STORAGE": "disk"}
"""vLLM's `medium` -> tier."""


class BlockNames(RenamedBlocks):
    """The names of all blocks that one vLLM engine holds."""

    def __init__(self, secret: bytes, block_size: int, model: str, group: int = 0) -> None:
        """`group`: the group of layers whose blocks are named; the rest as in `RenamedBlocks`."""
        super().__init__(secret, block_size, model)
        self._group = group

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
            yield from self.remove(event.block_hashes, _TIERS.get(event.medium, "remote"))

    def _stored(self, event: Any) -> Iterator[KvEvent]:
        parent = self._parent(event)
        if parent is None or event.block_size != self._block_size:
            return
        names = self.hashes(event.token_ids, parent)
        if len(names) != len(event.block_hashes):
            return  # blocks outside of a sliding window are left out; which ones is not said
        tier = _TIERS.get(event.medium, "remote")
        yield from self.store(event.block_hashes, names, parent, tier)

    def _parent(self, event: Any) -> bytes | None:
        """Our hash of the block before; None: the chain is not known, or not made by pdserve."""
        if event.parent_block_hash is not None:
            return self.name_of(event.parent_block_hash)
        extra = event.extra_keys[0] if event.extra_keys else None
        roots = (root_of(key) for key in extra or ())
        return next((root for root in roots if root is not None), None)

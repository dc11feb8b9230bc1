"""Renames vLLM's KV events: its block hashes become pdserve's, so that routers know the blocks.

`RenamedBlocks` makes the hashes; this file reads vLLM's events. A block's extra keys have the salt
with which a chain begins, and the images that the block has a part of, each with the distance from
the block's beginning to its own. Pure: it knows no vLLM, only the fields of its events.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pdserve.blocks.hashing import prompt_root, salt_owner, split_hashes
from pdserve.blocks.image_hashes import (
    DIGEST_BYTES,
    IMAGE_FILLER,
    PlacedImage,
    image_block_hashes,
)
from pdserve_engines.renamed_blocks import RenamedBlocks, root_of
from pdserve_engines.vllm.image_reader import image_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from pdserve.blocks.hashing import BlockHash
    from pdserve.ids import TokenId
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
        names = self._hashes(event, parent)
        if len(names) != len(event.block_hashes):
            return  # blocks outside of a sliding window are left out; which ones is not said
        tier = _TIERS.get(event.medium, "remote")
        yield from self.store(event.block_hashes, names, parent, tier)

    def _hashes(self, event: Any, parent: bytes) -> list[BlockHash]:
        """Our hashes of an event's blocks. Images are in the extra keys alone, one entry for each
        block; an event without any has the hashes of its tokens."""
        images = _images(event.extra_keys or (), self._block_size)
        return self._chain(event.token_ids, images, parent)

    def chain(
        self, tokens: Sequence[TokenId], salt: object, features: Iterable[Any] = ()
    ) -> list[BlockHash]:
        """Our hashes of the full blocks of a request of vLLM, from its first token on. `features`:
        vLLM's records of its images. Empty: pdserve has not made its salt."""
        root = root_of(salt)
        if root is None:
            return []
        images: dict[int, tuple[bytes, int]] = {}
        for feature in features:
            image = image_of(feature.identifier)
            if image is None or len(image[0]) != DIGEST_BYTES:
                return []
            images[int(feature.mm_position.offset)] = image
        return self._chain(tokens, images, root)

    def owner_mark(self, cache_salt: str) -> bytes:
        """A name for all blocks of the owner of a cache salt, as `BlockHasher.owner_mark`."""
        return prompt_root(self._secret, self._model, salt_owner(cache_salt), "")

    def _chain(
        self, token_ids: Sequence[TokenId], images: dict[int, tuple[bytes, int]], parent: bytes
    ) -> list[BlockHash]:
        if not images:
            return self.hashes(token_ids, parent)
        tokens, begun = list(token_ids), []
        for offset, (digest, length) in sorted(images.items()):
            first, end = max(0, offset), min(len(tokens), offset + length)
            tokens[first:end] = [IMAGE_FILLER] * (end - first)
            if offset >= 0:
                begun.append(PlacedImage(offset, digest))
        return split_hashes(
            image_block_hashes(tokens, begun, self._block_size, parent=parent, secret=self._secret)
        )

    def _parent(self, event: Any) -> bytes | None:
        """Our hash of the block before; None: the chain is not known, or not made by pdserve."""
        if event.parent_block_hash is not None:
            return self.name_of(event.parent_block_hash)
        extra = event.extra_keys[0] if event.extra_keys else None
        roots = (root_of(key) for key in extra or ())
        return next((root for root in roots if root is not None), None)


def _images(extra_keys: Sequence[Any], block_size: int) -> dict[int, tuple[bytes, int]]:
    """The images that the blocks of an event have parts of: offset from the first block -> digest
    and number of tokens."""
    found: dict[int, tuple[bytes, int]] = {}
    for number, keys in enumerate(extra_keys):
        for key in keys or ():
            image = image_of(key[0]) if isinstance(key, tuple | list) and len(key) == 2 else None
            if image is not None and len(image[0]) == DIGEST_BYTES:
                found[number * block_size + int(key[1])] = image
    return found

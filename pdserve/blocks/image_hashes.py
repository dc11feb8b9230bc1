"""Computes the block hashes of prompts with images: what an image shows is part of the chain.

    parent' = BLAKE2b-128(key=secret, tag || parent || per image: place in the block, digest)
    hash_i  = BLAKE2b-128(key=secret, parent' || tokens of block i)

The tokens are those of the expanded prompt, in which an image takes as many places as the model has
embeddings for it. All these places hold `IMAGE_FILLER`, because frontends do not know a model's
own ids for them. The parent is changed only for a block in which an image begins; later blocks
have it in their chain. So equal tokens with other images never have equal hashes, and a prompt
without images has the hashes of `hashing`.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Final

from pdserve.blocks.hashing import HASH_BYTES, BlockHash, joined_hashes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pdserve.ids import TokenId

__all__ = [
    "DIGEST_BYTES",
    "IMAGE_FILLER",
    "PlacedImage",
    "image_block_hashes",
    "image_digest",
    "image_parent",
]

IMAGE_FILLER: Final = 0xFFFFFFFF
"""Stands for each token of an image; no vocabulary has this id."""
DIGEST_BYTES: Final = 32
"""Length of an image's digest: 256 bits, since engines cache embeddings by it, without a key."""

_TAG: Final = b"pdserve image v1"
"""As long as a parent hash, so that no parent of a block of text has this message."""


@dataclass(frozen=True, slots=True)
class PlacedImage:
    """An image in an expanded prompt."""

    offset: int
    """Place of its first token."""
    digest: bytes


def image_digest(data: bytes) -> bytes:
    """Return the digest of an image's file; takes 1 ms for a megabyte."""
    return blake2b(data, digest_size=DIGEST_BYTES).digest()


def image_parent(
    parent: bytes, images: Iterable[tuple[int, bytes]], secret: bytes
) -> BlockHash | bytes:
    """Return the parent of a block in which `images` begin, as (place in the block, digest), in
    order. Without images it is `parent` itself."""
    state = None
    for place, digest in images:
        if len(digest) != DIGEST_BYTES:
            raise ValueError(f"an image's digest has {DIGEST_BYTES} bytes")
        if state is None:
            state = blake2b(_TAG + parent, digest_size=HASH_BYTES, key=secret)
        state.update(place.to_bytes(4, "little") + digest)
    return parent if state is None else BlockHash(state.digest())


def image_block_hashes(
    tokens: Sequence[TokenId],
    images: Sequence[PlacedImage],
    block_size: int,
    *,
    parent: bytes,
    secret: bytes,
) -> bytes:
    """Return the joined hashes of the full blocks in `tokens`, an expanded prompt with fillers.

    `images` are in the order of their places. Raises ValueError as `joined_hashes` does.
    """
    starts: dict[int, list[tuple[int, bytes]]] = {}
    for image in images:
        block, place = divmod(image.offset, block_size)
        starts.setdefault(block, []).append((place, image.digest))
    full = len(tokens) // block_size
    begun = [block for block in starts if block < full]
    found, done = [], 0
    for end in [*begun, full]:
        # Blocks from `done` to `end`; images begin in the first of them, if in any.
        first = image_parent(parent, starts.get(done, ()), secret)
        run = tokens[done * block_size : end * block_size]
        hashes = joined_hashes(run, block_size, parent=first, secret=secret)
        if hashes:
            found.append(hashes)
            parent, done = hashes[-HASH_BYTES:], end
    return b"".join(found)

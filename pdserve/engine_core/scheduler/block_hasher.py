"""Computes a sequence's chained block hashes, as far as they are needed.

One hasher per engine core and secret holds the secret, the block size and the model's salt. Hashes
of a prompt's blocks may come with its request; then only generated blocks are hashed here. It does
not know which blocks exist: the block pool does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.blocks.hashing import (
    HASH_BYTES,
    block_hashes,
    hash_secret_id,
    joined_hashes,
    prompt_root,
    split_hashes,
)

if TYPE_CHECKING:
    from pdserve.engine_core.scheduler.sequence import Sequence
    from pdserve.messages.request import GenerateRequest

__all__ = ["BlockHasher"]


class BlockHasher:
    """Computes `Sequence.hashes` on demand; each block is hashed once."""

    def __init__(self, secret: bytes, block_size: int, model: str) -> None:
        """`model` is the compat hash, equal for all workers whose blocks may be exchanged."""
        self.id = hash_secret_id(secret)
        self._secret = secret
        self._block_size = block_size
        self._model = model

    def with_secret(self, secret: bytes) -> BlockHasher:
        """Return a hasher with another secret."""
        return BlockHasher(secret, self._block_size, self._model)

    def root(self, cache_salt: str, lora: str = "") -> bytes:
        """Parent hash of the first block: of model, cache salt, and the LoRA adapter's id."""
        return prompt_root(self._secret, self._model, cache_salt, lora)

    def owner_mark(self, owner: str) -> bytes:
        """A name for all blocks of prompts whose cache salts have this owner, see
        `hashing.salt_owner`."""
        return self.root(owner)

    def given(self, request: GenerateRequest, root: bytes) -> list[bytes]:
        """Return the prompt's block hashes that came with the request, if they are valid here.

        They are not if they were made with another secret, model or block size; a wrong hash would
        match the KV of other tokens. The first block's hash is computed and compared: since hashes
        are chained, all match if it does. Returns an empty list otherwise.
        """
        names, size = request.block_names, self._block_size
        wanted = HASH_BYTES * (len(request.prompt) // size)
        if request.names_id != self.id or len(names) != wanted:
            return []
        first = joined_hashes(request.prompt[:size], size, parent=root, secret=self._secret)
        return [*split_hashes(names)] if names.startswith(first) else []

    def of(self, sequence: Sequence, count: int) -> list[bytes]:
        """Hashes of at least the sequence's first `count` blocks; more if more are known."""
        known = sequence.hashes
        if len(known) < count:
            size = self._block_size
            tokens = sequence.tokens[len(known) * size : count * size]
            parent = known[-1] if known else sequence.root
            known += block_hashes(tokens, size, parent=parent, secret=self._secret)
        return known

"""Names of a sequence's blocks, computed as far as they are asked for.

One object per engine core and secret holds what all chains share: the secret, the block size and
the salt that separates models. A prompt's names may have come with its request; then only what was
generated is hashed here. It does not know which blocks exist; that is the pool's business.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.blocks.hashing import (
    HASH_BYTES,
    block_hashes,
    joined_hashes,
    names_id,
    prompt_root,
    split_hashes,
)

if TYPE_CHECKING:
    from pdserve.engine.sequence import Sequence
    from pdserve.messages.request import GenerateRequest

__all__ = ["BlockNames"]


class BlockNames:
    """Extends `sequence.hashes` on demand; every block is hashed once."""

    def __init__(self, secret: bytes, block_size: int, model: str) -> None:
        """`model` is the compat hash: equal for all workers whose blocks may be exchanged."""
        self.id = names_id(secret)
        self._secret = secret
        self._block_size = block_size
        self._model = model

    def with_secret(self, secret: bytes) -> BlockNames:
        """The same for another secret."""
        return BlockNames(secret, self._block_size, self._model)

    def root(self, cache_salt: str) -> bytes:
        """Parent of the first block: fields are model, LoRA adapter (none yet), tenant's salt."""
        return prompt_root(self._secret, self._model, cache_salt)

    def given(self, request: GenerateRequest, root: bytes) -> list[bytes]:
        """The names of the prompt's blocks that came with a request whose chain begins at `root`;
        empty if they are none of ours: made with another secret, or for another model or block
        size, as of a worker that has just gone. Of those the first one is unlike ours, and so would
        all others be: a wrong one would let other tokens' KV be taken for this prompt's."""
        names, size = request.block_names, self._block_size
        wanted = HASH_BYTES * (len(request.prompt) // size)
        if request.names_id != self.id or len(names) != wanted:
            return []
        first = joined_hashes(request.prompt[:size], size, parent=root, secret=self._secret)
        return [*split_hashes(names)] if names.startswith(first) else []

    def of(self, sequence: Sequence, count: int) -> list[bytes]:
        """Hashes of the sequence's first `count` blocks (and of further ones known already)."""
        known = sequence.hashes
        if len(known) < count:
            size = self._block_size
            tokens = sequence.tokens[len(known) * size : count * size]
            parent = known[-1] if known else sequence.root
            known += block_hashes(tokens, size, parent=parent, secret=self._secret)
        return known

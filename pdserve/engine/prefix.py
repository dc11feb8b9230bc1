"""Names of a sequence's blocks, computed as far as they are asked for.

One object per engine core holds what all chains share: the secret, the block size and the salt
that separates models. It does not know which blocks exist; that is the pool's business.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.blocks.hashing import block_hashes, root_hash

if TYPE_CHECKING:
    from pdserve.engine.sequence import Sequence

__all__ = ["BlockNames"]


class BlockNames:
    """Extends `sequence.hashes` on demand; every block is hashed once."""

    def __init__(self, secret: bytes, block_size: int, model: str) -> None:
        """`model` is the compat hash: equal for all workers whose blocks may be exchanged."""
        self._secret = secret
        self._block_size = block_size
        self._model = model

    def root(self, cache_salt: str) -> bytes:
        """Parent of the first block: fields are model, LoRA adapter (none yet), tenant's salt."""
        return root_hash(self._secret, self._model, None, cache_salt or None)

    def of(self, sequence: Sequence, count: int) -> list[bytes]:
        """Hashes of the sequence's first `count` blocks (and of further ones known already)."""
        known = sequence.hashes
        if len(known) < count:
            size = self._block_size
            tokens = sequence.tokens[len(known) * size : count * size]
            parent = known[-1] if known else sequence.root
            known += block_hashes(tokens, size, parent=parent, secret=self._secret)
        return known

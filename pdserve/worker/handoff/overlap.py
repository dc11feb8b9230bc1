"""How much of a prompt a worker's own pool holds, as far as the node knows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.blocks.hashing import HASH_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.messages.request import GenerateRequest
    from pdserve.worker.handoff.ports import Worker

__all__ = ["cached_tokens", "tokens_of"]


def tokens_of(request: GenerateRequest) -> int:
    """What must be in KV before the next token: the output of earlier attempts included."""
    return len(request.prompt) + (len(request.output[0]) if request.output else 0)


def cached_tokens(request: GenerateRequest, worker: Worker, overlap: Callable[[bytes], int]) -> int:
    """Leading prompt tokens that need not be computed; the last one always is. `overlap`: how many
    leading ones of these block hashes are in the pool."""
    names, card = request.block_names, worker.cards().get(request.model)
    if card is None or not names or request.names_id != worker.names_id:
        return 0
    if request.sampling.prompt_logprobs is not None:  # such a request reads no cache
        return 0
    blocks = min(len(names) // HASH_BYTES, (tokens_of(request) - 1) // card.block_size)
    return overlap(names[: blocks * HASH_BYTES]) * card.block_size

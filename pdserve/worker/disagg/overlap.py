"""Estimates a prompt's cached prefix in the worker's own pool, and checks that the prompt fits a
message.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pdserve.blocks.hashing import HASH_BYTES
from pdserve.wire.codec import encode
from pdserve.wire.limits import Limits

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.messages.request import GenerateRequest
    from pdserve.worker.disagg.ports import DisaggWorker

__all__ = ["cached_tokens", "fits_message", "tokens_of"]

_LARGEST: Final = Limits().body
_TOKEN: Final = 5
"""Maximum bytes of a token id or block id in a message."""
_REST: Final = 256 * 1024
"""Bytes reserved for all other fields of the request and its ticket."""


def tokens_of(request: GenerateRequest) -> int:
    """Number of tokens that must be in KV before the next token; includes output of earlier
    workers."""
    return request.prompt_tokens + len(request.given)


def fits_message(request: GenerateRequest) -> bool:
    """True if the request and its ticket fit into one message to a prefill worker. A prompt of some
    hundred thousand tokens reaches the limit. Cheap unless the size comes near it."""
    tokens = tokens_of(request)
    most = _REST + 2 * _TOKEN * tokens + len(request.block_names)
    return most <= _LARGEST or _REST + len(encode(request)) + _TOKEN * tokens // 4 <= _LARGEST


def cached_tokens(
    request: GenerateRequest, worker: DisaggWorker, overlap: Callable[[bytes], int]
) -> int:
    """Number of leading prompt tokens that need not be computed; the last token always is.
    `overlap` returns how many leading block hashes of its argument are in the pool."""
    names, card = request.block_names, worker.cards().get(request.model)
    if card is None or not names or request.names_id != worker.names_id:
        return 0
    if request.sampling.prompt_logprobs is not None or request.pooling == "mean":
        # such a request reads no cache
        return 0
    blocks = min(len(names) // HASH_BYTES, (tokens_of(request) - 1) // card.block_size)
    return overlap(names[: blocks * HASH_BYTES]) * card.block_size

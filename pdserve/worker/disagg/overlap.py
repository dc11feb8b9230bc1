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
"""Bytes of a token's or a block's id in a message, at most."""
_REST: Final = 256 * 1024
"""For all else that is said of a request and its ticket."""


def tokens_of(request: GenerateRequest) -> int:
    """What must be in KV before the next token: the output of earlier attempts included."""
    return len(request.prompt) + len(request.given)


def fits_message(request: GenerateRequest) -> bool:
    """Whether request and ticket can be sent to a prefill worker: a message has a limit, a prompt
    of some hundred thousand tokens reaches it. Cheap unless it comes near."""
    tokens = tokens_of(request)
    most = _REST + 2 * _TOKEN * tokens + len(request.block_names)
    return most <= _LARGEST or _REST + len(encode(request)) + _TOKEN * tokens // 4 <= _LARGEST


def cached_tokens(
    request: GenerateRequest, worker: DisaggWorker, overlap: Callable[[bytes], int]
) -> int:
    """Leading prompt tokens that need not be computed; the last one always is. `overlap`: how many
    leading ones of these block hashes are in the pool."""
    names, card = request.block_names, worker.cards().get(request.model)
    if card is None or not names or request.names_id != worker.names_id:
        return 0
    if request.sampling.prompt_logprobs is not None or request.pooling == "mean":
        # such a request reads no cache
        return 0
    blocks = min(len(names) // HASH_BYTES, (tokens_of(request) - 1) // card.block_size)
    return overlap(names[: blocks * HASH_BYTES]) * card.block_size

"""Bounds the memory that answers hold until they are sent whole.

Only answers with logprobs are counted: the context length bounds text and token ids, but a logprob
for each of 20 alternatives takes fifty times as much. Pure; owned by the generations.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

from pdserve.errors import PayloadTooLarge

if TYPE_CHECKING:
    from pdserve.errors import PdserveError
    from pdserve.ids import Bytes
    from pdserve.messages.request import TokenDelta

__all__ = ["ResponseMemory", "delta_bytes", "tokens_bytes"]

_LOGPROB: Final[Bytes] = 128
"""Approximate bytes of one logprob."""
_TOKEN: Final[Bytes] = 8


class BoundedResponse(Protocol):
    """An answer that is being built."""

    def fail(self, error: PdserveError) -> None:
        """Ends it, unless it has ended."""
        ...


class ResponseMemory:
    """The memory of all answers of one frontend."""

    def __init__(self, most_each: Bytes, most: Bytes) -> None:
        self._most_each = most_each
        self._most = most
        self._sizes: dict[BoundedResponse, Bytes] = {}
        self.size: Bytes = 0
        """Bytes of all answers."""

    def grow(self, answer: BoundedResponse, more: Bytes) -> None:
        """Adds `more` bytes for an answer. Beyond a limit this answer fails, or the largest one
        does."""
        size = self._sizes.get(answer, 0) + more
        self._sizes[answer] = size
        self.size += more
        if size > self._most_each:
            self._end(answer, f"the answer and its logprobs take more than {self._most_each} bytes")
        elif self.size > self._most:
            largest = max(self._sizes, key=self._sizes.__getitem__)
            self._end(largest, "too many answers with logprobs are being put together")

    def forget(self, answer: BoundedResponse) -> None:
        """Removes an answer; no effect if it was not counted."""
        self.size -= self._sizes.pop(answer, 0)

    def _end(self, answer: BoundedResponse, cause: str) -> None:
        answer.fail(
            PayloadTooLarge(f"{cause}; stream it, or ask for fewer tokens, choices or logprobs")
        )


def delta_bytes(delta: TokenDelta) -> Bytes:
    """Approximate bytes of a delta with logprobs."""
    logprobs = sum(1 + len(logprob.top) for logprob in delta.logprobs or ())
    return _TOKEN * len(delta.tokens) + _LOGPROB * logprobs


def tokens_bytes(tokens: int, logprobs: int) -> Bytes:
    """Approximate bytes of so many tokens with so many alternatives each."""
    return tokens * (_TOKEN + _LOGPROB * (1 + logprobs))

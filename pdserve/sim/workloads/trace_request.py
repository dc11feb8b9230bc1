"""Defines one request of a trace, independent of the trace format.

A prompt is a list of segments: a content id and a number of tokens. Equal contents give equal
tokens, so prompts that begin with equal segments share a prefix, and traces with only block ids
(Mooncake) or lengths (Azure) become prompts that an engine can cache. The token values have no
meaning.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pdserve.ids import Seconds

__all__ = ["MOST_TOKENS", "VOCABULARY", "PromptPiece", "TraceRequest", "length_of", "tokens_of"]

PromptPiece = tuple[int, int]
"""(content id, tokens)."""

MOST_TOKENS: Final = 1 << 24
"""Most tokens of a prompt, and of an answer, that a file may name. No model takes more, and a
replay makes all of them."""
VOCABULARY: Final = 32_000
"""Token ids of prompts are below this; every model has them."""
_FIRST: Final = 16
"""Ids below are special in many vocabularies."""
_SPAN: Final = VOCABULARY - _FIRST


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request, sent at `at`, or `pause` seconds after the end of request `after`."""

    number: int
    """Its index in the trace, from 0."""
    at: Seconds
    """Seconds since the trace's beginning. For a request that follows another: when its
    conversation began."""
    pieces: tuple[PromptPiece, ...]
    """The prompt. For a request that follows another: what comes after that one's prompt and
    answer."""
    output_tokens: int
    session: str = ""
    """Id of its conversation or agent; empty: unknown."""
    after: int | None = None
    """The request whose prompt and answer begin this one's prompt."""
    pause: Seconds = 0.0
    """Seconds after the other's end: a user reads, a tool works."""
    tenant: str = ""
    """The tenant that sends it; empty: unknown."""
    weight: float = 1.0
    """The tenant's weight."""
    priority: int = 0
    frontend: int | None = None
    """Index of the frontend to send it to; None: each in turn."""
    slo_ttft: Seconds | None = None
    """Seconds within which its client wants the first token; None: no limit."""


def length_of(pieces: Iterable[PromptPiece]) -> int:
    """Number of tokens."""
    return sum(count for _, count in pieces)


def tokens_of(pieces: Iterable[PromptPiece]) -> list[int]:
    """The prompt's token ids. Two content ids below `_SPAN` squared, about a billion, never give
    the same tokens."""
    tokens: list[int] = []
    for content, count in pieces:
        high, low = divmod(content, _SPAN)
        pair = [_FIRST + low, _FIRST + high % _SPAN]
        tokens += pair * (count // 2)
        if count % 2:
            tokens.append(pair[0])
    return tokens

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

__all__ = ["VOCABULARY", "PromptPiece", "TraceRequest", "length_of", "tokens_of"]

PromptPiece = tuple[int, int]
"""(content, tokens)."""

VOCABULARY: Final = 32_000
"""Token ids of prompts are below this, which every model has."""
_FIRST: Final = 16
"""Ids below are special in many vocabularies."""
_SPAN: Final = VOCABULARY - _FIRST


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """Asked at `at`, or `pause` after the end of `after`."""

    number: int
    """Its place in the trace, from 0; never one that came before."""
    at: Seconds
    """Since the trace's begin. Of a request that follows another: when its conversation began."""
    pieces: tuple[PromptPiece, ...]
    """Of one that follows another: what comes after that one's prompt and its answer."""
    output_tokens: int
    session: str = ""
    """Requests of one conversation or agent; empty: unknown."""
    after: int | None = None
    """The request whose prompt and answer this one's prompt begins with."""
    pause: Seconds = 0.0
    """From the other's end: somebody reads, a tool works."""
    tenant: str = ""
    """Who asks; empty: nobody in particular."""
    weight: float = 1.0
    """The tenant's share."""
    priority: int = 0
    frontend: int | None = None
    """Where it is asked; None: at each in turn."""
    slo_ttft: Seconds | None = None
    """By when its client says that it needs the first token; None: it says nothing."""


def length_of(pieces: Iterable[PromptPiece]) -> int:
    """Tokens."""
    return sum(count for _, count in pieces)


def tokens_of(pieces: Iterable[PromptPiece]) -> list[int]:
    """The prompt. Two contents below `_SPAN` squared, about a billion, never give the same."""
    tokens: list[int] = []
    for content, count in pieces:
        high, low = divmod(content, _SPAN)
        pair = [_FIRST + low, _FIRST + high % _SPAN]
        tokens += pair * (count // 2)
        if count % 2:
            tokens.append(pair[0])
    return tokens

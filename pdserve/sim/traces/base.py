"""One request of a trace, whatever the trace was written in.

A prompt is a list of pieces: a content and how many tokens of it. Equal contents give equal tokens,
so prompts that begin with equal pieces share a prefix, and traces that only name their blocks
(Mooncake) or only their lengths (Azure) become prompts that an engine can cache. Which tokens they
are means nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pdserve.ids import Seconds

__all__ = ["VOCABULARY", "Piece", "TraceRequest", "length_of", "tokens_of"]

Piece = tuple[int, int]
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
    pieces: tuple[Piece, ...]
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


def length_of(pieces: Iterable[Piece]) -> int:
    """Tokens."""
    return sum(count for _, count in pieces)


def tokens_of(pieces: Iterable[Piece]) -> list[int]:
    """The prompt. Two contents below `_SPAN` squared, about a billion, never give the same."""
    tokens: list[int] = []
    for content, count in pieces:
        high, low = divmod(content, _SPAN)
        pair = [_FIRST + low, _FIRST + high % _SPAN]
        tokens += pair * (count // 2)
        if count % 2:
            tokens.append(pair[0])
    return tokens

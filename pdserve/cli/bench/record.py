"""Holds the result of one request, and derives token gaps from its chunks. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdserve.ids import Seconds

__all__ = ["BenchRecord"]


@dataclass(slots=True)
class BenchRecord:
    """Moments are seconds since the run's begin."""

    number: int
    intended: Seconds
    """When it was to be sent; in a closed loop: when it was."""
    sent: Seconds = 0.0
    first: Seconds | None = None
    """Its first token."""
    last: Seconds | None = None
    """Its last chunk with tokens."""
    ended: Seconds | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0
    """By the server's usage, or counted from chunks if it sends none."""
    cached_tokens: int = 0
    worker: str = ""
    attempts: int = 1
    error: str = ""
    """Its kind; empty: it was answered to its end."""
    message: str = ""
    finish_reason: str = ""
    gaps: list[Seconds] = field(default_factory=list)
    """Between tokens. Of k tokens that came in one chunk each has a k-th of the chunk's gap."""
    seen: int = 0
    """Tokens that chunks have brought."""
    counted: bool = False
    """Tokens of chunks are the server's running usage; else each chunk with text counts as one."""

    @property
    def completed(self) -> bool:
        """Answered to its end."""
        return self.ended is not None and not self.error

    @property
    def ttft(self) -> Seconds | None:
        """From sending to the first token."""
        return None if self.first is None else self.first - self.sent

    @property
    def e2e(self) -> Seconds | None:
        """From sending to the end."""
        return None if self.ended is None else self.ended - self.sent

    @property
    def tpot(self) -> Seconds | None:
        """Mean gap between tokens after the first; None for one token."""
        if self.first is None or self.last is None or self.output_tokens < 2:
            return None
        return (self.last - self.first) / (self.output_tokens - 1)

    def on_chunk(self, now: Seconds, running: int | None, content: bool) -> None:
        """A chunk came. Args: `running` is the usage's output tokens so far, if it tells;
        `content`: it carries text."""
        if running is not None:
            self.counted = True
        brought = max(0, running - self.seen) if running is not None else int(content)
        if not brought:
            return
        if self.first is None or self.last is None:
            self.first = now
        else:
            self.gaps += [(now - self.last) / brought] * brought
        self.last = now
        self.seen += brought

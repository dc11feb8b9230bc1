"""Holds the result of one request, and derives token gaps from its chunks. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdserve.ids import Seconds

__all__ = ["BenchRecord"]


@dataclass(slots=True)
class BenchRecord:
    """The result of one request. Times are seconds since the run's start."""

    number: int
    intended: Seconds
    """The time at which it was to be sent; in a closed loop, the time at which it was sent."""
    sent: Seconds = 0.0
    first: Seconds | None = None
    """Time of its first token."""
    last: Seconds | None = None
    """Time of its last chunk with tokens."""
    ended: Seconds | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0
    """From the server's usage, or counted from chunks if it sends none."""
    cached_tokens: int = 0
    worker: str = ""
    attempts: int = 1
    error: str = ""
    """Kind of the error; empty: it was answered completely."""
    message: str = ""
    finish_reason: str = ""
    gaps: list[Seconds] = field(default_factory=list)
    """Seconds between tokens. Each of k tokens in one chunk gets a k-th of the chunk's gap."""
    seen: int = 0
    """Number of tokens in chunks so far."""
    counted: bool = False
    """True if chunks carry the server's running usage; otherwise each chunk with text counts as one
    token."""

    @property
    def completed(self) -> bool:
        """True if it was answered completely."""
        return self.ended is not None and not self.error

    @property
    def ttft(self) -> Seconds | None:
        """Seconds from sending to the first token."""
        return None if self.first is None else self.first - self.sent

    @property
    def e2e(self) -> Seconds | None:
        """Seconds from sending to the end."""
        return None if self.ended is None else self.ended - self.sent

    @property
    def tpot(self) -> Seconds | None:
        """Mean seconds between tokens after the first; None for one token."""
        if self.first is None or self.last is None or self.output_tokens < 2:
            return None
        return (self.last - self.first) / (self.output_tokens - 1)

    def on_chunk(self, now: Seconds, running: int | None, content: bool) -> None:
        """Records a chunk. Args: `running`: output tokens so far by the usage, if sent; `content`:
        True if it carries text."""
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

"""Merges stream pieces for clients that want one chunk per several tokens.

The first piece passes at once to keep the time to first token short; the last chunk carries the
rest. Knows neither chunks' format nor sockets. Owned by one choice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pdserve.frontend.output.output_processor import merge_deltas

if TYPE_CHECKING:
    from pdserve.frontend.output.output_processor import OutputDelta
    from pdserve.ids import Bytes

__all__ = ["ChunkCoalescer"]

_MOST: Final[Bytes] = 1 << 16
"""Most bytes held back, however long the interval: logprobs make a token large."""


class ChunkCoalescer:
    """Merges the pieces of one choice; `take` returns what is to be sent now."""

    __slots__ = ("_begun", "_held", "_size", "_tokens", "_wanted")

    def __init__(self, tokens: int) -> None:
        self._wanted = tokens
        self._held: list[OutputDelta] = []
        self._tokens = 0
        self._size: Bytes = 0
        self._begun = False

    def take(self, piece: OutputDelta, size: Bytes, *, last: bool) -> OutputDelta | None:
        """Returns the held pieces and this one, merged; None if it is held back too."""
        self._held.append(piece)
        self._tokens += len(piece.tokens)
        self._size += size
        if last or not self._begun or self._tokens >= self._wanted or self._size >= _MOST:
            self._begun = True
            return self.rest()
        return None

    def rest(self) -> OutputDelta | None:
        """Returns the held pieces, merged, and holds nothing any more; None if there are none."""
        if not self._held:
            return None
        held, self._held = self._held, []
        self._tokens = self._size = 0
        return merge_deltas(held)

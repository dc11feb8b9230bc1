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
"""Held back at most, however long the interval: logprobs make a token large."""


class ChunkCoalescer:
    """`take` gives back what is to go on now."""

    __slots__ = ("_begun", "_held", "_size", "_tokens", "_wanted")

    def __init__(self, tokens: int) -> None:
        self._wanted = tokens
        self._held: list[OutputDelta] = []
        self._tokens = 0
        self._size: Bytes = 0
        self._begun = False

    def take(self, piece: OutputDelta, size: Bytes, *, last: bool) -> OutputDelta | None:
        """The piece, after those that were held back; None: it is held back, too."""
        self._held.append(piece)
        self._tokens += len(piece.tokens)
        self._size += size
        if last or not self._begun or self._tokens >= self._wanted or self._size >= _MOST:
            self._begun = True
            return self.rest()
        return None

    def rest(self) -> OutputDelta | None:
        """What is held back, if anything, and no longer is."""
        if not self._held:
            return None
        held, self._held = self._held, []
        self._tokens = self._size = 0
        return merge_deltas(held)

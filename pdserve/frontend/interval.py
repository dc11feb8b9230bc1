"""Puts a stream's pieces together for clients that want a chunk per so many tokens.

Plain: it knows pieces, no chunks and no sockets. The first piece goes on at once, for the time to
the first token is what people feel; the last one takes along whatever is left. Owned by a choice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pdserve.frontend.output import join

if TYPE_CHECKING:
    from pdserve.frontend.output import Piece
    from pdserve.ids import Bytes

__all__ = ["Interval"]

_MOST: Final[Bytes] = 1 << 16
"""Held back at most, however long the interval: logprobs make a token large."""


class Interval:
    """`take` gives back what is to go on now."""

    __slots__ = ("_begun", "_held", "_size", "_tokens", "_wanted")

    def __init__(self, tokens: int) -> None:
        self._wanted = tokens
        self._held: list[Piece] = []
        self._tokens = 0
        self._size: Bytes = 0
        self._begun = False

    def take(self, piece: Piece, size: Bytes, *, last: bool) -> Piece | None:
        """The piece, after those that were held back; None: it is held back, too."""
        self._held.append(piece)
        self._tokens += len(piece.tokens)
        self._size += size
        if last or not self._begun or self._tokens >= self._wanted or self._size >= _MOST:
            self._begun = True
            return self.rest()
        return None

    def rest(self) -> Piece | None:
        """What is held back, if anything, and no longer is."""
        if not self._held:
            return None
        held, self._held = self._held, []
        self._tokens = self._size = 0
        return join(held)

"""In which parts a prompt's blocks go out while they are computed. Pure: positions and layers only.

What lies before the ticket's first token stays here. Full blocks go out with all their layers once
they are computed; those that the prompt's last chunk completes, the partly filled one among them,
go out in groups of layers if the executor says when layers are done, else together as well.
Recomputing, after a preemption, sends nothing twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pdserve.messages.transfer import MAX_PARTS
from pdserve.transfer.plan import blocks_for, groups_of

if TYPE_CHECKING:
    from pdserve.transfer.plan import Layers

__all__ = ["GROUPS", "Parts", "Piece"]

GROUPS: Final = 8
"""Of layers, at most, in a prompt's last chunk: each costs a notification, and waits for the one
before it only."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Blocks `[first, last)` of the sequence, in `layers`."""

    number: int
    first: int
    last: int
    layers: Layers


class Parts:
    """Of one ticket."""

    def __init__(
        self, first_token: int, tokens: int, block_size: int, layers: int, limit: int = MAX_PARTS
    ) -> None:
        """`tokens` from the sequence's beginning on; `first_token` begins a block. At most `limit`
        parts: when they run short, the rest waits for the end."""
        self.count = 0
        """Taken so far."""
        self.tokens = tokens
        self.edges = frozenset(last for _, last in groups_of((0, layers), GROUPS))
        """After so many layers of the last chunk a part is due."""
        self._size = block_size
        self._layers = layers
        self._limit = limit - len(self.edges)
        self._next = first_token // block_size
        self._end = blocks_for(tokens, block_size)
        self._layer = 0

    @property
    def done(self) -> bool:
        """Nothing is left to be sent."""
        return self._next == self._end

    def computed(self, tokens: int) -> Piece | None:
        """What is due when so many leading tokens are computed in all layers."""
        if tokens >= self.tokens:
            return self._take(self._end, self._layers)
        if self.count >= self._limit:
            return None
        return self._take(tokens // self._size, self._layers)

    def layered(self, layers: int) -> Piece | None:
        """What is due when all tokens are computed in so many layers."""
        return self._take(self._end, layers)

    def _take(self, last: int, layers: int) -> Piece | None:
        if last <= self._next or layers <= self._layer:
            return None
        piece = Piece(self.count, self._next, last, (self._layer, layers))
        self.count += 1
        self._layer = layers
        if layers == self._layers:
            self._next, self._layer = last, 0
        return piece

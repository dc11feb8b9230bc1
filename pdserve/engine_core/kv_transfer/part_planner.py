"""Splits a prompt's KV into parts that are sent while the prompt is computed. Pure.

Tokens before the ticket's first token are not sent. Full blocks are sent with all layers once they
are computed. The blocks of the prompt's last chunk, with the partly filled one, are sent in groups
of layers if the executor reports finished layers. After a preemption nothing is sent twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pdserve.messages.transfer import MAX_PARTS
from pdserve.transfer.copy_plan import blocks_for, layer_groups

if TYPE_CHECKING:
    from pdserve.transfer.copy_plan import Layers

__all__ = ["MAX_LAYER_GROUPS", "PartPlanner", "PartSpan"]

MAX_LAYER_GROUPS: Final = 8
"""Most layer groups in a prompt's last chunk. More groups overlap better with computing, but each
costs a notification."""


@dataclass(frozen=True, slots=True)
class PartSpan:
    """Blocks `[first, last)` of the sequence in the layers `layers`."""

    number: int
    first: int
    last: int
    layers: Layers


class PartPlanner:
    """Plans the parts for one ticket."""

    def __init__(
        self, first_token: int, tokens: int, block_size: int, layers: int, limit: int = MAX_PARTS
    ) -> None:
        """`tokens` is the number of tokens from the sequence's start; `first_token` must begin a
        block. There are at most `limit` parts; the last one has all the rest."""
        self.count = 0
        """Number of parts planned so far."""
        self.tokens = tokens
        self.edges = frozenset(last for _, last in layer_groups((0, layers), MAX_LAYER_GROUPS))
        """Numbers of finished layers of the last chunk after which a part is due."""
        self._size = block_size
        self._layers = layers
        self._limit = limit - len(self.edges)
        self._next = first_token // block_size
        self._end = blocks_for(tokens, block_size)
        self._layer = 0

    @property
    def done(self) -> bool:
        """Return whether all parts have been planned."""
        return self._next == self._end

    def computed(self, tokens: int) -> PartSpan | None:
        """The part that is due when `tokens` leading tokens are computed in all layers."""
        if tokens >= self.tokens:
            return self._take(self._end, self._layers)
        if self.count >= self._limit:
            return None
        return self._take(tokens // self._size, self._layers)

    def layered(self, layers: int) -> PartSpan | None:
        """The part that is due when all tokens are computed in the first `layers` layers."""
        return self._take(self._end, layers)

    def _take(self, last: int, layers: int) -> PartSpan | None:
        if last <= self._next or layers <= self._layer:
            return None
        piece = PartSpan(self.count, self._next, last, (self._layer, layers))
        self.count += 1
        self._layer = layers
        if layers == self._layers:
            self._next, self._layer = last, 0
        return piece

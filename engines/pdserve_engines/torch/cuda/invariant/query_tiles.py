"""Lists a step's queries in tiles: neighbouring tokens of one chunk, in plain numpy on the host.

A decoding sequence is a tile of one query. Which queries share a tile changes no result: a program
computes each of its rows by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from pdserve_engines.torch.models.forward_batch import ForwardBatch, Int32s

__all__ = ["QueryTiles", "list_tiles"]


@dataclass(frozen=True, slots=True)
class QueryTiles:
    """`N` tiles in the order of the batch."""

    rows: Int32s
    """`[N]` the first query's row in the batch."""
    ends: Int32s
    """`[N]` keys that the last query sees, its own included."""
    counts: Int32s
    """`[N]` queries."""
    table_offsets: Int32s
    """`[N]` where the sequence's block ids begin."""


def list_tiles(batch: ForwardBatch, most: int) -> QueryTiles:
    """The tiles of all chunks, of up to `most` queries each."""
    counts = np.diff(batch.offsets)
    tiles = -(-counts // most)
    chunk = np.repeat(np.arange(len(counts)), tiles)
    # Each tile's first query, counted from its chunk's first.
    first = (np.arange(len(chunk)) - np.repeat(np.cumsum(tiles) - tiles, tiles)) * most
    taken = np.minimum(counts[chunk] - first, most)
    return QueryTiles(
        rows=(batch.offsets[chunk] + first).astype(np.int32),
        ends=(batch.starts[chunk] + first + taken).astype(np.int32),
        counts=taken.astype(np.int32),
        table_offsets=batch.table_offsets[chunk].astype(np.int32),
    )

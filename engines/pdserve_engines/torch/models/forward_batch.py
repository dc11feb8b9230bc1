"""Flattens a step's chunks into arrays for the forward pass.

Plain numpy on the host; it knows neither requests nor sampling.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from pdserve.token_ids import token_ids

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from pdserve.engine_core.executor import ScheduledChunk

Int32s = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """Chunks laid end to end. `T` tokens, `C` chunks, `R` rows whose hidden state is wanted."""

    tokens: Int32s
    """`[T]` token ids."""
    positions: Int32s
    """`[T]` place of each token in its own sequence."""
    offsets: Int32s
    """`[C + 1]` where each chunk's tokens begin in `tokens`."""
    starts: Int32s
    """`[C]` position of each chunk's first token; everything before it is in the pool."""
    tables: Int32s
    """Block ids of all chunks' sequences, end to end, in token order."""
    table_offsets: Int32s
    """`[C + 1]` where each chunk's block ids begin in `tables`."""
    rows: Int32s
    """`[R]` ascending indices into `tokens`."""

    @property
    def arrays(self) -> tuple[Int32s, Int32s, Int32s, Int32s, Int32s, Int32s, Int32s]:
        """All of them, in the order of the fields."""
        return (
            self.tokens,
            self.positions,
            self.offsets,
            self.starts,
            self.tables,
            self.table_offsets,
            self.rows,
        )

    def blocks(self, block_size: int) -> npt.NDArray[np.int64]:
        """`[T]` id of the block each token belongs to."""
        chunk_of = np.repeat(np.arange(len(self.starts)), np.diff(self.offsets))
        places = self.table_offsets[chunk_of] + self.positions // block_size
        found: npt.NDArray[np.int64] = self.tables[places].astype(np.int64)
        return found


def make_batch(chunks: Seq[ScheduledChunk], rows: Seq[int], block_size: int) -> ForwardBatch:
    """Flatten `chunks`; only the blocks that hold their tokens are listed."""
    starts = np.array([chunk.start for chunk in chunks], np.int32)
    counts = np.array([chunk.count for chunk in chunks], np.int32)
    needed = -(-(starts + counts) // block_size)
    offsets = _offsets(counts)
    tokens = token_ids()
    tables: list[int] = []
    for chunk, blocks in zip(chunks, needed.tolist(), strict=True):
        start, count, sequence = chunk.start, chunk.count, chunk.sequence
        if count == 1:
            tokens.append(sequence.tokens[start])
        else:
            tokens += sequence.tokens[start : start + count]
        tables += sequence.blocks[:blocks]
    return ForwardBatch(
        tokens=np.frombuffer(tokens, np.uint32).astype(np.int32),
        positions=np.arange(len(tokens), dtype=np.int32) + np.repeat(starts - offsets[:-1], counts),
        offsets=offsets,
        starts=starts,
        tables=np.frombuffer(array("i", tables), np.int32),
        table_offsets=_offsets(needed),
        rows=np.array(rows, np.int32),
    )


def _offsets(counts: Int32s) -> Int32s:
    """Where each of so many entries begins, and where the last one ends."""
    offsets = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=offsets[1:])
    return offsets

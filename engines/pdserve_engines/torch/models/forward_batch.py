"""Flattens a step's chunks into arrays for the forward pass.

Plain numpy on the host; it knows neither requests nor sampling.
"""

from __future__ import annotations

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
    tokens = token_ids()
    positions: list[int] = []
    starts: list[int] = []
    tables: list[int] = []
    offsets, table_offsets = [0], [0]
    for chunk in chunks:
        start = chunk.start
        end = start + chunk.count
        tokens += chunk.sequence.tokens[start:end]
        positions += range(start, end)
        starts.append(start)
        tables += chunk.sequence.blocks[: -(-end // block_size)]
        offsets.append(len(tokens))
        table_offsets.append(len(tables))
    return ForwardBatch(
        tokens=np.array(tokens, np.int32),
        positions=np.array(positions, np.int32),
        offsets=np.array(offsets, np.int32),
        starts=np.array(starts, np.int32),
        tables=np.array(tables, np.int32),
        table_offsets=np.array(table_offsets, np.int32),
        rows=np.array(rows, np.int32),
    )

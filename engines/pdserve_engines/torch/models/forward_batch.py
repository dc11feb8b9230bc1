"""Flattens a step's chunks into arrays for the forward pass.

Plain numpy on the host, but for tokens that only the device knows. It knows neither requests nor
sampling.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from pdserve.token_ids import token_ids
from pdserve_engines.torch.models.upload import upload

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    import torch

    from pdserve.engine_core.executor import ScheduledChunk

Int32s = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class FedTokens:
    """Tokens of the step before, which the host has not read."""

    rows: npt.NDArray[np.int64]
    """Where they belong in the batch's tokens."""
    sources: npt.NDArray[np.int64]
    """Their indices in `tokens`."""
    tokens: torch.Tensor
    """`[n]` int64, on the device; negative where there is none."""


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
    fed: FedTokens | None = field(default=None, kw_only=True)
    """Tokens that are not in `tokens`, since only the device knows them; None: all are."""

    def fill(self, tokens: torch.Tensor) -> torch.Tensor:
        """Put what is `fed` into `tokens`, which are on the device; returns them."""
        if self.fed is None:
            return tokens
        rows, sources = upload(np.stack((self.fed.rows, self.fed.sources)), tokens.device)
        # A row without a token goes on with any: its request has failed.
        known = self.fed.tokens[sources].clamp_min(0).to(tokens.dtype)
        return tokens.index_copy(0, rows, known)

    @property
    def known(self) -> ForwardBatch:
        """The batch with all tokens on the host; waits for the device if it has some."""
        if self.fed is None:
            return self
        tokens = self.tokens.copy()
        tokens[self.fed.rows] = self.fed.tokens.clamp_min(0).cpu().numpy()[self.fed.sources]
        return replace(self, tokens=tokens, fed=None)

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


def make_batch(
    chunks: Seq[ScheduledChunk],
    rows: Seq[int],
    block_size: int,
    before: torch.Tensor | None = None,
) -> ForwardBatch:
    """Flatten `chunks`; only the blocks that hold their tokens are listed. `before`: the tokens
    that the step before has sampled, which `ScheduledChunk.token_from` counts."""
    starts = np.array([chunk.start for chunk in chunks], np.int32)
    counts = np.array([chunk.count for chunk in chunks], np.int32)
    needed = -(-(starts + counts) // block_size)
    offsets = _offsets(counts)
    tokens = token_ids()
    tables: list[int] = []
    for chunk, blocks in zip(chunks, needed.tolist(), strict=True):
        start, count, sequence = chunk.start, chunk.count, chunk.sequence
        if chunk.token_from is not None:
            tokens.append(0)
        elif count == 1:
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
        fed=_fed(chunks, offsets, before),
    )


def _fed(
    chunks: Seq[ScheduledChunk], offsets: Int32s, before: torch.Tensor | None
) -> FedTokens | None:
    places = [place for place, chunk in enumerate(chunks) if chunk.token_from is not None]
    if not places:
        return None
    assert before is not None, "tokens are fed by the step before"
    sources = [chunk.token_from for chunk in chunks if chunk.token_from is not None]
    return FedTokens(offsets[places].astype(np.int64), np.array(sources, np.int64), before)


def _offsets(counts: Int32s) -> Int32s:
    """Where each of so many entries begins, and where the last one ends."""
    offsets = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=offsets[1:])
    return offsets

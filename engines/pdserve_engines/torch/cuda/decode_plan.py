"""Plans a step's attention on the host: which chunks decode, and the work items of those.

Plain numpy, no device. A work item is a segment of a sequence's keys. Segments begin at multiples
of a constant, so the order in which a sequence's keys are summed does not depend on the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from pdserve_engines.torch.models.forward_batch import ForwardBatch

if TYPE_CHECKING:
    from pdserve_engines.torch.models.forward_batch import Int32s

__all__ = ["SEGMENT", "BatchSplit", "WorkItems", "list_items", "most_items", "split_batch"]

SEGMENT: Final = 256
"""Tokens of a segment. Fewer give more programs to a small batch, and more sums to merge."""


@dataclass(frozen=True, slots=True)
class WorkItems:
    """The segments that decoding sequences see, each sequence's next to one another."""

    items: Int32s
    """`[N, 2]`: the sequence, and the position of the segment's first token."""
    first_items: Int32s
    """`[n + 1]` where each sequence's items begin."""

    @property
    def count(self) -> Int32s:
        """`[1]` the number of items."""
        return np.array([len(self.items)], np.int32)

    @property
    def splits(self) -> bool:
        """True if some sequence has more than one item: the merge kernel then joins the results."""
        return len(self.items) > len(self.first_items) - 1


def list_items(lengths: Int32s, window: int | None) -> WorkItems:
    """The items of sequences with so many keys, at least one; a query sees the last `window` of
    them, None: all."""
    lowest = np.maximum(lengths - window, 0) if window is not None else np.zeros_like(lengths)
    first = lowest // SEGMENT
    counts = -(-lengths // SEGMENT) - first
    first_items = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    sequences = np.repeat(np.arange(len(lengths)), counts)
    segments = np.arange(len(sequences)) - np.repeat(first_items[:-1] - first, counts)
    items = np.stack([sequences, segments * SEGMENT], axis=1).astype(np.int32)
    return WorkItems(items, first_items)


def most_items(tokens: int, sequences: int) -> int:
    """Most items of sequences with so many keys together: each may end within a segment, and begin
    within one if it has a window."""
    return tokens // SEGMENT + 2 * sequences


@dataclass(frozen=True, slots=True)
class BatchSplit:
    """A batch's chunks by how their attention is computed."""

    decodes: Int32s
    """`[n]` indices of the chunks of one token."""
    prompts: ForwardBatch | None
    """The chunks of several tokens as a batch of their own; None: there are none."""
    prompt_rows: Int32s
    """Rows of the whole batch that `prompts` holds."""


def split_batch(batch: ForwardBatch) -> BatchSplit:
    """Divide the chunks of `batch`."""
    counts = np.diff(batch.offsets)
    decodes = np.flatnonzero(counts == 1).astype(np.int32)
    longer = np.flatnonzero(counts > 1)
    if not len(longer):
        return BatchSplit(decodes, None, np.zeros(0, np.int32))
    rows = _ranges(batch.offsets, longer)
    if not len(decodes):
        return BatchSplit(decodes, batch, rows)
    prompts = ForwardBatch(
        tokens=batch.tokens[rows],
        positions=batch.positions[rows],
        offsets=_offsets(counts[longer]),
        starts=batch.starts[longer],
        tables=batch.tables[_ranges(batch.table_offsets, longer)],
        table_offsets=_offsets(np.diff(batch.table_offsets)[longer]),
        rows=np.zeros(0, np.int32),
    )
    return BatchSplit(decodes, prompts, rows)


def _ranges(offsets: Int32s, chosen: np.ndarray) -> Int32s:
    """The indices that lie between the offsets of the chosen chunks."""
    parts = [np.arange(offsets[each], offsets[each + 1]) for each in chosen]
    return np.concatenate(parts).astype(np.int32)


def _offsets(counts: np.ndarray) -> Int32s:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)

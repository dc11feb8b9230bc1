"""Selects the rows of a step that are read after the forward pass. Plain lists, no tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from pdserve.engine_core.executor import ScheduledChunk


class RowSelection:
    """The wanted rows of a step, counted through all chunks.

    A sampling chunk needs its last row. A chunk of a request with prompt logprobs also needs every
    row that predicts a prompt token. An embedding request needs every row for a mean, else only the
    last.
    """

    def __init__(self, chunks: Seq[ScheduledChunk]) -> None:
        self.rows: list[int] = []
        self.sampling: list[int] = []
        """Indices of sampling chunks."""
        self.sampling_places: list[int] = []
        """Indices in `rows` of their last rows."""
        self.prompts: list[tuple[int, int, int]] = []
        """(chunk index, first place in `rows`, count)."""
        self.pooled: list[tuple[int, int, int]] = []
        """The same, for rows of embedding requests."""
        if all(chunk.count == 1 and chunk.samples for chunk in chunks):
            # A chunk of the last token predicts no prompt token.
            self.rows = self.sampling = self.sampling_places = list(range(len(chunks)))
            return
        offset = 0
        for index, chunk in enumerate(chunks):
            self._add(index, chunk, offset)
            offset += chunk.count

    @property
    def only_sampling(self) -> bool:
        return not (self.prompts or self.pooled)

    def _add(self, index: int, chunk: ScheduledChunk, offset: int) -> None:
        sequence = chunk.sequence
        if sequence.pools:
            self._add_pooled(index, chunk, offset)
            return
        predicted = 0
        if sequence.sampling.prompt_logprobs is not None:
            predicted = min(chunk.count, max(0, sequence.prompt_len - 1 - chunk.start))
        if predicted:
            self.prompts.append((index, len(self.rows), predicted))
            self.rows += range(offset, offset + predicted)
        if chunk.samples:
            self.sampling.append(index)
            if predicted < chunk.count:
                self.rows.append(offset + chunk.count - 1)
            self.sampling_places.append(len(self.rows) - 1)

    def _add_pooled(self, index: int, chunk: ScheduledChunk, offset: int) -> None:
        mean = chunk.sequence.request.pooling == "mean"
        count = chunk.count if mean else int(chunk.vector)
        if count:
            end = offset + chunk.count
            self.pooled.append((index, len(self.rows), count))
            self.rows += range(end - count, end)

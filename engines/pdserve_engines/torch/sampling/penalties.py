"""Applies repetition, frequency and presence penalties to all rows of a step at once.

Every penalised sequence has a line in a table on the logits' device: the distinct tokens of its
output (and of its prompt, if repetition is penalised), and how often its output has each. A step
sends only what has changed since the last one. The table's width is that of the longest line.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from pdserve_engines.torch.models.upload import upload

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from pdserve.engine_core.scheduler.sequence import Sequence
    from pdserve.ids import SequenceKey
    from pdserve.token_ids import TokenIds
    from pdserve_engines.torch.sampling.row_params import RowParams

__all__ = ["Penalties"]

_NARROWEST: Final = 64
"""Smallest width of the table, in tokens; it grows by doubling."""


class _Line:
    """One sequence's place in the table. Follows its tokens, which only grow."""

    def __init__(self, number: int, sequence: Sequence) -> None:
        self.number = number
        prompt: list[int] = []
        if sequence.sampling.repetition_penalty != 1.0:
            prompt = np.unique(np.array(sequence.tokens[: sequence.prompt_len])).tolist()
        self.places = {token: place for place, token in enumerate(prompt)}
        self.counts = [0] * len(prompt)
        self._seen = sequence.prompt_len

    def follow(self, tokens: TokenIds) -> dict[int, int]:
        """Count the tokens after those seen before; returns the places that have changed, with
        their tokens."""
        changed: dict[int, int] = {}
        if self._seen == len(tokens):
            return changed
        places, counts = self.places, self.counts
        for token in tokens[self._seen :]:
            place = places.setdefault(token, len(counts))
            if place == len(counts):
                counts.append(0)
            counts[place] += 1
            changed[place] = token
        self._seen = len(tokens)
        return changed


class Penalties:
    """Keeps the table and the lines of penalised sequences, until `forget`."""

    def __init__(self) -> None:
        self._lines: dict[SequenceKey, _Line] = {}
        self._unused: list[int] = []
        """Line numbers of sequences that were forgotten."""
        self._ids = torch.zeros((0, 0), dtype=torch.int64)
        self._counts = torch.zeros((0, 0), dtype=torch.float32)
        self._batch: RowParams | None = None
        """The batch that the following belong to."""
        self._members: list[_Line] = []
        self._factors = torch.zeros((3, 0, 1))
        self._where = torch.zeros((2, 0, 1), dtype=torch.int64)
        """Rows of the logits, and lines."""

    def __len__(self) -> int:
        """Number of sequences that have a line."""
        return len(self._lines)

    def apply(self, logits: torch.Tensor, batch: RowParams) -> None:
        """Penalise the rows of `logits` `[n, vocab]` that `batch.penalised` names, in place."""
        if not len(batch.penalised):
            return
        sequences = [batch.sequences[row] for row in batch.penalised.tolist()]
        if batch is not self._batch:
            self._enter(batch, sequences, logits.device)
        self._follow(sequences)
        lengths = np.array([len(line.counts) for line in self._members], np.int64)
        width = int(lengths.max())
        if not width:
            return
        rows, lines = self._where
        ids = self._ids[:, :width].index_select(0, lines[:, 0])
        counts = self._counts[:, :width].index_select(0, lines[:, 0])
        penalised = self._penalise(logits[rows, ids], counts)
        if int(lengths.min()) < width:
            # Behind its end a line repeats its first token, with the same result.
            ends = upload(lengths[:, None], logits.device)
            inside = torch.arange(width, device=logits.device) < ends
            ids = torch.where(inside, ids, ids[:, :1])
            penalised = torch.where(inside, penalised, penalised[:, :1])
        logits[rows, ids] = penalised

    def forget(self, key: SequenceKey) -> None:
        """Drop the line of a sequence; an unknown one is ignored."""
        line = self._lines.pop(key, None)
        if line is not None:
            self._unused.append(line.number)
            self._batch = None
        if not self._lines:
            self._unused.clear()
            self._ids = self._ids.new_zeros((0, 0))
            self._counts = self._counts.new_zeros((0, 0))

    def _penalise(self, values: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        repetition, frequency, presence = self._factors
        scaled = torch.where(values > 0, values / repetition, values * repetition)
        # A tiny factor makes infinities, from which no token can be drawn. A factor that rounds to
        # zero makes NaN of a masked token.
        most = torch.finfo(scaled.dtype).max
        scaled.nan_to_num_(nan=-torch.inf, posinf=most, neginf=-torch.inf)
        values = torch.where(repetition == 1.0, values, scaled)
        return values - torch.where(counts > 0, counts * frequency + presence, 0.0)

    def _enter(self, batch: RowParams, sequences: Seq[Sequence], device: torch.device) -> None:
        """Make lines for sequences that have none."""
        members: list[_Line] = []
        new: list[_Line] = []
        for sequence in sequences:
            line = self._lines.get(sequence.key)
            if line is None:
                number = self._unused.pop() if self._unused else len(self._lines)
                line = self._lines[sequence.key] = _Line(number, sequence)
                line.follow(sequence.tokens)
                new.append(line)
            members.append(line)
        if new:
            self._make_room(max(len(line.counts) for line in new), device)
            for line in new:
                self._write(line)
        numbers = [line.number for line in members]
        self._where = upload(np.array((batch.penalised, numbers), np.int64)[..., None], device)
        self._batch, self._members, self._factors = batch, members, batch.penalties(device)

    def _follow(self, sequences: Seq[Sequence]) -> None:
        """Send what the sequences have become since the last step."""
        changed: list[tuple[int, int, int, int]] = []
        for line, sequence in zip(self._members, sequences, strict=True):
            for place, token in line.follow(sequence.tokens).items():
                changed.append((line.number, place, token, line.counts[place]))
        if not changed:
            return
        entries = np.array(changed, np.int64).T
        self._make_room(int(entries[1].max()) + 1, self._ids.device)
        lines, places, tokens, counts = upload(np.ascontiguousarray(entries), self._ids.device)
        self._ids[lines, places] = tokens
        self._counts[lines, places] = counts.float()

    def _write(self, line: _Line) -> None:
        """Write a whole line. What an earlier sequence has left in it goes: a line without any
        token repeats its first entry."""
        size = len(line.counts)
        self._counts[line.number].zero_()
        pair = upload(np.array((list(line.places), line.counts), np.int64), self._ids.device)
        self._ids[line.number, :size] = pair[0]
        self._counts[line.number, :size] = pair[1].float()

    def _make_room(self, width: int, device: torch.device) -> None:
        """Let the table have `width` columns and a line for every sequence."""
        lines = len(self._lines) + len(self._unused)
        old_lines, old_width = self._ids.shape
        if width <= old_width and lines <= old_lines:
            return
        shape = (
            max(old_lines, 1 << (lines - 1).bit_length()),
            max(old_width, _NARROWEST, 1 << (width - 1).bit_length()),
        )
        for name in ("_ids", "_counts"):
            old: torch.Tensor = getattr(self, name)
            table = torch.zeros(shape, dtype=old.dtype, device=device)
            table[:old_lines, :old_width] = old
            setattr(self, name, table)

"""Applies the masks of grammars and of the reasoning's end to the logits, row by row."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from pdserve.engine_core.structured_output import GrammarError, uses_structured_output
from pdserve_engines.torch.models.upload import upload

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from pdserve.engine_core.scheduler.sequence import Sequence
    from pdserve.engine_core.structured_output import StructuredOutputManager
    from pdserve.ids import SequenceKey


class GrammarMasks:
    """Follows the sequences with a grammar or a reasoning budget, until `forget`."""

    def __init__(self) -> None:
        self.structured_output: StructuredOutputManager | None = None
        """Set once the vocabulary is known; before that, grammars are refused."""
        self.faults: dict[SequenceKey, str] = {}
        """Sequences of the last step that cannot be continued, and why; their logits hold no
        number."""
        self.lasting: set[SequenceKey] = set()
        """Sequences in `faults` whose request would fail on any worker."""
        self.forced: frozenset[int] = frozenset()
        """Rows of the last step for which only an end is left."""

    def apply(self, logits: torch.Tensor, sequences: Seq[Sequence]) -> None:
        """Set row i of `logits` `[n, vocab]`, which continues `sequences[i]`, to minus infinity
        where a token is not allowed; in place."""
        self.clear()
        guided = [
            row for row, each in enumerate(sequences) if uses_structured_output(each.sampling)
        ]
        if not guided:
            return
        masks: dict[int, bytes] = {}
        for row in guided:
            mask = self._mask(sequences[row])
            if mask is not None:
                masks[row] = mask
        self.forced = frozenset(row for row in masks if self._is_forced(sequences[row]))
        if masks:
            _apply(logits, masks)

    def clear(self) -> None:
        """Forget what the last step has found: no sequence of this one is guided."""
        self.faults.clear()
        self.lasting.clear()
        self.forced = frozenset()

    def forget(self, key: SequenceKey) -> None:
        """Drop the state of a sequence; unknown ones are ignored."""
        self.faults.pop(key, None)
        self.lasting.discard(key)
        if self.structured_output is not None:
            self.structured_output.release(key)

    def _mask(self, sequence: Sequence) -> bytes | None:
        """The sequence's mask; empty if it cannot be continued, None if all tokens are allowed."""
        try:
            if self.structured_output is None:
                raise GrammarError("this engine does not support grammars")
            return self.structured_output.allowed(sequence)
        except GrammarError as fault:
            self.faults[sequence.key] = str(fault)
            if fault.lasting:
                self.lasting.add(sequence.key)
            return b""

    def _is_forced(self, sequence: Sequence) -> bool:
        return self.structured_output is not None and self.structured_output.forced(sequence)


def _apply(logits: torch.Tensor, masks: dict[int, bytes]) -> None:
    """Apply all masks at once: one bit per token is copied to the device."""
    vocab = logits.shape[-1]
    width = -(-vocab // 8)
    packed = np.zeros((len(masks), width), np.uint8)
    for at, mask in enumerate(masks.values()):
        packed[at, : len(mask)] = np.frombuffer(mask, np.uint8)[:width]
    rows = upload(np.array(list(masks), np.int64), logits.device)
    bits = upload(packed, logits.device).unsqueeze(-1)
    places = torch.arange(8, dtype=torch.uint8, device=logits.device)
    allowed = ((bits >> places) & 1).flatten(1)[:, :vocab].bool()
    logits[rows] = logits[rows].masked_fill_(~allowed, -torch.inf)

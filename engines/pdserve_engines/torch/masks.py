"""What grammars and the end of reasoning leave of the vocabulary, row by row."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    import torch

    from pdserve.engine.sequence import Sequence
    from pdserve.ids import SequenceKey


class Masks:
    """Follows the sequences that are steered, until `forget`."""

    def apply(self, logits: torch.Tensor, sequences: Seq[Sequence]) -> None:
        """Minus infinity where row i of `logits` `[n, vocab]`, which continues `sequences[i]`, may
        not go; in place."""

    def forget(self, key: SequenceKey) -> None:
        """Drop what is remembered of this sequence; unknown ones are ignored."""

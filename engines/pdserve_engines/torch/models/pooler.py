"""Pools hidden states into one embedding per prompt: the mean of all rows, or the last row.

A classification head may make logits of the last row. A mean is accumulated over a prompt's chunks
in float32, whatever the model's dtype. A sequence's state is dropped when it ends or is preempted;
its prompt then starts again at its first token. The executor owns the pooler and calls it from one
thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pdserve.engine_core.executor import ScheduledChunk
    from pdserve.ids import SequenceKey
    from pdserve_engines.torch.model_loader.classifier import ClassificationHead


class Pooler:
    """Accumulates the prompts that are computed in several chunks."""

    def __init__(self) -> None:
        self.head: ClassificationHead | None = None
        """The model's; None: it has none."""
        self._sums: dict[SequenceKey, torch.Tensor] = {}

    def take(self, chunk: ScheduledChunk, hidden: torch.Tensor) -> torch.Tensor | None:
        """Add a chunk's hidden states; returns the embedding, float32 on the host, if it is the
        sequence's last chunk. `hidden`: all rows of the chunk for a mean, else only its last
        one."""
        sequence = chunk.sequence
        if sequence.request.pooling == "last":
            last = hidden[-1].float().cpu()
            if not sequence.request.classify:
                return last
            assert self.head is not None, "the scheduler refuses it without a head"
            return self.head.logits(last)
        total = hidden.float().sum(0)
        if chunk.start:
            total += self._sums[sequence.key]
        if not chunk.vector:
            self._sums[sequence.key] = total
            return None
        return (total / sequence.prompt_len).cpu()

    def forget(self, keys: Iterable[SequenceKey]) -> None:
        """Drop the state of sequences that ended or were preempted."""
        for key in keys:
            self._sums.pop(key, None)


def to_bytes(vector: torch.Tensor) -> bytes:
    """The embedding as in `Finish.embedding`; empty if any value is not a number."""
    if not bool(torch.isfinite(vector).all()):
        return b""
    return bytes(vector.numpy().astype("<f4").tobytes())

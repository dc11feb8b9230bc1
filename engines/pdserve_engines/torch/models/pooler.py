"""Pools hidden states into one vector per prompt: the mean of all rows, or the last row.

A mean is accumulated over a prompt's chunks in float32, whatever the model's dtype. A sequence's
state is dropped when it ends or is preempted, after which its prompt starts again at its first
token. The executor owns the pooler and calls it from one thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pdserve.engine_core.executor import ScheduledChunk
    from pdserve.ids import SequenceKey


class Pooler:
    """Sums of prompts that are computed in several chunks."""

    def __init__(self) -> None:
        self._sums: dict[SequenceKey, torch.Tensor] = {}

    def take(self, chunk: ScheduledChunk, hidden: torch.Tensor) -> torch.Tensor | None:
        """`hidden`: all rows of the chunk for a mean, else only its last one. The vector, float32
        on the host, once the chunk is its sequence's last one."""
        sequence = chunk.sequence
        if sequence.request.pooling == "last":
            return hidden[-1].float().cpu()
        total = hidden.float().sum(0)
        if chunk.start:
            total += self._sums[sequence.key]
        if not chunk.vector:
            self._sums[sequence.key] = total
            return None
        return (total / sequence.prompt_len).cpu()

    def forget(self, keys: Iterable[SequenceKey]) -> None:
        """These have ended, or will begin anew."""
        for key in keys:
            self._sums.pop(key, None)


def to_bytes(vector: torch.Tensor) -> bytes:
    """As `Finish.embedding`; empty if not all of it are numbers."""
    if not bool(torch.isfinite(vector).all()):
        return b""
    return bytes(vector.numpy().astype("<f4").tobytes())

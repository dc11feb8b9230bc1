"""Holds the blocks of sequences that end while a step with them is on the device.

It releases nothing itself: the scheduler does, when the step has ended.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdserve.engine_core.scheduler.sequence import Sequence

__all__ = ["StepHolds"]

Held = tuple[list[int], list[int]]
"""Blocks in token order that are worth keeping in the cache, and those behind them that are not."""


class StepHolds:
    """The sequences of one step, and the blocks that were left to it."""

    def __init__(self, sequences: Mapping[int, Sequence]) -> None:
        """`sequences` by their `id`."""
        self._sequences = sequences
        self._held: list[Held] = []
        self.handles: set[int] = set()
        """Submissions whose blocks are held."""

    def __contains__(self, sequence: Sequence) -> bool:
        return id(sequence) in self._sequences

    def hold(self, sequence: Sequence, kept: list[int], others: list[int]) -> None:
        """Hold blocks of one of the sequences, which does not use them any more."""
        self._held.append((kept, others))
        self.handles.add(sequence.handle)

    def take(self) -> list[Held]:
        """What was held, in order; the caller has it from now on."""
        held, self._held, self.handles = self._held, [], set()
        return held

"""Computes many decode steps at once, for a core in simulated time.

While `steady` says that the next steps only decode the same batch, one call of `advance` changes
pool and sequences as that many turns of `schedule` and `complete` would.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.engine_core.scheduler.scheduler_state import SchedulerState
from pdserve.engine_core.scheduler.submission import end_reason
from pdserve.messages.request import TokenDelta

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from pdserve.engine_core.scheduler.sequence import Sequence
    from pdserve.ids import Seconds

__all__ = ["FastForward"]


class FastForward(SchedulerState):
    """The part of a scheduler that skips steps."""

    def steady(self, limit: int) -> int:
        """Number of next steps, `limit` at most, that only decode the running batch, unless a stop
        id or a command ends that sooner. In these steps the pool has enough blocks and no sequence
        is admitted; in the last one a sequence may reach its length. O(running)."""
        running, pool = self.running, self._pool
        if not running or self._forked or self.may_reserve:
            return 0
        if self.ready and len(running) < self.limits.max_sequences:
            return 0
        open_door = len(self.waiting) > 0 and len(running) < self.limits.max_sequences
        if open_door and not self._is_stuck():
            return 0
        hungry = open_door or len(self.reservations.waiting) > 0 or bool(self.reservations.lacking)
        steps = limit
        for sequence in running:
            length = len(sequence.tokens)
            if length - sequence.num_computed != 1 or sequence.first_token is None:
                return 0
            steps = min(steps, sequence.max_len - length)
            if hungry:
                # A commit may free a block, so that the next sequence fits.
                steps = min(steps, sequence.commit_at - length + 1)
        while steps > 0 and self._growth(steps) > pool.available:
            steps //= 2
        return steps

    def _growth(self, steps: int) -> int:
        """Number of blocks that the running sequences need in addition for that many steps."""
        return sum(
            max(0, self._blocks_for(len(sequence.tokens) + steps - 1) - len(sequence.blocks))
            for sequence in self.running
        )

    def advance(self, tokens: Seq[list[int]], now: Seconds) -> list[TokenDelta]:
        """Do a number of decode steps that `steady` allows; the last one ends at `now`. `tokens`
        has one list per running sequence, in order, all of one length. Returns one delta per
        sequence. O(running + blocks reserved and filled)."""
        running, steps = list(self.running), len(tokens[0])
        ends = self._change_blocks(running, tokens, steps)
        deltas: list[TokenDelta] = []
        for index, (sequence, fresh) in enumerate(zip(running, tokens, strict=True)):
            sequence.num_computed = len(sequence.tokens) - 1
            if index in ends:
                self._commit(sequence)
            finish = self._end(sequence, now) if end_reason(sequence) is not None else None
            deltas.append(TokenDelta(sequence.handle, sequence.choice, fresh, finish))
        self.counters.computed_tokens += steps * len(running)
        self.counters.output_tokens += steps * len(running)
        return deltas

    def _change_blocks(
        self, running: list[Sequence], tokens: Seq[list[int]], steps: int
    ) -> set[int]:
        """Append the tokens; reserve and commit blocks in the order of single steps. Returns the
        indices of sequences that commit a block in the last step: `advance` does that, in order
        with the sequences that end."""
        size = self._pool.block_size
        changes: list[tuple[int, bool, int]] = []
        for index, sequence in enumerate(running):
            length = len(sequence.tokens)
            full = len(sequence.blocks) * size + 2 - length
            changes += [(step, False, index) for step in range(full, steps + 1, size)]
            full = sequence.commit_at - length + 1
            changes += [(step, True, index) for step in range(full, steps + 1, size)]
            sequence.tokens.extend(tokens[index])
        changes.sort()
        last: set[int] = set()
        for step, filled, index in changes:
            sequence = running[index]
            if not filled:
                grown = self._grow(sequence)
                assert grown, "a steady batch lacks no block"
            elif step == steps:
                last.add(index)
            else:
                sequence.num_computed = sequence.commit_at
                self._commit(sequence)
        return last

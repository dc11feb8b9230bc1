"""Plans a decode step while the device still computes the one before, and keeps its blocks.

The tokens of the step under way are not known yet: the executor takes them on the device, from the
result that the chunk names. Only plain decoding is planned so. Whatever else comes next (a prompt,
a copy, a preemption) waits for the tokens, in `Scheduler.schedule`.

A sequence that turns out to have ended is computed once more, and that token is thrown away. Until
that step has ended, the device reads and writes the sequence's blocks, so nothing else may. This
part holds them until then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.engine_core.executor import ScheduledChunk, StepPlan
from pdserve.engine_core.scheduler.scheduler_state import SchedulerState
from pdserve.engine_core.scheduler.sequence import SequenceStatus
from pdserve.engine_core.scheduler.step_holds import StepHolds

if TYPE_CHECKING:
    from pdserve.engine_core.scheduler.sequence import Sequence

__all__ = ["RunAhead"]


class RunAhead(SchedulerState):
    """The part of a scheduler that plans ahead of results."""

    def launched(self, plan: StepPlan) -> StepHolds:
        """The device begins `plan`: from now on, blocks that its sequences give back are held until
        `landed`. At most the step before is under way, too."""
        self._in_flight = StepHolds({id(chunk.sequence): chunk.sequence for chunk in plan.chunks})
        return self._in_flight

    def landed(self, holds: StepHolds) -> set[int]:
        """The device has ended that step: give back what was held for it. Returns the handles of
        the submissions that had left blocks to it."""
        if holds is self._in_flight:
            self._in_flight = None
        handles = holds.handles
        for kept, others in holds.take():
            if others:
                self._pool.release_early(others)
            self._pool.release(kept)
        return handles

    def is_in_flight(self, handle: int) -> bool:
        """Return whether the last step that was launched holds blocks of this ended submission."""
        return self._in_flight is not None and handle in self._in_flight.handles

    def plan_next(self, plan: StepPlan) -> StepPlan | None:
        """Plan the decode step that follows `plan`, which is under way. None: what follows has to
        wait for its tokens. Nothing is preempted; every new chunk names its token's place among the
        tokens of `plan`. O(running)."""
        if not self._decodes_follow(plan):
            return None
        chunks: list[ScheduledChunk] = []
        growing: list[Sequence] = []
        for index, chunk in enumerate(plan.chunks):
            sequence, start = chunk.sequence, chunk.start + chunk.count
            if sequence.status is not SequenceStatus.RUNNING or start + 1 >= sequence.max_len:
                continue
            if self.steerable is not None and not self.steerable(sequence):
                return None
            if start >= len(sequence.blocks) * self._pool.block_size:
                growing.append(sequence)
            chunks.append(ScheduledChunk(sequence, start, 1, samples=True, token_from=index))
        if not chunks:
            return None
        fresh = self._pool.reserve(len(growing))
        if fresh is None:
            return None
        for sequence, block in zip(growing, fresh, strict=True):
            sequence.blocks.append(block)
        return StepPlan(chunks)

    def _decodes_follow(self, plan: StepPlan) -> bool:
        """Return whether the step after `plan` only decodes sequences that `plan` samples."""
        if plan.copies or plan.watch is not None or plan.gate is not None or self._forked:
            return False
        room = len(self.running) < self.limits.max_sequences
        if room and (self.ready or (len(self.waiting) > 0 and not self._is_stuck())):
            return False
        sampled = {id(chunk.sequence) for chunk in plan.chunks if _is_plain(chunk)}
        return len(sampled) == len(plan.chunks) and all(
            id(sequence) in sampled for sequence in self.running
        )


def _is_plain(chunk: ScheduledChunk) -> bool:
    """Return whether the chunk's result is a token alone, and changes no other sequence."""
    sequence = chunk.sequence
    if not chunk.samples or sequence.forks or sequence.early is not None:
        return False
    # A prompt that is computed again, after a preemption, has logprobs again.
    predicts = chunk.start < sequence.prompt_len - 1
    return not predicts or sequence.request.sampling.prompt_logprobs is None

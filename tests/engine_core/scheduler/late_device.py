"""Provides a device that executes late: an executor whose steps are computed at the last moment.

`begin` and `sample` only note what a kernel would be given: block tables, positions, where tokens
come from. The work is done in order, when a step has to be finished, or before, when the caller's
`hurry` says so. Meanwhile the host changes its sequences and gives blocks to others, so everything
that a device still needs and the host takes away shows: as another token, or in `violation`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pdserve.engine_core.executor import ScheduledChunk, StepPlan, StepResult
from pdserve.engine_core.scheduler.sequence import Sequence
from pdserve.testing.scripted import ScriptedExecutor
from pdserve.token_ids import token_ids

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.kv.block_pool import BlockPool
    from pdserve.token_ids import TokenIds

__all__ = ["LateDevice", "LateStep"]


@dataclass(slots=True, eq=False)
class LateStep:
    """A step that was launched."""

    plan: StepPlan
    """Copies of the chunks, as they were then."""
    before: LateStep | None
    """The step whose tokens it takes."""
    originals: list[Sequence]
    sampled: StepPlan | None = None
    histories: list[TokenIds] = field(default_factory=list)
    """All tokens of each sampled chunk's sequence, as the host knows them."""
    result: StepResult = field(default_factory=lambda: StepResult([], []))
    error: Exception | None = None
    forwarded: bool = False
    ended: bool = False


class LateDevice(ScriptedExecutor):
    """A scripted executor that `SupportsRunAhead`."""

    def __init__(
        self,
        on_plan: Callable[[StepPlan], None] | None = None,
        hurry: Callable[[], bool] = lambda: False,
    ) -> None:
        """`hurry`: whether the device does its next work now; asked whenever it may."""
        super().__init__(on_plan)
        self.runs_ahead = True
        self.pool: BlockPool | None = None
        """Where blocks must have a holder as long as they are used; None: not looked at."""
        self.violation: AssertionError | None = None
        """The first thing that a device would not have survived."""
        self._hurry = hurry
        self._last: LateStep | None = None
        self._under_way: list[LateStep] = []

    def begin(self, plan: StepPlan) -> LateStep:
        """Note the step."""
        self._check(len(self._under_way) < 2, "three steps are under way")
        self._check(not plan.copies and plan.watch is None, "such a step is computed at once")
        error = self._error(plan)
        if error is not None and self._hurry():
            raise error
        copies = [_copy_of(chunk) for chunk in plan.chunks]
        before, self._last = self._last, None
        originals = [chunk.sequence for chunk in plan.chunks]
        step = LateStep(StepPlan(copies), before, originals, error=error)
        self._last = step
        self._under_way.append(step)
        self._work(late=True)
        return step

    def sample(self, step: LateStep, plan: StepPlan) -> None:
        """Note for which chunks tokens are chosen, and what is known for that: masks and penalties
        depend on all tokens up to now."""
        self._check(step is self._under_way[0], "a step is sampled before the one before has ended")
        places = {id(sequence): place for place, sequence in enumerate(step.originals)}
        chunks = []
        for chunk in plan.chunks:
            begun = step.plan.chunks[places[id(chunk.sequence)]]
            self._check(
                len(chunk.sequence.tokens) == begun.start + begun.count,
                "a token is sampled by masks of another step",
            )
            step.histories.append(chunk.sequence.tokens[:])
            chunks.append(begun)
        step.sampled = StepPlan(chunks)
        self._work(late=True)

    def finish(self, step: LateStep) -> StepResult:
        """Do the work up to the end of this step."""
        self._check(bool(self._under_way) and step is self._under_way[0], "finished out of order")
        self._work(late=False)
        self._under_way.remove(step)
        if step.error is not None:
            raise step.error
        return step.result

    def _work(self, *, late: bool) -> None:
        """Do what can be done; `late`: only if the device hurries."""
        for step in self._under_way:
            if not late and step is not self._under_way[0]:
                break
            if not step.forwarded:
                if late and not self._hurry():
                    return
                self._forward(step)
            if step.sampled is None and late:
                return
            if not step.ended:
                if late and not self._hurry():
                    return
                self._choose_tokens(step)

    def _forward(self, step: LateStep) -> None:
        step.forwarded = True
        for chunk in step.plan.chunks:
            if self.pool is not None:
                held = [self.pool.references(block) > 0 for block in chunk.sequence.blocks]
                self._check(all(held), "a step uses blocks that were given back")
            if chunk.token_from is not None:
                chunk.sequence.tokens.append(self._token(step.before, chunk.token_from))
            self._write(chunk)
        step.before = None

    def _token(self, before: LateStep | None, index: int) -> int:
        """A token of the step before; any one if that step has failed."""
        assert before is not None
        self._check(before.ended, "a token is used before it is sampled")
        found = before.result.tokens
        return found[index] if before.error is None and index < len(found) else 0

    def _choose_tokens(self, step: LateStep) -> None:
        step.ended = True
        if step.sampled is None or step.error is not None:
            return
        for chunk, history in zip(step.sampled.chunks, step.histories, strict=True):
            self._check(chunk.sequence.tokens == history, "host and device have other tokens")
        step.result = self._result(step.sampled)

    def _error(self, plan: StepPlan) -> Exception | None:
        """What the script says of the plan's prompts."""
        try:
            for chunk in plan.chunks:
                if chunk.token_from is None:
                    self._misbehave(chunk)
        except Exception as error:
            return error
        return None

    def _check(self, true: bool, what: str) -> None:
        """Keep the first violation: the core takes an exception for a failed step."""
        if not true and self.violation is None:
            self.violation = AssertionError(what)


def _copy_of(chunk: ScheduledChunk) -> ScheduledChunk:
    """The chunk with a sequence of its own, which ends before the token that is not known."""
    sequence = chunk.sequence
    end = chunk.start + (chunk.count if chunk.token_from is None else 0)
    copy = Sequence(
        handle=sequence.handle,
        choice=sequence.choice,
        request=sequence.request,
        tokens=token_ids(sequence.tokens[:end]),
        prompt_len=sequence.prompt_len,
        arrival=sequence.arrival,
        blocks=sequence.blocks[:],
    )
    return ScheduledChunk(copy, chunk.start, chunk.count, chunk.samples, chunk.token_from)

"""Keeps the device busy: begins a step before the host has read the tokens of the one before.

Every turn takes in exactly one step, and returns its result like a step that is computed at once.
The order of a turn, with step k under way: plan and begin k + 1, wait for k, let the core take k
in, sample k + 1 with the tokens of k known. What cannot be foreseen is computed at once, by the
core.

It knows neither requests nor events. `scheduler.run_ahead` decides what follows a step and holds
blocks while the device uses them; the core owns the pipeline and calls it between commands.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pdserve.engine_core.executor import StepPlan, StepResult
from pdserve.engine_core.scheduler.sequence import SequenceStatus
from pdserve.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.engine_core.executor import SupportsRunAhead
    from pdserve.engine_core.scheduler.scheduler import Scheduler
    from pdserve.engine_core.scheduler.step_holds import StepHolds
    from pdserve.ids import Seconds

__all__ = ["StepPipeline"]

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Step:
    """A step on the device."""

    handle: Any
    """What the executor calls it."""
    holds: StepHolds
    plan: StepPlan
    """The begun chunks; once it is sampled, those that are."""
    began: Seconds
    result: StepResult | None = None
    """Set by `settle`."""
    ended: bool = False
    """True once `settle` has waited for it."""


class StepPipeline:
    """At most two steps on the device; between two turns, at most one."""

    def __init__(
        self,
        executor: SupportsRunAhead,
        scheduler: Scheduler,
        fail: Callable[[StepPlan, Exception], None],
    ) -> None:
        """`fail` is called with the chunks that an error of the executor has cost."""
        self._executor = executor
        self._scheduler = scheduler
        self._fail = fail
        self._step: _Step | None = None
        self._next: StepPlan | None = None
        """What follows the step that `begin` has just launched."""
        self._ended: Seconds = 0.0
        """When the last step ended."""
        self.steps_ahead = 0
        """Steps that were begun before the one before them had ended."""

    @property
    def is_busy(self) -> bool:
        """True while a step is under way."""
        return self._step is not None

    def holds(self, handle: int) -> bool:
        """True while the device still uses blocks of this ended submission."""
        return self._scheduler.is_in_flight(handle)

    def begin(self, plan: StepPlan, now: Seconds) -> bool:
        """Launch `plan` whole, with no step under way, if decoding follows it. False: compute it at
        once, nothing has happened."""
        self._next = self._scheduler.plan_next(plan)
        if self._next is None:
            return False
        try:
            self._step = self._launch(plan, now)
        except Exception as error:
            self._fail(plan, error)
        else:
            self._sample(self._step)
        return True

    def turn(
        self,
        take: Callable[[StepPlan, StepResult, Seconds, Seconds], None],
        clock: Callable[[], Seconds],
        tick: Callable[[int], None] | None = None,
    ) -> set[int]:
        """Begin the next step if it is foreseen, and take in the one under way by `take(plan,
        result, took, now)`. Returns the handles of submissions that had ended before, and whose
        blocks it has given back. Does nothing if no step is under way: `begin` has failed."""
        step, self._step = self._step, None
        planned, self._next = self._next, None
        if step is None:
            return set()
        following: _Step | None = None
        lost: Exception | None = None
        if planned is None:
            planned = self._scheduler.plan_next(step.plan)
        if planned is not None:
            planned.tick = tick
            try:
                # At once: whatever happens to the host, `drain` waits for it.
                self._step = following = self._launch(planned, clock())
            except Exception as error:
                lost = error
        result = step.result if step.ended else self._finish(step)
        now = clock()
        took, self._ended = now - max(step.began, self._ended), now
        try:
            if result is not None:
                self._take_in(step.plan, result, lambda plan, result: take(plan, result, took, now))
        finally:
            freed = self._scheduler.landed(step.holds)
        if planned is not None and lost is not None:
            self._fail(_running(planned), lost)
        if following is not None:
            self.steps_ahead += 1
            following.plan = _running(following.plan)
            self._sample(following)
        return freed

    def _take_in(
        self, plan: StepPlan, result: StepResult, take: Callable[[StepPlan, StepResult], None]
    ) -> None:
        """Let the core take in what belongs to sequences that still run."""
        if any(_is_over(chunk.sequence) for chunk in plan.chunks):
            plan, result = result.less(plan, _is_over)
        if plan.chunks:
            take(plan, result)

    def settle(self) -> set[int]:
        """Wait for the step under way, which the next turn takes in, and give back what was held
        for it. Returns handles as `turn` does."""
        step = self._step
        if step is None or step.ended:
            return set()
        step.ended, step.result = True, self._finish(step)
        return self._scheduler.landed(step.holds)

    def drain(self) -> None:
        """Wait for the step under way and drop its result."""
        step, self._step = self._step, None
        if step is None or step.ended:
            return
        try:
            self._executor.finish(step.handle)
        except Exception as error:
            _log.info("the last step of a core that ends has failed: %s", error)
        self._scheduler.landed(step.holds)

    def _launch(self, plan: StepPlan, now: Seconds) -> _Step:
        """Begin a step. Raises what the executor raises."""
        handle = self._executor.begin(plan)
        return _Step(handle, self._scheduler.launched(plan), plan, now)

    def _sample(self, step: _Step) -> None:
        """Launch the choice of tokens; after an error the step goes on without any."""
        if not step.plan.chunks:
            return
        try:
            self._executor.sample(step.handle, step.plan)
        except Exception as error:
            lost, step.plan, self._next = step.plan, StepPlan(), None
            self._fail(lost, error)

    def _finish(self, step: _Step) -> StepResult | None:
        """Wait for a step; None if it has failed, after its requests have got the error."""
        try:
            result = self._executor.finish(step.handle)
            wanted = len(step.plan.chunks)
            if len(result.tokens) != wanted or len(result.logprobs) != wanted:
                raise EngineError(
                    f"the executor returned {len(result.tokens)} tokens and "
                    f"{len(result.logprobs)} logprobs for {wanted} chunks"
                )
        except Exception as error:
            self._fail(_running(step.plan), error)
            return None
        return result


def _is_over(sequence: Any) -> bool:
    return sequence.status is not SequenceStatus.RUNNING


def _running(plan: StepPlan) -> StepPlan:
    """The chunks whose sequences still run."""
    return StepPlan([chunk for chunk in plan.chunks if not _is_over(chunk.sequence)])

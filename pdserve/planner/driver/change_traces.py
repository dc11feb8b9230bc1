"""Makes a trace of each change of a planner: decided, ordered, its states, and how it ended.

Pure: times, wall time and randomness are arguments. A planner that takes a change over begins its
trace when it first sees it. Owned by the service.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pdserve.planner.changes.table import ChangeState
from pdserve.tracing.steps import StepTrace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from random import Random

    from pdserve.ids import Seconds
    from pdserve.messages.planner import Change, ScalingPlan
    from pdserve.planner.changes.book import Ended
    from pdserve.planner.tick import Order, Refusal
    from pdserve.tracing.sink import TraceSink

__all__ = ["ChangeTraces"]

_MOST: Final = 256
"""Changes that are traced at a time; more have no trace."""


class ChangeTraces:
    """The changes of one planner that are under way."""

    def __init__(self, sink: TraceSink, random: Random, wall: Callable[[], float]) -> None:
        """`wall`: Unix seconds."""
        self._sink = sink
        self._random = random
        self._wall = wall
        self._traces: dict[str, StepTrace] = {}

    def note(self, now: Seconds, plans: Iterable[ScalingPlan], ended: Iterable[Ended]) -> None:
        """What a tick has decided and found. Call it before the orders are carried out."""
        for one in ended:
            self._end(now, one)
        there: set[str] = set()
        for plan in plans:
            for change in plan.changes:
                there.add(change.id)
                self._follow(now, plan, change)
        for name in [name for name in self._traces if name not in there]:
            del self._traces[name]  # another planner owns its model by now

    def ordered(self, now: Seconds, order: Order, refusal: Refusal | None) -> None:
        """An order was obeyed, or refused."""
        trace = self._traces.get(order.change.id)
        if trace is None:
            return
        verb = "ordered" if order.verb == "begin" else "end_ordered"
        if refusal is None:
            trace.event(verb, now)
        else:
            trace.event(f"{verb}_in_vain", now, kind=refusal.kind, reason=refusal.reason)

    def _follow(self, now: Seconds, plan: ScalingPlan, change: Change) -> None:
        trace = self._traces.get(change.id)
        if trace is None and len(self._traces) < _MOST:
            trace = self._traces[change.id] = _begun(now, plan, change)
        if trace is not None:
            trace.enter(change.state, now)

    def _end(self, now: Seconds, ended: Ended) -> None:
        trace = self._traces.pop(ended.change.id, None)
        if trace is None:
            return
        failed = ended.state is not ChangeState.DONE
        reason = ended.change.reason if failed else ""
        built = trace.built(now, self._wall(), self._random, error=reason, result=ended.state.value)
        self._sink.add(built)


def _begun(now: Seconds, plan: ScalingPlan, change: Change) -> StepTrace:
    trace = StepTrace(
        "pdserve.change",
        change.id,
        now,
        model=plan.model,
        action=change.action,
        kind=change.kind,
        mode=change.mode,
        worker=change.node or "",
        plan=plan.number,
        term=plan.term,
        reason=change.reason,
    )
    trace.event("decided", now, binding=plan.binding)
    return trace

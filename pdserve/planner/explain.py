"""Says in words what binds a plan, and what was decided. Pure.

A `Binding` keeps the figures beside the words, so that a test, or a reader with the same inputs,
can compute them again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pdserve.ids import NodeId, Seconds
    from pdserve.messages.planner import Change, ScalingPlan
    from pdserve.planner.changes.book import Ended

__all__ = ["Binding", "ended_line", "plan_line"]

_WORDS: Final[Mapping[str, str]] = {
    "ttft": "with {workers} workers the p95 wait would be {value:.0%} of what prompts leave of the "
    "TTFT objective, above {limit:.0%}, at {work:.2f} work/s ({load})",
    "itl": "with {workers} workers the p95 ITL would be {value:.3g} s, above {limit:.3g} s, "
    "at {work:.2f} work/s ({load})",
    "miss": "with {workers} workers {value:.1%} would miss the objective, more than {limit:.1%}, "
    "at {work:.2f} work/s ({load})",
    "busy": "with {workers} workers one mode would be {value:.0%} busy, more than {limit:.0%}, "
    "at {work:.2f} work/s ({load})",
    "floor": "min and floors ask for {floor}, and {workers} serve",
    "lease": "{reason}",
    "max": "max is {max} workers, and there are {workers}",
    "budget": "the budget of {budget:g} leaves {spare:g}, and a worker costs {price:g}",
    "slots": "all {slots} slots of kind {kind} are in use",
    "kind": "{reason}",
    "actuator": "nothing can start a worker: {reason}",
    "unreachable": "{share:.1%} of the requests have prompts that take longer than the TTFT "
    "objective of {ttft:g} s on an idle worker: no number of workers helps them",
    "modes": "more workers do not help: {value:.1%} would miss with {workers} more",
    "blind": "blind: {reason}",
    "doubt": "nothing is removed: {reason}",
    "panic": "nothing is removed for {seconds:.0f} s: the load was {ratio:.2f} × the forecast",
    "cooldown": "the last removal was {seconds:.0f} s ago, and {limit:.0f} s must pass",
    "unseen": "the demand has been seen for {seconds:.0f} s, and {limit:.0f} s must be known",
    "regret": "fewer than {workers} workers were not enough for {before:.2f} work/s; the load is "
    "{work:.2f} work/s now, and must be below {limit:.2f}",
    "paired": "the last workers need each other: {modes}; one that does both jobs would do, and "
    "modes has none",
    "changing": "waits for {action} of {what}",
    "unwanted": "the {action} of {what} is no longer needed, and is withdrawn",
    "operator": "{reason}",
    "paused": "paused by {reason}",
    "pinned": "pinned to {reason}",
    "waiting": "waits for a second tick in agreement: {value:.1%} would miss",
    "objective": "no objective is configured: only min, max and floors count",
    "enough": "{value:.1%} would miss; capacity is added above {limit:.1%}",
    "fast": "the next slow tick may make it smaller",
}


@dataclass(frozen=True, slots=True)
class Binding:
    """What keeps a plan from being cheaper or better."""

    name: str
    """One of a closed set, for metrics."""
    figures: Mapping[str, float | str] = field(default_factory=dict)
    lack: tuple[int, int] | None = None
    """The floor, and the workers that serve, where it keeps the planner from starting those that
    lack. None: none lack."""
    silent: tuple[NodeId, ...] = ()
    """Workers that have an order and do not answer."""
    draining: Mapping[NodeId, Seconds] = field(default_factory=dict)
    """Workers that may drain for longer than the planner's own limit, and how long still."""

    @property
    def words(self) -> str:
        """In one sentence, with the figures."""
        words = _WORDS[self.name].format_map(self.figures)
        if self.lack is not None:
            floor, size = self.lack
            words = f"{_WORDS['floor'].format(floor=floor, workers=size)}: {words}"
        return "; ".join((words, *self._waits()))

    def _waits(self) -> Iterator[str]:
        if self.silent:
            yield f"waits for {', '.join(self.silent)} to answer"
        for node, left in self.draining.items():
            yield f"{node} may drain for {left:.0f} s more, by its own limit"


def plan_line(plan: ScalingPlan, begun: Sequence[Change], before: Mapping[str, int]) -> str:
    """One plan as a line of the decision log. `begun`: the changes that it begins; `before`: the
    target of the plan before."""
    doing = ", ".join(_doing(one) for one in begun) or "no change"
    target = _mix(plan.target)
    was = "" if before == plan.target else f" (was {_mix(before)})" if before else ""
    head = f"{plan.model} #{plan.number}: {target}{was}; {doing}"
    if plan.blind:  # no share of misses is known
        blind = f"blind: {plan.blind}"
        return f"{head}; {blind}" + (f"; {plan.binding}" if plan.binding != blind else "")
    return (
        f"{head}; {plan.observed:.2f} work/s, forecast {plan.forecast.get('0.9', 0.0):.2f}; "
        f"miss {plan.miss_before:.1%} -> {plan.miss_after:.1%}; {plan.binding}"
    )


def ended_line(one: Ended) -> str:
    """A change that is over, as a line of the decision log."""
    change = one.change
    result = "done" if one.state.value == "done" else f"{one.state.value}: {change.reason}"
    return f"{one.model}: {_doing(change)} after {one.seconds:.0f} s: {result}"


def _doing(change: Change) -> str:
    what = change.node or change.kind
    to = f" as {change.mode}" if change.mode else ""
    return f"{change.action} {what}{to}"


def _mix(mix: Mapping[str, int]) -> str:
    return "+".join(f"{count} {mode}" for mode, count in sorted(mix.items()) if count) or "none"

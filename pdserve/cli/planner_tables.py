"""Writes what planners say as text, for `pdserve planner`. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pdserve.planner.driver.wishes import until_words

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pdserve.messages.planner import Change, Instance, PlannerReport, ScalingPlan
    from pdserve.messages.planner_orders import PlannerAnswer, PlannerOrder
    from pdserve.messages.status import ClusterStatus, MemberStatus

__all__ = ["PLANNER_MODES", "explained", "mix_words", "overview_of", "plan_rows"]

_NONE: Final = (
    "there is no planner in the cluster: workers stay as they were started; pdserve --role=planner "
    "--planner=advise shows what one would do"
)
_LINES: Final = 5
"""Lines of the decision log in the overview."""
_MOST_NAMES: Final = 4


def overview_of(status: ClusterStatus, planners: Sequence[MemberStatus]) -> str:
    """What `pdserve planner` shows."""
    if not planners:
        return _NONE
    blocks = [_planner(member) for member in planners]
    wrong = [
        f"degraded ({name}): {why}"
        for member in planners
        if member.report is not None
        for name, why in sorted(member.report.degraded.items())
        if name.startswith("planner_")
    ]
    return "\n\n".join([*blocks, *(["\n".join(wrong)] if wrong else [])])


def _planner(member: MemberStatus) -> str:
    report = None if member.report is None else member.report.planner
    if report is None:
        return f"{member.node}: {member.silence or 'it reports no plans'}"
    owned = "" if report.owner or report.mode == "off" else ", decides for no model now"
    lines = [f"{member.node}: {PLANNER_MODES.get(report.mode, report.mode)}{owned}"]
    for plan in report.plans:
        lines += ["", *_plan(plan, report)]
    lines += [f"  {line}" for line in _instances(report.instances)]
    if report.log:
        lines += ["", *(f"  {line}" for line in report.log[-_LINES:])]
    return "\n".join(lines)


PLANNER_MODES: Final = {
    "off": "off: it decides nothing",
    "advise": "advises: plans are shown, and nothing is changed",
    "act": "acts",
}
"""What a planner does, by its mode."""


def _plan(plan: ScalingPlan, report: PlannerReport) -> Iterator[str]:
    """One model: what there is, what is asked of it, what is done, and what binds."""
    yield f"  {plan.model}, plan {plan.number}"
    yield f"    workers   {mix_words(plan.present)} ready; wanted {mix_words(plan.target)}"
    yield f"    load      {_load(plan)}"
    if not plan.blind:
        yield f"    misses    {plan.miss_before:.1%} as it is, {plan.miss_after:.1%} by the plan"
    if plan.unreachable:
        yield f"    no help   {plan.unreachable:.1%} of the prompts take longer than TTFT allows"
    for change in plan.changes:
        yield f"    doing     {_change(change)}"
    yield f"    binds     {plan.binding}"
    if (paused := report.paused.get(plan.model) or report.paused.get("")) is not None:
        yield f"    paused    by {paused}"
    if (pin := report.pins.get(plan.model)) is not None:
        yield f"    pinned    to {mix_words(pin)}"
    if fixed := report.fixed.get(plan.model, ()):
        yield f"    fixed     {_names(fixed)}: no mode switch, since the engine moves no KV"
    yield f"    cost      {plan.cost:g} an hour"


def _names(nodes: Sequence[str]) -> str:
    shown = ", ".join(nodes[:_MOST_NAMES])
    rest = len(nodes) - _MOST_NAMES
    return f"{shown} and {rest} more" if rest > 0 else shown


def _load(plan: ScalingPlan) -> str:
    if plan.blind:
        return f"not known: {plan.blind}"
    p50, p90 = plan.forecast.get("0.5"), plan.forecast.get("0.9")
    ahead = "" if p50 is None or p90 is None else f"; forecast {p50:.2f}, at most {p90:.2f} (p90)"
    return f"{plan.observed:.2f} prefill seconds a second{ahead}"


def _change(change: Change) -> str:
    what = change.node or change.kind
    to = f" as {change.mode}" if change.mode else ""
    state = f" ({change.state})" if change.state else ""
    return f"{_DOING.get(change.action, change.action)} {what}{to}{state}: {change.reason}"


_DOING: Final = {
    "start": "start",
    "stop": "drain",
    "mode": "switch",
    "undo_drain": "take back the drain of",
}


def _instances(instances: Sequence[Instance]) -> Iterator[str]:
    """Instances that are no workers yet, or have ended in a way that matters."""
    for one in instances:
        if one.state in ("running", "ended"):
            continue
        ref = f" {one.ref}" if one.ref else ""
        reason = f": {one.reason}" if one.reason else ""
        yield f"{one.actuator}{ref}: {one.kind} {one.state}{reason}"


def mix_words(mix: Mapping[str, int]) -> str:
    """Workers by mode, as in `2 decode + 1 prefill`."""
    return " + ".join(f"{n} {mode}" for mode, n in sorted(mix.items()) if n) or "none"


def explained(answer: PlannerAnswer) -> str:
    """Plans in full, with the lines of the decision log about them."""
    blocks = []
    for plan in answer.plans:
        lines = [
            f"{plan.model}, plan {plan.number} of term {plan.term}",
            f"  ready now        {mix_words(plan.present)}",
            f"  wanted           {mix_words(plan.target)}, for {plan.cost:g} an hour",
            f"  load             {_load(plan)}",
            f"  misses           {plan.miss_before:.2%} as it is, {plan.miss_after:.2%} after it",
        ]
        if plan.unreachable:
            lines.append(f"  out of reach     {plan.unreachable:.2%} of the requests")
        lines += [f"  change {one.id}  {_change(one)}" for one in plan.changes]
        lines.append(f"  binds            {plan.binding}")
        lines += [f"  {line}" for line in answer.log if f"{plan.model} #{plan.number}:" in line]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def plan_rows(order: PlannerOrder, answer: PlannerAnswer) -> str:
    """What holds after an order."""
    if order.verb == "enable":
        return f"kind {order.kind} may be started again"
    lines = []
    for wish in answer.wishes:
        what = "paused" if wish.sort == "pause" else f"pinned to {mix_words(wish.mix)}"
        until = until_words(wish)
        lines.append(f"{wish.model or 'all models'}: {what} until {until}, says {wish.by}")
    return "\n".join(lines) or "nothing is paused, and nothing is pinned"

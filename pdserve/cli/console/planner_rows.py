"""Makes the rows of planners and their plans for `pdserve status` and `top`. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.cli.console.layout import Table
from pdserve.cli.planner_tables import PLANNER_MODES, mix_words

if TYPE_CHECKING:
    from pdserve.messages.planner import PlannerReport, ScalingPlan
    from pdserve.messages.status import ClusterStatus

__all__ = ["planner_table"]

_HEADS = (
    *("PLANNER", "MODE", "MODEL", "READY", "WANTED", "CHANGING", "LOAD", "FORECAST", "MISSES"),
    *("COST", "BINDS"),
)


def planner_table(status: ClusterStatus) -> Table:
    """A row for each plan; a planner that decides for no model says so."""
    rows: list[tuple[str, ...]] = []
    for member in status.members:
        report = None if member.report is None else member.report.planner
        if report is None:
            continue
        rows += [_row(member.node, report.mode, plan) for plan in report.plans]
        if not report.plans:
            rows.append((member.node, report.mode, *[""] * (len(_HEADS) - 3), _idle(report)))
    return Table(_HEADS, rows, ("COST", "FORECAST", "LOAD", "MISSES", "CHANGING"), "BINDS")


def _idle(report: PlannerReport) -> str:
    return PLANNER_MODES["off"] if report.mode == "off" else "decides for no model now"


def _row(node: str, mode: str, plan: ScalingPlan) -> tuple[str, ...]:
    changing = ", ".join(f"{one.action} {one.state}".strip() for one in plan.changes)
    p90 = plan.forecast.get("0.9")
    return (
        *(node, mode, plan.model, mix_words(plan.present), mix_words(plan.target)),
        changing,
        "unknown" if plan.blind else f"{plan.observed:.2f}",
        "" if plan.blind or p90 is None else f"{p90:.2f}",
        "" if plan.blind else f"{plan.miss_before:.1%}",
        f"{plan.cost:g}",
        plan.binding,
    )

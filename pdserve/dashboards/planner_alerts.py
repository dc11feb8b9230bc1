"""Alerts about planners and agents. Without a planner they are silent."""

from __future__ import annotations

from typing import Final

from pdserve.dashboards.table import Alert

__all__ = ["planner_alerts"]

_LEAST: Final = "max by (cluster, model) (pdserve_planner_least_workers)"
_READY: Final = 'sum by (cluster, model) (pdserve_planner_workers{state="ready"})'
_OWNER: Final = "max by (cluster, model) (pdserve_planner_owner)"
_ONCE: Final = "max by (cluster, model) (max_over_time(pdserve_planner_owner[6h]))"
_STARTS: Final = 'max by (cluster, model) (pdserve_planner_oldest_change_seconds{action="start"})'
_UNREACHABLE: Final = 'max by (cluster, model) (pdserve_planner_miss_share{when="unreachable"})'
_FAILED: Final = 'increase(pdserve_planner_changes_ended_total{result="failed"}[30m])'
_NOT_SWITCHED: Final = (
    'increase(pdserve_planner_changes_ended_total{action="mode", result="given_up"}[30m])'
)
_EXITS: Final = 'increase(pdserve_agent_exits_total{how=~"failed|lost"}[30m])'


def planner_alerts() -> tuple[Alert, ...]:
    """What keeps planners from doing their work, the one that pages first."""
    return (
        Alert(
            name="PdservePlannerBelowLeast",
            expr=f"({_READY}\n  or 0 * {_LEAST})\n< {_LEAST}",
            hold="10m",
            severity="page",
            summary="{{ $labels.model }}: only {{ $value }} workers are ready",
            description="Fewer than min, or a floor, of the planner's file says, for ten minutes.",
            operands=(_READY, _LEAST),
        ),
        Alert(
            name="PdservePlannerNoOwner",
            expr=f"{_ONCE} == 1\nunless on (cluster, model) ({_OWNER} == 1)",
            hold="5m",
            severity="ticket",
            summary="{{ $labels.model }}: no planner decides for it",
            description="One did within the last six hours. Workers serve as they are.",
            operands=(_ONCE, _OWNER),
        ),
        Alert(
            name="PdservePlannerBlind",
            expr="max by (cluster, model) (pdserve_planner_blind) == 1",
            hold="5m",
            severity="ticket",
            summary="{{ $labels.model }}: the planner does not know the demand",
            description="It removes and switches nothing, and adds workers only where requests "
            "wait.",
            operands=("max by (cluster, model) (pdserve_planner_blind)",),
        ),
        Alert(
            name="PdservePlannerChangesFail",
            expr=f"sum by (cluster, model, action) ({_FAILED}\n  or {_NOT_SWITCHED}) > 2",
            severity="ticket",
            summary="{{ $labels.model }}: the planner's changes fail ({{ $labels.action }})",
            description="More than two in half an hour.",
            operands=(_FAILED, _NOT_SWITCHED),
        ),
        Alert(
            name="PdservePlannerStartStuck",
            expr=f"{_STARTS} > 1800",
            hold="5m",
            severity="ticket",
            summary="{{ $labels.model }}: a worker has been starting for "
            "{{ $value | humanizeDuration }}",
            description="It waits for a host, or it boots and never serves. It is paid for.",
            operands=(_STARTS,),
        ),
        Alert(
            name="PdservePlannerUnreachable",
            expr=f"{_UNREACHABLE} > 0.01",
            hold="30m",
            severity="ticket",
            summary="{{ $labels.model }}: {{ $value | humanizePercentage }} of requests cannot "
            "keep the objective",
            description="Their prompts take longer than the TTFT objective on an idle worker. No "
            "number of workers helps them.",
            operands=(_UNREACHABLE,),
        ),
        Alert(
            name="PdserveAgentWorkersFail",
            expr=f"sum by (cluster, instance, kind) ({_EXITS}) > 2",
            severity="ticket",
            summary="{{ $labels.instance }}: workers of kind {{ $labels.kind }} end by themselves",
            description="More than two in half an hour.",
            operands=(_EXITS,),
        ),
    )

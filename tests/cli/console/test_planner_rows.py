"""Planners and their plans in `pdserve status`."""

from __future__ import annotations

from pdserve.cli.console.planner_rows import planner_table
from pdserve.ids import NodeId
from pdserve.messages.planner import Change, PlannerReport, ScalingPlan
from pdserve.messages.status import ClusterStatus, MemberStatus, NodeReport

P = NodeId("planner-1")
PLAN = ScalingPlan(
    term=1,
    number=3,
    model="m",
    present={"decode": 1, "prefill": 1},
    target={"decode": 2, "prefill": 1},
    changes=(Change(id="c", action="start", state="booting"), Change(id="d", action="mode")),
    forecast={"0.5": 1.5, "0.9": 2.25},
    observed=1.25,
    miss_before=0.081,
    cost=3.0,
    binding="max is 3 workers, and there are 3",
)


def status(*reports: PlannerReport) -> ClusterStatus:
    members = tuple(
        MemberStatus(
            node=NodeId(f"planner-{number}"),
            role="planner",
            epoch=1,
            report=NodeReport(planner=report),
        )
        for number, report in enumerate(reports, 1)
    )
    members += (MemberStatus(node=NodeId("w"), role="worker", epoch=1, report=NodeReport()),)
    return ClusterStatus(cluster="c", asked=P, now=0.0, members=members)


def test_a_plan_is_a_row_with_what_binds_it() -> None:
    blind = ScalingPlan(term=1, number=1, model="n", blind="router r is silent", binding="blind: r")
    table = planner_table(status(PlannerReport(mode="act", owner=True, plans=(PLAN, blind))))
    first, second = (dict(zip(table.heads, row, strict=True)) for row in table.rows)
    assert first == {
        "PLANNER": "planner-1",
        "MODE": "act",
        "MODEL": "m",
        "READY": "1 decode + 1 prefill",
        "WANTED": "2 decode + 1 prefill",
        "CHANGING": "start booting, mode",
        "LOAD": "1.25",
        "FORECAST": "2.25",
        "MISSES": "8.1%",
        "COST": "3",
        "BINDS": "max is 3 workers, and there are 3",
    }
    assert (second["LOAD"], second["FORECAST"], second["MISSES"]) == ("unknown", "", "")


def test_planners_without_a_plan_say_why() -> None:
    table = planner_table(status(PlannerReport(mode="act"), PlannerReport()))
    rows = [dict(zip(table.heads, row, strict=True)) for row in table.rows]
    assert [row["BINDS"] for row in rows] == ["decides for no model now", "off: it decides nothing"]

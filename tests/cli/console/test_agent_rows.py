"""Agents and their workers in `pdserve status`."""

from __future__ import annotations

from pdserve.cli.console.agent_rows import agent_table
from pdserve.ids import NodeId
from pdserve.messages.agent import AgentReport
from pdserve.messages.planner import Instance, Kind
from pdserve.messages.status import ClusterStatus, MemberStatus, NodeReport

A = NodeId("agent-h")


def test_kinds_then_workers_with_their_logs() -> None:
    worker = Instance(
        change="c1", kind="gpu", ref="pid 7", state="failed", reason="why", node=NodeId("h-gpu-0")
    )
    report = AgentReport(
        kinds=(Kind(name="gpu", slots=2),), free={"gpu": 1}, instances=(worker,), directory="/d"
    )
    members = (
        MemberStatus(node=A, role="agent", epoch=1, report=NodeReport(agent=report)),
        MemberStatus(node=NodeId("w"), role="worker", epoch=1, report=NodeReport()),
        MemberStatus(node=NodeId("silent"), role="agent", epoch=1, silence="not asked"),
    )
    table = agent_table(ClusterStatus(cluster="c", asked=A, now=0.0, members=members))
    assert table.rows == [
        ("agent-h", "gpu", "1 of 2", "", "", "", "", "", ""),
        ("agent-h", "gpu", "", "c1", "failed", "h-gpu-0", "pid 7", "/d/c1.log", "why"),
    ]

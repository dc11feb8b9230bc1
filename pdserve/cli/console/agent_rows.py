"""Makes the rows of agents and their workers for `pdserve status` and `top`. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.cli.console.layout import Table

if TYPE_CHECKING:
    from pdserve.messages.agent import AgentReport
    from pdserve.messages.planner import Instance
    from pdserve.messages.status import ClusterStatus

__all__ = ["agent_table"]


def agent_table(status: ClusterStatus) -> Table:
    """The kinds of each agent, each followed by its workers."""
    rows: list[tuple[str, ...]] = []
    for member in status.members:
        report = None if member.report is None else member.report.agent
        if report is not None:
            rows += _rows(member.node, report)
    heads = ("AGENT", "KIND", "FREE", "CHANGE", "STATE", "WORKER", "REF", "LOG", "NOTE")
    return Table(heads, rows, ("LOG", "REF", "WORKER"), "NOTE")


def _rows(node: str, report: AgentReport) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for kind in report.kinds:
        free = f"{report.free.get(kind.name, 0)} of {kind.slots}"
        rows.append((node, kind.name, free, "", "", "", "", "", ""))
    rows += [_worker(node, one, report.directory) for one in report.instances]
    return rows


def _worker(node: str, one: Instance, directory: str) -> tuple[str, ...]:
    log = f"{directory}/{one.change}.log"
    return (node, one.kind, "", one.change, one.state, one.node or "", one.ref, log, one.reason)

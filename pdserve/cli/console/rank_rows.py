"""Makes the rows of tensor-parallel ranks for `pdserve status` and `top`. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.cli.console.layout import Table

if TYPE_CHECKING:
    from pdserve.messages.status import ClusterStatus

__all__ = ["rank_table"]


def rank_table(status: ClusterStatus) -> Table:
    """The ranks of all workers whose engine has several."""
    rows = [
        (member.node, str(one.rank), str(one.pid), one.device or "-", one.state or "-")
        for member in status.members
        if member.report is not None
        for one in member.report.ranks
    ]
    return Table(("RANKS OF", "RANK", "PID", "DEVICE", "STATE"), rows)

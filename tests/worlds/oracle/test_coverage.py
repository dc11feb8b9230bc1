"""Counting visits, and naming what was not visited."""

from __future__ import annotations

from collections import Counter

from pdserve.gossip.member_table import MemberTable
from pdserve.gossip.messages import MemberRecord, MemberState
from pdserve.ids import NodeId
from tests.worlds.oracle.coverage import Cells, count_visits, unvisited_cells


def record(epoch: int, state: MemberState) -> MemberRecord:
    return MemberRecord(NodeId("n"), epoch, address="n:1", role="worker", state=state)


def test_visits_are_counted_while_it_lasts() -> None:
    cells: Cells = Counter()
    members = MemberTable()
    before = vars(MemberTable)["apply"]
    with count_visits(cells):
        members.apply(record(1, MemberState.ALIVE))
        members.apply(record(1, MemberState.DEAD))
        members.apply(record(2, MemberState.ALIVE))
    assert vars(MemberTable)["apply"] is before
    members.apply(record(3, MemberState.ALIVE))
    assert cells == {
        ("member -", "ALIVE"): 1,
        ("member ALIVE", "DEAD"): 1,
        ("member DEAD", "later ALIVE"): 1,
    }
    assert "member DEAD: later ALIVE" not in unvisited_cells(cells)
    assert "member LEFT: later ALIVE" in unvisited_cells(cells)

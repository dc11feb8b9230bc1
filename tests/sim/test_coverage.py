"""Counting visits, and naming what was not visited."""

from __future__ import annotations

from collections import Counter

from pdserve.gossip.member import Members
from pdserve.gossip.messages import Record, State
from pdserve.ids import NodeId
from pdserve.sim.coverage import Cells, missing, watch


def record(epoch: int, state: State) -> Record:
    return Record(NodeId("n"), epoch, address="n:1", role="worker", state=state)


def test_visits_are_counted_while_it_lasts() -> None:
    cells: Cells = Counter()
    members = Members()
    before = vars(Members)["apply"]
    with watch(cells):
        members.apply(record(1, State.ALIVE))
        members.apply(record(1, State.DEAD))
        members.apply(record(2, State.ALIVE))
    assert vars(Members)["apply"] is before
    members.apply(record(3, State.ALIVE))
    assert cells == {
        ("member -", "ALIVE"): 1,
        ("member ALIVE", "DEAD"): 1,
        ("member DEAD", "later ALIVE"): 1,
    }
    assert "member DEAD: later ALIVE" not in missing(cells)
    assert "member LEFT: later ALIVE" in missing(cells)

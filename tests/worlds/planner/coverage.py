"""Counts which cells of the planner's tables of changes a run visits (`planner.changes.table`).

Part of `oracle.coverage`. Most cells hold no news: the table has a row for each event, and a kind
of change meets only some of them. Those that worlds must visit are listed here, and what they do
not visit, with the reason.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pdserve.planner.changes.book import ChangeBook
from pdserve.planner.changes.table import TABLES

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.ids import Seconds
    from pdserve.planner.changes.book import Underway
    from pdserve.planner.changes.table import ChangeEvent
    from tests.worlds.oracle.coverage import Cells

__all__ = ["CHANGE_CELLS", "PROBES"]


def _moved(cells: Cells, book: ChangeBook, now: Seconds, one: Underway, event: ChangeEvent) -> None:
    cells[f"change {one.action.value} {one.state.value}", event.value] += 1


PROBES: Final[tuple[tuple[type, str, Callable[..., None]], ...]] = ((ChangeBook, "_move", _moved),)
"""Methods that are looked at before each call."""

CHANGE_CELLS: Final = frozenset(
    (f"change {action.value} {state.value}", event.value)
    for action, table in TABLES.items()
    for state, events in table.items()
    for event in events
)

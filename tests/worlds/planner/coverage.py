"""Counts which cells of the planner's tables of changes a run visits (`planner.changes.table`).

Part of `oracle.coverage`. A table has a row for each event, and a kind of change meets only some of
them: those that worlds must visit are listed here, and those that they do not, with the reason.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pdserve.planner.changes.book import ChangeBook
from pdserve.planner.changes.table import TABLES, Action

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.ids import Seconds
    from pdserve.planner.changes.book import Underway
    from pdserve.planner.changes.table import ChangeEvent
    from tests.worlds.oracle.coverage import Cells

__all__ = ["ALL_CHANGE_CELLS", "CHANGE_CELLS", "NEVER", "PROBES", "RARE"]


def _moved(cells: Cells, book: ChangeBook, now: Seconds, one: Underway, event: ChangeEvent) -> None:
    cells[f"change {one.action.value} {one.state.value}", event.value] += 1


PROBES: Final[tuple[tuple[type, str, Callable[..., None]], ...]] = ((ChangeBook, "_move", _moved),)
"""Methods that are looked at before each call."""

_OF_STARTS: Final = ("seen pending", "seen booting", "seen loading", "wrong mode", "seen failed")
_OF_WORKERS: Final = ("seen draining", "seen leaving", "seen proving", "seen back")
NEVER: Final[dict[str, dict[str, tuple[str, ...]]]] = {
    "an instance or a start has it, and the change is about a worker that serves": {
        "stop": (*_OF_STARTS, "seen ready", "seen leaving", "seen proving"),
        "mode": _OF_STARTS,
        "undo_drain": (*_OF_STARTS, *_OF_WORKERS),
    },
    "a worker that serves has it, and the change is about one that begins": {"start": _OF_WORKERS},
    "only starts and stops are withdrawn": {
        action: ("withdrawn",) for action in ("mode", "undo_drain")
    },
}
"""Events that a kind of change never meets, by the reason."""

_VISITED: Final[dict[str, dict[str, tuple[str, ...]]]] = {
    "start": {
        "asked": ("seen pending", "seen loading"),
        "pending": ("seen loading",),
        "joined": ("seen loading", "seen ready"),
    },
    "stop": {
        "ordered": ("seen draining", "gone"),
        "draining": ("gone", "seen back"),
    },
    "undo_drain": {"ordered": ("seen ready",)},
}

CHANGE_CELLS: Final = frozenset(
    (f"change {action} {state}", event)
    for action, states in _VISITED.items()
    for state, events in states.items()
    for event in events
)
"""What worlds with planners must visit."""

ALL_CHANGE_CELLS: Final = frozenset(
    (f"change {action.value} {state.value}", event.value)
    for action, table in TABLES.items()
    for state, events in table.items()
    for event in events
)

_NEVER: Final = frozenset(
    (f"change {action} {state.value}", event)
    for actions in NEVER.values()
    for action, events in actions.items()
    for state in TABLES[Action(action)]
    for event in events
)

RARE: Final = ALL_CHANGE_CELLS - CHANGE_CELLS - _NEVER
"""Cells of which some tens of drawn worlds visited none, or one once: they need several things at a
time, or a start that is seen at the one moment between two states. They are counted, and need not
be visited; `tests/planner/changes` has them."""

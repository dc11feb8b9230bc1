"""Counts which cells of the planner's tables of changes a run visits (`planner.changes.table`), and
which of the table of a worker's mode (`worker.mode.state_table`).

Part of `oracle.coverage`. A table has a row for each event, and a kind of change meets only some of
them. Each cell stands here once: worlds must visit it, or they visit it rarely or never, for a
reason.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pdserve.planner.changes.book import ChangeBook
from pdserve.planner.changes.table import TABLES, Action
from pdserve.worker.mode.switch import ModeSwitch
from tests.worlds.planner.bindings import Bindings

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.ids import Seconds
    from pdserve.planner.changes.book import Underway
    from pdserve.planner.changes.table import ChangeEvent
    from pdserve.planner.explain import Binding
    from pdserve.worker.mode.state_table import ModeEvent
    from tests.worlds.oracle.coverage import Cells

__all__ = [
    "ALL_CHANGE_CELLS",
    "CHANGE_CELLS",
    "MODE_CELLS",
    "NEVER",
    "NEVER_CELLS",
    "PROBES",
    "RARE",
    "RARE_CELLS",
    "UNBOUND",
]


def _moved(cells: Cells, book: ChangeBook, now: Seconds, one: Underway, event: ChangeEvent) -> None:
    cells[f"change {one.action.value} {one.state.value}", event.value] += 1


def _fed(cells: Cells, switch: ModeSwitch, event: ModeEvent) -> None:
    cells[f"mode {switch._state.value}", event.value] += 1


def _bound(cells: Cells, bindings: Bindings, past: object, binding: Binding) -> None:
    cells["limit", binding.name] += 1


PROBES: Final[tuple[tuple[type, str, Callable[..., None]], ...]] = (
    (ChangeBook, "_move", _moved),
    (ModeSwitch, "_feed", _fed),
    (Bindings, "_untrue", _bound),
)
"""Methods that are looked at before each call."""

_OF_STARTS: Final = ("seen pending", "seen booting", "seen loading", "wrong mode", "seen failed")
_OF_WORKERS: Final = ("seen draining", "seen leaving", "seen proving", "seen back")
_Cells = dict[str, tuple[str, ...]]
"""Events by an action and some of its states; without states: in all of them."""

UNBOUND: Final[dict[str, str]] = {
    "miss": "the judge of these worlds lets requests wait for too long before it lets any miss, so "
    "`ttft` or `itl` binds first: tests/planner/rules/test_shrink.py shows it",
    "busy": "it binds where prompts are out of reach, and then `unreachable` is told: "
    "tests/planner/test_core.py shows that the pool stays",
    "fast": "each tick finds a limit of its own",
}
"""Limits that no world shows, and why."""

NEVER: Final[dict[str, _Cells]] = {
    "an instance or a start has it, and the change is about a worker that serves": {
        "stop": (*_OF_STARTS, "seen ready", "seen leaving", "seen proving"),
        "mode": _OF_STARTS,
        "undo_drain": (*_OF_STARTS, *_OF_WORKERS),
    },
    "a worker that serves has it, and the change is about one that begins": {"start": _OF_WORKERS},
    "starts are withdrawn before they run, and stops before they are obeyed": {
        "mode": ("withdrawn",),
        "undo_drain": ("withdrawn",),
        "start booting joined ending": ("withdrawn",),
        "stop draining stopping": ("withdrawn",),
    },
    "actuators refuse what they are asked for, and nothing later": {
        "start pending booting joined ending": ("refused",),
    },
    "what is given up has no time left to wait for": {"start ending": ("timed out",)},
    "what a worker has gone on from, and what it is at, is no news": {
        "stop ordered": ("seen back",),
        "stop draining stopping": ("seen draining",),
        "mode ordered": ("seen back",),
        "mode leaving": ("seen leaving",),
        "mode proving": ("seen leaving", "seen proving"),
    },
}
"""Events that a kind of change never meets, by the reason."""

_VISITED: Final[_Cells] = {
    "start asked": ("seen pending", "seen loading", "seen ready"),
    "start pending": ("seen pending", "seen loading"),
    "start joined": ("seen loading", "seen ready"),
    "stop ordered": ("seen draining",),
    "stop draining": ("gone", "seen back"),
    "mode ordered": ("seen leaving", "seen ready"),
    "undo_drain ordered": ("seen ready",),
}

RARE: Final[dict[str, _Cells]] = {
    "a worker of these worlds is a member as soon as its process runs": {
        "start asked pending": ("seen booting",),
        "start booting": (*_OF_STARTS, "seen ready", "gone", "timed out"),
    },
    "an instance is listed whose worker's card has been seen, and is lost again": {
        "start joined": ("seen pending", "seen booting"),
    },
    "a start is given up first": {"start ending": (*_OF_STARTS, "seen ready", "gone")},
    "a start ends, or is over, between two looks": {
        "start asked": ("wrong mode", "seen failed", "gone"),
        "start pending": ("seen ready", "wrong mode", "seen failed", "gone"),
        "start joined": ("wrong mode", "seen failed", "gone"),
    },
    "starts fail, are late or not wanted any more in few worlds": {
        "start asked": ("refused", "timed out", "withdrawn"),
        "start pending": ("timed out", "withdrawn"),
        "start joined": ("timed out",),
    },
    "a worker refuses a drain only if another one has gone that did its job": {
        "stop ordered": ("refused",),
    },
    "the load returns between two ticks": {"stop ordered": ("withdrawn",)},
    "a worker dies, or is cut off, just when it is told to drain": {
        "stop ordered": ("gone", "timed out"),
        "stop draining": ("refused", "timed out"),
        "stop stopping": ("seen back", "gone", "refused", "timed out"),
    },
    "a change of a mode takes about a second, and a tick as long": {
        "mode ordered": ("seen proving",),
        "mode leaving": ("seen proving", "seen ready"),
        "mode proving": ("seen ready",),
    },
    "the same worker must die, drain or be cut off within that second, or its engine must": {
        "mode ordered": ("seen draining", "gone", "refused", "timed out"),
        "mode leaving": ("seen back", "seen draining", "gone", "refused", "timed out"),
        "mode proving": ("seen back", "seen draining", "gone", "refused", "timed out"),
    },
    "a worker that is to serve again does so within a tick": {
        "undo_drain ordered": ("gone", "refused", "timed out"),
    },
}
"""Events that few worlds meet, by the reason; `tests/planner/changes` has them all."""


def _cells(rows: _Cells) -> frozenset[tuple[str, str]]:
    found: set[tuple[str, str]] = set()
    for name, events in rows.items():
        action, *some = name.split()
        states = some or [state.value for state in TABLES[Action(action)]]
        found |= {(f"change {action} {state}", event) for state in states for event in events}
    return frozenset(found)


def _all_cells(by_reason: dict[str, _Cells]) -> frozenset[tuple[str, str]]:
    return frozenset().union(*(_cells(rows) for rows in by_reason.values()))


MODE_CELLS: Final = frozenset(
    {
        ("mode serving", "ordered"),
        ("mode leaving", "empty"),
        ("mode flipping", "flipped"),
        ("mode proving", "proved"),
    }
)
"""What happens to a mode in worlds with planners; tests/worker/mode visits all cells."""
CHANGE_CELLS: Final = _cells(_VISITED)
"""What worlds with planners must visit."""
RARE_CELLS: Final = _all_cells(RARE)
NEVER_CELLS: Final = _all_cells(NEVER)
ALL_CHANGE_CELLS: Final = frozenset(
    (f"change {action.value} {state.value}", event.value)
    for action, table in TABLES.items()
    for state, events in table.items()
    for event in events
)

"""Counts which pairs (request state, event) a run's migrations have met, and how they ended.

Part of `coverage`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from pdserve.frontend.dispatch.dispatched_request import DispatchedRequest
from pdserve.frontend.dispatch.migration.migration_state import migration_reason

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.errors import PdserveError
    from pdserve.frontend.dispatch.assignment import Assignment

__all__ = ["PROBES", "REQUEST_CELLS"]

_LOST: Final = ("worker_lost", "engine_died", "engine_stalled", "step_failed")

_DISPATCHED: Final[dict[str, tuple[str, ...]]] = {
    "asking": ("fail",),
    "accepted": (*_LOST, "overloaded", "asked drain", "asked queue", "begins", "cancel"),
    "streaming": (*_LOST, "asked drain", "asked kv", "cancel", "finish"),
    "leaving": ("worker_lost", "engine_died", "drain", "begins", "leaves", "cancel", "finish"),
    "between": ("begins", "cancel", "fail NoWorker", "fail Poisoned", "fail DeadlineExceeded"),
}
"""Where a request is: a first worker is looked for; one has taken it; it gives tokens; it would
rather not have it, and another is looked for or made ready; that one has lost it. What happens: its
worker loses it, for a reason; asks for it to be moved; tokens come; it leaves for another worker;
its client turns away; it ends. What needs more than one rare thing at a time is not here: it is
counted, and need not happen."""

_ENDS: Final[dict[str, tuple[str, ...]]] = {
    "worker_lost": ("completed", "cancelled", "no_worker"),
    "engine_died": ("completed", "cancelled", "poison"),
    "engine_stalled": ("completed",),
    "step_failed": ("completed", "poison"),
    "drain": ("completed", "cancelled"),
    "queue": ("completed",),
    "kv": ("completed",),
}
"""How a migration ends, by what it is for."""

REQUEST_CELLS: Final = frozenset(
    (f"{what} {state}", event)
    for what, table in (("request", _DISPATCHED), ("migration", _ENDS))
    for state, events in table.items()
    for event in events
)


def _state(dispatched: DispatchedRequest) -> str:
    attempt = dispatched.attempt
    if attempt is None:
        return "asking" if dispatched._migrations.current is None else "between"
    if attempt.moving is not None:
        return "leaving"
    if attempt.begun:
        return "streaming"
    return (
        "between"
        if attempt.sequence is None and dispatched._migrations.current is not None
        else "accepted"
    )


def _note(cells: Any, dispatched: DispatchedRequest, event: str) -> None:
    cells[f"request {_state(dispatched)}", event] += 1


def _failed(
    cells: Any, dispatched: DispatchedRequest, attempt: Assignment, error: PdserveError
) -> None:
    if not dispatched._over and attempt is dispatched.attempt:
        reason = migration_reason(error) or type(error).__name__.lower()
        _note(cells, dispatched, reason)


def _unwanted(cells: Any, dispatched: DispatchedRequest, attempt: Assignment, reason: str) -> None:
    if not dispatched._over and attempt is dispatched.attempt:
        _note(cells, dispatched, f"asked {reason}")


def _progressed(cells: Any, dispatched: DispatchedRequest) -> None:
    attempt = dispatched.attempt
    leaving = attempt is not None and attempt.moving is not None
    state = "between" if dispatched._migrations.current is not None else "accepted"
    cells[f"request {'leaving' if leaving else state}", "begins"] += 1
    if dispatched._migrations.current is not None:
        cells[f"migration {dispatched._migrations.current.reason}", "completed"] += 1


def _left(cells: Any, dispatched: DispatchedRequest, attempt: Assignment) -> None:
    _note(cells, dispatched, "leaves")


def _ended(cells: Any, dispatched: DispatchedRequest, error: PdserveError) -> None:
    if dispatched._over:
        return
    state = _state(dispatched)
    cells[f"request {state}", f"fail {type(error).__name__}" if state == "between" else "fail"] += 1


def _closed(cells: Any, dispatched: DispatchedRequest, outcome: str, error: Any = None) -> None:
    if dispatched._migrations.current is not None:
        cells[f"migration {dispatched._migrations.current.reason}", outcome] += 1


def _cancelled(cells: Any, dispatched: DispatchedRequest) -> None:
    if not dispatched._over:
        _note(cells, dispatched, "cancel")


def _finished(cells: Any, dispatched: DispatchedRequest) -> None:
    _note(cells, dispatched, "finish")


PROBES: Final[tuple[tuple[type, str, Callable[..., None]], ...]] = (
    (DispatchedRequest, "failed", _failed),
    (DispatchedRequest, "unwanted", _unwanted),
    (DispatchedRequest, "_note_progress", _progressed),
    (DispatchedRequest, "_leave", _left),
    (DispatchedRequest, "fail", _ended),
    (DispatchedRequest, "_close", _closed),
    (DispatchedRequest, "cancel", _cancelled),
    (DispatchedRequest, "_finish", _finished),
)
"""Functions to look over the shoulder of, and who looks."""

"""Keeps account of one request's migrations: the one in progress, how many, the time they took."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdserve.frontend.dispatch.assignment import Assignment
    from pdserve.frontend.dispatch.dispatch_phases import DispatchPhases
    from pdserve.frontend.dispatch.migration.migration_state import (
        MigrationOutcome,
        MigrationReason,
    )
    from pdserve.ids import NodeId, Seconds
    from pdserve.observe.metrics import ModelMetrics

__all__ = ["MigrationInProgress", "MigrationRecord"]


@dataclass(slots=True)
class MigrationInProgress:
    """A migration in progress."""

    reason: MigrationReason
    since: Seconds
    worker: NodeId
    words: str
    """What happened to the previous worker."""
    began: Seconds
    """`since` on the clock of the request's phases."""


class MigrationRecord:
    """The migrations of one request."""

    __slots__ = ("completed", "current", "moved", "wished")

    def __init__(self) -> None:
        self.current: MigrationInProgress | None = None
        self.completed = 0
        self.wished = 0
        """How many of all a worker asked for, drains not counted."""
        self.moved: Seconds = 0.0
        """Time between two workers without a token."""

    @property
    def number(self) -> int:
        """Migrations so far, with the one in progress."""
        return self.completed + (self.current is not None)

    @property
    def words(self) -> str:
        """What happened to the last worker; empty if no migration is in progress."""
        return "" if self.current is None else self.current.words

    def begin(
        self, attempt: Assignment, reason: MigrationReason, words: str, now: Seconds, began: Seconds
    ) -> None:
        """The request has lost its worker, or has left it. One that has not come to an end goes
        on with the new reason."""
        before = self.current
        if before is not None:
            now, began = before.since, before.began
        self.current = MigrationInProgress(reason, now, attempt.life.node, words, began)

    def end(
        self,
        outcome: MigrationOutcome,
        attempt: Assignment | None,
        phases: DispatchPhases,
        metrics: ModelMetrics,
    ) -> MigrationInProgress | None:
        """Ends the migration in progress, if there is one, and returns it. `attempt`: the worker
        that has the request now."""
        migration, self.current = self.current, None
        if migration is None:
            return None
        here = "" if attempt is None else attempt.life.node
        target = here if outcome == "completed" else ""
        phases.moved(migration.began, migration.reason, migration.worker, target, outcome)
        metrics.migrated(migration.reason, outcome)
        self.completed += outcome == "completed"
        return migration

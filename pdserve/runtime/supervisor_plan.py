"""Decides what a supervisor does when a child ends: report what happened, then ask `next`.

    up         runs
    condemned  runs, but must stop because one before it failed (rest_for_one)
    down       starts again at `due`
    over       ended for good, by its kind

Pure: it knows indices and times, no children and no event loop. Owned by one `supervisor`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pdserve.runtime.restart_intensity import Backoff, RestartIntensity

if TYPE_CHECKING:
    from collections.abc import Sequence
    from random import Random

    from pdserve.ids import Seconds
    from pdserve.runtime.restart_intensity import RestartLimits

__all__ = [
    "Action",
    "RestartKind",
    "RestartStrategy",
    "RestartsUsedUp",
    "StartChild",
    "StopChild",
    "SupervisorPlan",
    "WaitUntil",
]

RestartKind = Literal["permanent", "transient", "temporary"]
"""When to restart a child: always, only after a failure, or never."""

RestartStrategy = Literal["one_for_one", "rest_for_one"]
"""What to restart: the failed child alone; or also those that started after it, stopped in reverse
order first.
"""


@dataclass(frozen=True, slots=True)
class StopChild:
    """Stop a child."""

    index: int


@dataclass(frozen=True, slots=True)
class StartChild:
    """Start a child."""

    index: int


@dataclass(frozen=True, slots=True)
class WaitUntil:
    """Nothing to do before `until`; None: before the next event."""

    until: Seconds | None


@dataclass(frozen=True, slots=True)
class RestartsUsedUp:
    """The restart limit is exceeded."""


Action = StopChild | StartChild | WaitUntil | RestartsUsedUp


@dataclass(slots=True)
class _Child:
    kind: RestartKind
    backoff: Backoff
    state: Literal["up", "condemned", "down", "over"] = "up"
    due: Seconds = 0.0


class SupervisorPlan:
    """The state of all children. Begins with every child up."""

    def __init__(
        self,
        kinds: Sequence[RestartKind],
        strategy: RestartStrategy,
        restarts: RestartLimits,
        random: Random,
    ) -> None:
        self._children = [_Child(kind, Backoff(restarts, random)) for kind in kinds]
        self._in_order = strategy == "rest_for_one"
        self._intensity = RestartIntensity(restarts)
        self._exhausted = False

    def ended(self, index: int, now: Seconds, *, failed: bool) -> None:
        """Notes that a child ended, by itself or on request."""
        child = self._children[index]
        if child.kind == "temporary":
            child.state = "over"
        elif child.state == "condemned":
            child.state, child.due = "down", now
        elif failed or child.kind == "permanent":
            self._restart(index, now)
        else:
            child.state = "over"

    def started(self, index: int) -> None:
        """Notes that a start succeeded."""
        self._children[index].state = "up"

    def start_failed(self, index: int, now: Seconds) -> None:
        """Notes that a start failed; it counts like any other failure."""
        self._restart(index, now)

    def _restart(self, index: int, now: Seconds) -> None:
        child = self._children[index]
        if not self._intensity.allows(now):
            self._exhausted = True
        child.state, child.due = "down", now + child.backoff.failed(now)
        if self._in_order:
            for later in self._children[index + 1 :]:
                if later.state == "up":
                    later.state = "condemned"

    def next(self, now: Seconds) -> Action:
        """The next step. Stops come first, the last child's first; then starts, in order."""
        if self._exhausted:
            return RestartsUsedUp()
        indices = range(len(self._children))
        for index in reversed(indices):
            if self._children[index].state == "condemned":
                return StopChild(index)
        waiting = [index for index in indices if self._children[index].state == "down"]
        if self._in_order:
            waiting = waiting[:1]
        for index in waiting:
            if self._children[index].due <= now:
                return StartChild(index)
        return WaitUntil(min((self._children[index].due for index in waiting), default=None))

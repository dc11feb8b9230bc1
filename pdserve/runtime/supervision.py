"""What a supervisor does about an end, decided without a loop: tell it what happened, ask `next`.

    up       runs
    condemned  runs, but must stop since one before it has failed (rest_for_one)
    down     starts again at `due`
    over     ended for good, by its kind

It knows indices and times, no children. Owned by one `supervisor`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pdserve.runtime.intensity import Backoff, Intensity

if TYPE_CHECKING:
    from collections.abc import Sequence
    from random import Random

    from pdserve.ids import Seconds
    from pdserve.runtime.intensity import Restarts

__all__ = ["Action", "GiveUp", "Kind", "Plan", "Start", "Stop", "Strategy", "Wait"]

Kind = Literal["permanent", "transient", "temporary"]
"""Restarted always, only after a failure, never."""

Strategy = Literal["one_for_one", "rest_for_one"]
"""Restart what has failed alone; or, in reverse order, stop those that started after it first."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Stop a child."""

    index: int


@dataclass(frozen=True, slots=True)
class Start:
    """Start a child."""

    index: int


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to do before `until`, None: before something happens."""

    until: Seconds | None


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Restarts are exhausted."""


Action = Stop | Start | Wait | GiveUp


@dataclass(slots=True)
class _Child:
    kind: Kind
    backoff: Backoff
    state: Literal["up", "condemned", "down", "over"] = "up"
    due: Seconds = 0.0


class Plan:
    """See above. Begins with every child up."""

    def __init__(
        self, kinds: Sequence[Kind], strategy: Strategy, restarts: Restarts, random: Random
    ) -> None:
        self._children = [_Child(kind, Backoff(restarts, random)) for kind in kinds]
        self._in_order = strategy == "rest_for_one"
        self._intensity = Intensity(restarts)
        self._exhausted = False

    def ended(self, index: int, now: Seconds, *, failed: bool) -> None:
        """A child has ended, by itself or because it was to stop."""
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
        """A start has succeeded."""
        self._children[index].state = "up"

    def start_failed(self, index: int, now: Seconds) -> None:
        """A start has failed: it counts like any other failure."""
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
        """What to do now. Stops come first, the last child's first; then starts, in order."""
        if self._exhausted:
            return GiveUp()
        indices = range(len(self._children))
        for index in reversed(indices):
            if self._children[index].state == "condemned":
                return Stop(index)
        waiting = [index for index in indices if self._children[index].state == "down"]
        if self._in_order:
            waiting = waiting[:1]
        for index in waiting:
            if self._children[index].due <= now:
                return Start(index)
        return Wait(min((self._children[index].due for index in waiting), default=None))

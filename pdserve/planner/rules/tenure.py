"""Remembers how long each worker has been what it is, and what an operator did to it. Pure.

An operator's own change is a constraint and not an error to be corrected: a worker that was started
by hand is not removed, and one whose mode was changed by hand keeps it, for a while.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from pdserve.planner.changes.ids import read_change_id

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pdserve.ids import NodeLife, Seconds
    from pdserve.planner.pool import Worker

__all__ = ["Tenure"]

_HOUR: Final[Seconds] = 3600.0


@dataclass(slots=True)
class _Seen:
    first: Seconds
    mode: str
    since: Seconds
    by_hand: Seconds | None = None
    """When an operator changed its mode."""
    switches: list[Seconds] = field(default_factory=list)
    """When its mode changed, in the last hour."""


class Tenure:
    """The workers of all models."""

    def __init__(self, hold: Seconds) -> None:
        self._hold = hold
        self._seen: dict[NodeLife, _Seen] = {}

    def see(self, now: Seconds, workers: Iterable[Worker], ours: Iterable[NodeLife]) -> None:
        """All workers as they are now. `ours`: those whose mode a planner may have changed, this
        one or the model's owner before it."""
        mine = {*ours}
        present: dict[NodeLife, _Seen] = {}
        for worker in workers:
            seen = self._seen.get(worker.life) or _Seen(now, worker.mode, now)
            if worker.mode != seen.mode:
                seen.mode, seen.since = worker.mode, now
                seen.switches = [at for at in seen.switches if now - at < _HOUR] + [now]
                seen.by_hand = None if worker.life in mine else now
            present[worker.life] = seen
        self._seen = present

    def dwell(self, now: Seconds, life: NodeLife) -> Seconds:
        """For how long it has had its mode, as far as was seen."""
        seen = self._seen.get(life)
        return 0.0 if seen is None else now - seen.since

    def switches(self, now: Seconds, life: NodeLife) -> int:
        """How often it has changed its mode in the last hour."""
        seen = self._seen.get(life)
        return 0 if seen is None else sum(now - at < _HOUR for at in seen.switches)

    def may_remove(self, now: Seconds, worker: Worker) -> str:
        """Why an operator's hand keeps it from being removed; empty: nothing does."""
        if worker.pinned:
            return f"{worker.node} is pinned"
        seen = self._seen.get(worker.life)
        if seen is None or (not read_change_id(worker.change) and now - seen.first < self._hold):
            return f"{worker.node} was started by hand"
        return ""

    def may_switch(self, now: Seconds, worker: Worker) -> str:
        """Why an operator's hand keeps it from being switched; empty: nothing does."""
        if worker.pinned:
            return f"{worker.node} is pinned"
        seen = self._seen.get(worker.life)
        if seen is not None and seen.by_hand is not None and now - seen.by_hand < self._hold:
            return f"the mode of {worker.node} was set by hand"
        return ""

"""Keeps one request from killing one worker after another.

Counts the workers that died while they had the request, since its last token. Before one more death
would make it poison, it is tried apart from other suspects (`poison_isolation`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pdserve.errors import Poisoned
from pdserve.frontend.dispatch.migration.migration_state import PoisonTracker, WorkerDeath

if TYPE_CHECKING:
    from pdserve.frontend.dispatch.cluster_members import ClusterMembers
    from pdserve.frontend.dispatch.migration.migration_state import MigrationReason
    from pdserve.frontend.dispatch.poison_isolation import PoisonIsolation
    from pdserve.ids import NodeId, NodeLife, Seconds

__all__ = ["PoisonGuard"]

_DOUBT: Final[Seconds] = 5.0
"""Seconds to wait until it is known whether lost workers died, when one more death would make the
request poison."""
_PAUSE: Final[Seconds] = 0.05


class PoisonGuard:
    """The deaths and trials of one request."""

    __slots__ = ("_deaths", "_members", "_trial", "_trials")

    def __init__(self, limit: int, members: ClusterMembers, trials: PoisonIsolation) -> None:
        """`limit`: deaths that make a request poison; 0: never."""
        self._deaths = PoisonTracker(limit)
        self._members = members
        self._trials = trials
        self._trial: NodeId | None = None
        """The worker at which the request is tried alone."""

    @property
    def suspect(self) -> bool:
        """True if one more death would be too many."""
        return self._deaths.suspect(self._members.now(), self._members.standing)

    @property
    def on_trial(self) -> bool:
        return self._trial is not None

    def lost(self, life: NodeLife, reason: MigrationReason, *, alone: bool) -> None:
        """Records that a worker was lost before the request's first token there. `alone`: it was
        on trial there."""
        self._deaths.add(WorkerDeath(life, reason, self._members.now(), alone))

    def clear(self) -> None:
        """A token has come: the request alone cannot have caused the deaths."""
        self._deaths.clear()

    async def begin_trial(self, worker: NodeId) -> Seconds:
        """Waits until no other suspect request is tried at that worker; returns the seconds waited.
        The trial ends with the first token, or with the attempt. Cancellation: none has begun."""
        began = self._members.now()
        await self._trials.begin(worker)
        self._trial = worker
        return self._members.now() - began

    def end_trial(self) -> bool:
        """Ends the trial; returns False if there was none."""
        worker, self._trial = self._trial, None
        if worker is not None:
            self._trials.end(worker)
        return worker is not None

    async def weigh(self, last: str) -> None:
        """Waits, for a bounded time, until it is known whether the lost workers died. `last`: what
        happened to the last one, in words. Errors: `Poisoned` if too many did."""
        members, deaths = self._members, self._deaths
        until = members.now() + _DOUBT
        while True:
            dead = deaths.condemn(members.standing)
            if dead:
                raise _poisoned(dead, last)
            wait = until - members.now()
            if not deaths.may_condemn(members.standing) or wait <= 0:
                return
            await members.wait_change(timeout=wait, at_least=_PAUSE)


def _poisoned(dead: list[NodeId], last: str) -> Poisoned:
    one = len(dead) == 1
    who = "a worker" if one else f"{len(dead)} workers"
    how = "" if one else "one after another and "
    last = f" (the last: {last})" if last else ""
    return Poisoned(
        f"{who} died while running this request, {how}before its first token there: "
        f"{', '.join(dead)}{last}; it is not retried, and sent again it may do the same"
    )

"""Checks that a message about an attempt is not stale.

A claim is valid if it comes from the router, and from the life and the round, that the request was
last queued with. A message about an attempt is valid if it names the open attempt and comes from
the same life of the worker for which the attempt was opened. Everything else is stale, whenever it
arrives.

Pure. Each request has one fence, owned by `remote_prefill`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pdserve.messages.handoff import LEASE_SECONDS, RENEW_INTERVAL
from pdserve.worker.disagg.state_table import DecodeEvent, DecodeState

if TYPE_CHECKING:
    from pdserve.ids import NodeLife, Seconds
    from pdserve.messages.handoff import OpenAttempt

__all__ = ["SILENT", "Fence", "Holder"]

SILENT: Final[Seconds] = 2.5 * RENEW_INTERVAL
"""If a worker has not renewed its lease for this long, another worker with a valid claim replaces
it. The queue gave the item to another worker because it, too, lost contact with the first."""


@dataclass(slots=True)
class Holder:
    """The prefill worker that has the open attempt."""

    life: NodeLife
    claim: int
    attempt: int
    renewed: Seconds
    progressed: Seconds
    """Time of the last known progress."""
    most: Seconds
    """Seconds without progress after which the lease ends even if it is renewed: the engine there
    is stuck."""
    progress: int = 0
    """The newest progress counter; see `RenewLeases.progress`."""

    @property
    def latest(self) -> Seconds:
        """Time at which the lease ends unless there is progress."""
        return self.progressed + self.most

    @property
    def lapses(self) -> Seconds:
        """Time at which the lease ends unless it is renewed."""
        return min(self.renewed + LEASE_SECONDS, self.latest)

    def note(self, progress: int, now: Seconds) -> None:
        """Records the progress counter that the worker reported."""
        if progress != self.progress:
            self.progress, self.progressed = progress, now


class Fence:
    """The fence of one request."""

    def __init__(self) -> None:
        self.attempts = 0
        """Number of attempts opened so far; the next attempt gets this number plus one."""
        self.holder: Holder | None = None
        self._owner: NodeLife | None = None
        self._round = -1

    def queued(self, owner: NodeLife, round: int) -> None:
        """Records the router life and the round that the request is now queued with."""
        self._owner, self._round = owner, round

    def unqueued(self) -> None:
        """Records that the request is in no queue: every claim is stale."""
        self._owner = None

    def claim(
        self, asked: OpenAttempt, by: NodeLife, state: DecodeState, now: Seconds, *, alive: bool
    ) -> tuple[DecodeEvent, str]:
        """Classifies a request for an attempt; returns the event and, if it is stale, the reason.
        `alive`: the node life that holds the open attempt is still a member."""
        owner = self._owner
        if owner is None or (asked.owner, asked.owner_epoch) != owner:
            return DecodeEvent.STALE, f"it is not queued with this life of {asked.owner}"
        if asked.round != self._round:
            return DecodeEvent.STALE, f"round {asked.round} is over, this is round {self._round}"
        holder = self.holder
        if holder is None:
            return (
                (DecodeEvent.CLAIM, "")
                if state is DecodeState.QUEUE
                else (DecodeEvent.STALE, state.value)
            )
        if holder.life == by and holder.claim == asked.claim:
            return DecodeEvent.AGAIN, f"it is in {state.value}"
        if state not in (DecodeState.ATTEMPT, DecodeState.FILL):
            return DecodeEvent.STALE, f"it is in {state.value}"
        if alive and now < holder.renewed + SILENT:
            return DecodeEvent.STALE, f"attempt {holder.attempt} of {holder.life.node} is open"
        return DecodeEvent.CLAIM, ""

    def open(self, by: NodeLife, claim: int, now: Seconds, most: Seconds) -> Holder:
        """Opens the next attempt for this worker and starts its lease, which ends after `most`
        seconds without progress."""
        self.attempts += 1
        self.holder = Holder(by, claim, self.attempts, now, now, most)
        return self.holder

    def close(self) -> None:
        """Closes the open attempt."""
        self.holder = None

    def current(self, attempt: int, by: NodeLife) -> bool:
        """True if this is the open attempt and `by` holds it."""
        holder = self.holder
        return holder is not None and holder.attempt == attempt and holder.life == by

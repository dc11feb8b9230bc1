"""Whose word counts: the fence between what a decode worker has begun and what others say of it.

A claim counts if it comes from the router, in the life of it and of the round that the request was
queued with last. A word about an attempt counts if it names the present one and comes from the very
life of the worker that it was opened for. Everything else is stale, whenever it arrives.

Pure; one per request, owned by `remote_prefill`.
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
"""A worker that has not renewed for so long is passed over for another with a valid claim: the
queue has given the item away because it, too, has lost sight of the first."""


@dataclass(slots=True)
class Holder:
    """Who has the present attempt."""

    life: NodeLife
    claim: int
    attempt: int
    renewed: Seconds
    progressed: Seconds
    """When work on it was last known to get on."""
    most: Seconds
    """So long after that the lease ends, however often it is renewed: the engine there is stuck."""
    progress: int = 0
    """The last number of `RenewLeases.progress`."""

    @property
    def latest(self) -> Seconds:
        """The lease ends then unless there is progress."""
        return self.progressed + self.most

    @property
    def lapses(self) -> Seconds:
        """When the lease ends unless it is renewed."""
        return min(self.renewed + LEASE_SECONDS, self.latest)

    def note(self, progress: int, now: Seconds) -> None:
        """Its worker has said how far it is."""
        if progress != self.progress:
            self.progress, self.progressed = progress, now


class Fence:
    """See above."""

    def __init__(self) -> None:
        self.attempts = 0
        """Opened so far; the next one's number is one more."""
        self.holder: Holder | None = None
        self._owner: NodeLife | None = None
        self._round = -1

    def queued(self, owner: NodeLife, round: int) -> None:
        """It is sent to this life of a router now."""
        self._owner, self._round = owner, round

    def unqueued(self) -> None:
        """No claim is valid."""
        self._owner = None

    def claim(
        self, asked: OpenAttempt, by: NodeLife, state: DecodeState, now: Seconds, *, alive: bool
    ) -> tuple[DecodeEvent, str]:
        """Which event a question for an attempt is, and why if it is stale. `alive`: the present
        attempt's worker, in that life, is a member."""
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
        """The next attempt is theirs, for `most` seconds without progress; its lease begins."""
        self.attempts += 1
        self.holder = Holder(by, claim, self.attempts, now, now, most)
        return self.holder

    def close(self) -> None:
        """No attempt is open."""
        self.holder = None

    def current(self, attempt: int, by: NodeLife) -> bool:
        """A word of theirs about this attempt counts."""
        holder = self.holder
        return holder is not None and holder.attempt == attempt and holder.life == by

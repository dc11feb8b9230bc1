"""KV transfer of a core that schedules itself: both directions, over one pool of staging blocks.

It joins what other cores have too (`KvReceiver`, the connector) with the parts for staging blocks
(`StagedAdmission`, `StagedSender`), and passes commands, the connector's events and the engine's
callbacks to them. `StagedCore` owns it, in its thread. It knows no engine but its port.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from pdserve.engine_core.kv_transfer.connector import PartDelivered
from pdserve.engine_core.kv_transfer.receiver import KvReceiver
from pdserve.engine_core.staged_kv.admission import StagedAdmission
from pdserve.engine_core.staged_kv.sender import StagedSender
from pdserve.messages.engine import (
    AbortAttempt,
    Activate,
    OpenAttemptBlocks,
    PrefillForPeer,
    PrefillLocally,
    SubmitRemote,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Literal

    from pdserve.engine_core.kv_fetch.fetches import PullMoved
    from pdserve.engine_core.kv_transfer.connector import KvConnector
    from pdserve.engine_core.scheduler.scheduler_state import SchedulerLimits
    from pdserve.engine_core.staged_kv.pool import StagingPool
    from pdserve.engine_core.staged_kv.port import StagedEngine
    from pdserve.errors import PdserveError
    from pdserve.ids import NodeLife, Seconds
    from pdserve.messages.engine import (
        EngineStats,
        Event,
    )
    from pdserve.messages.request import TokenDelta
    from pdserve.transfer.base import Region

__all__ = ["StagedTransfers", "TransferCommand"]

TransferCommand = (
    SubmitRemote | PrefillForPeer | OpenAttemptBlocks | Activate | AbortAttempt | PrefillLocally
)


class StagedTransfers:
    """Both ends of KV transfer in one core that schedules itself."""

    def __init__(
        self,
        engine: StagedEngine,
        staging: StagingPool,
        mover: KvConnector,
        limits: SchedulerLimits,
        verify: Literal["all", "sample", "off"],
        say: Callable[[Event], None],
        end: Callable[[int, PdserveError | None], None],
    ) -> None:
        """`mover` has been started with the staging region. `say` sends an event to the node; `end`
        ends a submission, as for `StagedSender`."""
        self.admission = StagedAdmission(engine, staging.blocks, limits, end)
        self.receiver = KvReceiver(
            self.admission, staging.blocks, mover, staging.region, verify, say
        )
        self.sender = StagedSender(engine, staging, mover, verify, say, end, limits.max_waiting)
        self._staging = staging
        self._mover = mover

    @property
    def region(self) -> Region:
        """The memory that the connector has been started with."""
        return self._staging.region

    # ------------------------------------------------------------------ commands

    def submit(self, command: SubmitRemote | PrefillForPeer, now: Seconds) -> None:
        """Take a submission that has passed `check_request`. Raises as `StagedAdmission.submit` and
        `StagedSender.submit` do."""
        if isinstance(command, SubmitRemote):
            self.admission.submit(command.handle, command.request, now)
        else:
            self.sender.submit(command, now)

    def take(
        self, command: OpenAttemptBlocks | Activate | AbortAttempt | PrefillLocally, now: Seconds
    ) -> None:
        """Pass a command for a submission of `SubmitRemote` on."""
        match command:
            case OpenAttemptBlocks():
                self.receiver.open(command, now)
            case Activate():
                self.receiver.activate(command, now)
            case AbortAttempt():
                self.receiver.give_up(command.handle, command.attempt)
            case PrefillLocally():
                self.receiver.prefill_here(command.handle)

    def attach(self, peer: NodeLife) -> None:
        """Exchange KV as this (node, epoch) from now on."""
        self._mover.attach(peer)

    # ------------------------------------------------------------------ a submission's end

    def phase(self, handle: int) -> str:
        """What a submission is doing, as one word; empty: nothing that only this object knows."""
        remote = self.admission.remote(handle)
        if remote is not None:
            return remote.phase()
        return "sending" if self.sender.holds(handle) else ""

    def stage(self, handle: int) -> str:
        """What a submission waits for, as text that follows "while"; empty: nothing here."""
        remote = self.admission.remote(handle)
        return "" if remote is None else remote.stage()

    def abort(self, handle: int) -> None:
        """The node has aborted a submission. Of a prompt for a peer, `PrefillSent` follows."""
        self.sender.abort(handle)
        self.forget(handle)

    def forget(self, handle: int) -> None:
        """A submission has ended in the core. Does nothing for one that was handed off."""
        self.receiver.give_up(handle)
        self.admission.drop(handle)

    def fail(self, handle: int) -> None:
        """The node is told that a submission has failed."""
        self.sender.fail(handle)
        self.forget(handle)

    def holds(self, handle: int) -> bool:
        """Return whether staging blocks of a submission may still be read or written."""
        if self.receiver.holds(handle) or self.sender.holds(handle):
            return True
        return self.admission.loading(handle)

    # ------------------------------------------------------------------ from the engine

    def copied(self, handle: int, tokens: int) -> None:
        """The engine has copied the blocks with the first `tokens` tokens into staging."""
        self.sender.copied(handle, tokens)

    def let_go(self, handle: int, failed: int = 0) -> None:
        """The engine reads or writes the staging blocks of this submission no more. `failed`: of
        the tokens to load, those that it has to compute."""
        if not self.admission.let_go(handle, failed):
            self.sender.let_go(handle)

    def explain(self, deltas: list[TokenDelta]) -> list[TokenDelta]:
        """Keep the deltas of prompts for peers; completes and returns the others."""
        explain = self.admission.explain
        return [explain(delta) for delta in deltas if not self.sender.take(delta)]

    # ------------------------------------------------------------------ steps

    def moved(self, event: PullMoved, now: Seconds) -> int:
        """Handle an event of the connector; returns the handle that it is about."""
        if isinstance(event, PartDelivered):
            self.sender.delivered(event)
            return event.handle
        self.receiver.moved(event, now)
        return event.key.handle

    @property
    def has_work(self) -> bool:
        """Return whether `advance` can do something."""
        return self.receiver.has_work or self.sender.has_work

    def next_deadline(self) -> Seconds | None:
        """Time at which `advance` must be called at the latest; None: never."""
        times = (self.receiver.next_deadline(), self.sender.next_deadline())
        return min((time for time in times if time is not None), default=None)

    def advance(self, now: Seconds) -> None:
        """Give out staging blocks: to peers that fill them, then to prompts for peers."""
        self.receiver.advance(now)
        self.sender.advance(now, self.admission.reservations.unbound)

    def stats(self, stats: EngineStats) -> EngineStats:
        """Complete a core's stats."""
        admission, receiver, sender = self.admission, self.receiver, self.sender
        waiting = len(admission.reservations.waiting)
        return msgspec.structs.replace(
            stats,
            # The core counts all submissions, and knows only those that its engine has.
            running=max(0, stats.running - admission.unstarted - sender.waiting),
            waiting=stats.waiting + waiting + sender.waiting,
            remote=len(admission.reservations),
            sending=sender.sending,
            received_tokens=admission.received_tokens,
            received_blocks=receiver.received_blocks,
            received_bytes=receiver.received_bytes,
            sent_blocks=sender.sent_blocks,
            sent_bytes=sender.sent_bytes,
            attempts=receiver.opened,
            attempts_failed=receiver.failed,
            failed_loads=admission.failed_loads,
            blocks_quarantined=self._staging.blocks.counts().quarantined,
        )

    # ------------------------------------------------------------------ ending

    def end(self) -> int:
        """Connector and engine are closed: free everything; returns leaked staging blocks."""
        self.receiver.fenced()
        self.sender.fenced()
        self.admission.end()
        self._staging.blocks.check()
        leaked = self._staging.blocks.counts().used
        self._staging.close()
        return leaked

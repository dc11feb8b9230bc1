"""The kit for engines that schedule themselves and exchange KV: `StagedCore`.

It adds to `SelfSchedulingCore` what prefill and decode workers need. An engine implements
`make_staging` and the methods of `StagedEngine`, and calls `copied` and `let_go`. Without a
connector it behaves as its base class: prompts from and for peers are refused.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from typing import TYPE_CHECKING

import msgspec

from pdserve.engine_core.kit import SelfSchedulingCore
from pdserve.engine_core.scheduler.scheduler_state import SchedulerLimits
from pdserve.engine_core.staged_kv.port import HeldFrames
from pdserve.engine_core.staged_kv.transfers import StagedTransfers
from pdserve.errors import ConfigError, PdserveError
from pdserve.ids import NodeId, NodeLife
from pdserve.messages.engine import (
    AbortAttempt,
    Activate,
    LoadProgress,
    OpenAttemptBlocks,
    PrefillForPeer,
    PrefillLocally,
    SetNodeLife,
    SubmitRemote,
)
from pdserve.messages.engine_errors import rejected_event

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from pdserve.clock import Clock
    from pdserve.engine_core.kit import _Submission
    from pdserve.engine_core.kv_transfer.connector import ConnectorEvent, KvConnector
    from pdserve.engine_core.staged_kv.pool import StagingPool
    from pdserve.engine_core.staged_kv.port import StagedBlocks
    from pdserve.engine_core.tiers.frames.frame_fetches import FrameFetches
    from pdserve.ids import Seconds
    from pdserve.messages.engine import (
        Command,
        EngineCapabilities,
        EngineSpec,
        EngineStats,
        Event,
        Rejected,
    )
    from pdserve.messages.request import GenerateRequest
    from pdserve.messages.tiers import CachedSource
    from pdserve.transfer.base import Region

__all__ = ["StagedCore"]

_log = logging.getLogger(__name__)


class StagedCore(SelfSchedulingCore):
    """A `SelfSchedulingCore` that can exchange KV by staging blocks."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self.transfers: StagedTransfers | None = None
        """Set while this core exchanges KV."""
        self.fetches: FrameFetches | None = None
        """Set while this core exchanges blocks of its host tier."""
        self._mover: KvConnector | None = None
        self._moved = False
        """Whether the connector has events."""
        self._freeing: dict[int, str] = {}
        """Aborted submissions that still hold staging blocks, with what they were doing."""

    def use_connector(self, mover: KvConnector) -> None:
        """Exchange KV through this connector. Called once, before `load`."""
        self._mover = mover

    def wants_kv(self, spec: EngineSpec) -> bool:
        """Return whether this core is to exchange KV; `open` prepares the engine for it then."""
        return self._mover is not None and spec.transfer is not None

    # ------------------------------------------------------------------ what an engine implements

    @abstractmethod
    def make_staging(self, spec: EngineSpec) -> StagingPool:
        """Allocate the staging blocks; called once after `open`, if the core is to exchange KV.

        Raises `ConfigError` with the reason if this model's KV cannot be exchanged.
        """

    @abstractmethod
    def cached_blocks(self, request: GenerateRequest) -> int:
        """As `StagedEngine.cached_blocks`."""

    @abstractmethod
    def hold_prefix(self, request: GenerateRequest) -> list[int]:
        """As `StagedEngine.hold_prefix`."""

    @abstractmethod
    def release_prefix(self, blocks: Sequence[int]) -> None:
        """As `StagedEngine.release_prefix`."""

    @abstractmethod
    def load_staged(self, handle: int, request: GenerateRequest, blocks: StagedBlocks) -> None:
        """As `StagedEngine.load_staged`."""

    @abstractmethod
    def prefill_staged(self, handle: int, request: GenerateRequest, blocks: StagedBlocks) -> None:
        """As `StagedEngine.prefill_staged`."""

    def bring_frames(self, request: GenerateRequest) -> frozenset[bytes]:
        """As `StagedEngine.bring_frames`. An engine without frames has nothing to bring."""
        return frozenset()

    def hold_frames(
        self, request: GenerateRequest, first: int, read: Collection[bytes]
    ) -> HeldFrames:
        """As `StagedEngine.hold_frames`."""
        return HeldFrames()

    def release_frames(self, blocks: Sequence[int]) -> None:
        """As `StagedEngine.release_frames`."""

    def loaded_frames(self, sources: Sequence[CachedSource]) -> None:
        """As `StagedEngine.loaded_frames`."""

    def fetch_region(self) -> Region | None:
        """The memory with the host tier's frames, which peers may read and write; None: there is
        none."""
        return None

    def fetch_by(self, mover: KvConnector, say: Callable[[Event], None]) -> FrameFetches:
        """Exchange blocks of the host tier by this connector, which has been started with
        `fetch_region`."""
        raise NotImplementedError

    def check_submission(self, request: GenerateRequest) -> None:
        """Raise `Overloaded` if too many choices run or wait, those of this newest submission
        included, and `InvalidRequest` for what the engine cannot compute.

        Called before a prompt from or for a peer begins to wait. From then on `cached_blocks` must
        not raise, and `load_staged` should take the request, since its KV has been sent.
        """

    # ------------------------------------------------------------------ what an engine calls

    def copied(self, handle: int, tokens: int) -> None:
        """The blocks with the first `tokens` tokens of a prompt for a peer are in staging; in the
        core's thread."""
        if self.transfers is not None:
            self.transfers.copied(handle, tokens)

    def let_go(self, handle: int, failed: int = 0) -> None:
        """The engine reads or writes the staging blocks of this submission no more; in the core's
        thread. `failed`: of the tokens to load, those that it has to compute."""
        if self.transfers is not None:
            self.transfers.let_go(handle, failed)
            self._note_freed((handle,))

    # ------------------------------------------------------------------ loading

    def load(
        self, spec: EngineSpec, progress: Callable[[LoadProgress], None]
    ) -> EngineCapabilities:
        """Load the model, then start the connector. Raises what `open` raises, and `ConfigError` if
        this core must exchange KV and cannot."""
        capabilities = super().load(spec, progress)
        if self._mover is not None and spec.transfer is not None:
            progress(LoadProgress(stage="registering KV blocks"))
            names = self._start_moving(spec, self._mover)
            fetches = self._start_fetching(self._mover, names)
            capabilities = msgspec.structs.replace(capabilities, transfers=names, fetches=fetches)
            self._capabilities = capabilities
        return capabilities

    def _start_moving(self, spec: EngineSpec, mover: KvConnector) -> tuple[str, ...]:
        """Start the connector; returns its usable back ends, or none if KV transfer is optional and
        impossible here."""
        assert spec.transfer is not None
        staging: StagingPool | None = None
        try:
            staging = self.make_staging(spec)
            names = mover.start(staging.region, self._on_moved)
        except ConfigError as error:
            if staging is not None:
                staging.close()
            if not spec.transfer.optional:
                raise
            _log.info("KV transfer is off for this worker: %s", error.message)
            return ()
        self.transfers = StagedTransfers(
            self,
            staging,
            mover,
            self._limits(spec),
            spec.transfer.verify,
            self._events_append,
            self._end_submission,
        )
        return names

    def _start_fetching(self, mover: KvConnector, staged: tuple[str, ...]) -> tuple[str, ...]:
        """Let peers fetch from the host tier; returns the back ends for it, or none."""
        region = self.fetch_region()
        if region is None:
            return ()
        if self.transfers is not None and region is not self.transfers.region:
            _log.info("blocks of tiers are not exchanged with others: staged KV is on the device")
            return ()
        names = staged or self._start_for_tiers(mover, region)
        if names:
            self.fetches = self.fetch_by(mover, self._events_append)
        return names

    def _start_for_tiers(self, mover: KvConnector, region: Region) -> tuple[str, ...]:
        """Start the connector for the host tier alone."""
        try:
            return mover.start(region, self._on_moved)
        except ConfigError as error:
            _log.info("blocks of tiers are not exchanged with other workers: %s", error.message)
            return ()

    def _limits(self, spec: EngineSpec) -> SchedulerLimits:
        return SchedulerLimits(
            max_model_len=self._capabilities.max_model_len,
            vocab_size=self._capabilities.vocab_size,
            max_waiting=spec.max_waiting,
        )

    def _events_append(self, event: Event) -> None:
        self._events.append(event)

    def _on_moved(self) -> None:
        self._moved = True
        self.wake()

    # ------------------------------------------------------------------ commands

    def handle(self, command: Command) -> None:
        """Take a command in; its results come from `step`."""
        if self.fetches is not None and self.fetches.take(command, self.clock.now()):
            self._changed = True
            return
        transfers = self.transfers
        if transfers is None:
            super().handle(command)
            return
        match command:
            case SubmitRemote() | PrefillForPeer():
                self._submit_transfer(transfers, command)
            case OpenAttemptBlocks() | Activate() | AbortAttempt() | PrefillLocally():
                self._changed = True
                transfers.take(command, self.clock.now())
            case SetNodeLife():
                transfers.attach(NodeLife(NodeId(command.node), command.epoch))
            case _:
                super().handle(command)

    def _submit_transfer(
        self, transfers: StagedTransfers, command: SubmitRemote | PrefillForPeer
    ) -> None:
        choices = len(command.request.live) if isinstance(command, SubmitRemote) else 1
        try:
            self._register(command.handle, command.request, choices, counted=True)
            self.check_submission(command.request)
            self._prompt_tokens += len(command.request.prompt)
            transfers.submit(command, self.clock.now())
        except PdserveError as error:
            # `reject` says nothing of a submission that was refused before it was registered.
            transfers.fail(command.handle)
            self._forget(command.handle)
            self._events.append(rejected_event(command.handle, error))

    # ------------------------------------------------------------------ the end of a submission

    def _end_rejected(self, event: Rejected) -> None:
        if self.transfers is not None:
            self.transfers.fail(event.handle)
        super()._end_rejected(event)

    def _end_submission(self, handle: int, error: PdserveError | None) -> None:
        """End a submission that the engine may still have."""
        if error is None:
            self._forget(handle)
            self.drop(handle)
            return
        self.drop(handle)
        self.reject(handle, error)

    def _stage(self, handle: int, produced: int) -> str:
        stage = "" if self.transfers is None else self.transfers.stage(handle)
        return stage or super()._stage(handle, produced)

    def _forget(self, handle: int) -> _Submission | None:
        """Remove a submission; None if it has ended or was never taken."""
        if self.transfers is not None:
            self.transfers.forget(handle)
        return super()._forget(handle)

    def _abort(self, handle: int) -> None:
        """End the submission; only `PrefillSent` may follow."""
        transfers = self.transfers
        phase = "" if transfers is None else transfers.phase(handle)
        if transfers is None or not (phase or transfers.holds(handle)):
            super()._abort(handle)
            return
        self._events = [e for e in self._events if getattr(e, "handle", None) != handle]
        self._freeing[handle] = phase or "decoding"
        transfers.abort(handle)
        self._aborted += self._forget(handle) is not None
        self.drop(handle)
        self._note_freed((handle,))

    def _note_freed(self, handles: Iterable[int]) -> None:
        """Report those of these submissions that were aborted and now hold no staging blocks."""
        assert self.transfers is not None
        for handle in self._freeing.keys() & handles:
            if not self.transfers.holds(handle):
                self.on_freed(handle, self._freeing.pop(handle))

    # ------------------------------------------------------------------ steps

    @property
    def has_work(self) -> bool:
        """Return whether `step` has something to do now."""
        ours = (self.transfers, self.fetches)
        if any(one is not None and (self._moved or one.has_work) for one in ours):
            return True
        return super().has_work

    def wake_at(self) -> Seconds | None:
        """The next deadline of a request, an attempt or the engine; None: never."""
        due = [super().wake_at()]
        if self.transfers is not None:
            due.append(self.transfers.next_deadline())
        if self.fetches is not None:
            due.append(self.fetches.next_deadline())
        return min((time for time in due if time is not None), default=None)

    def step(self) -> list[Event]:
        """Handle what the transports report, give out staging blocks, then step the engine."""
        now = self.clock.now()
        if self._moved and self._mover is not None:
            self._moved = False
            self._changed = True
            self._take_moved(self._mover.poll(), now)
        if self.transfers is not None:
            self.transfers.advance(now)
        if self.fetches is not None:
            self.fetches.advance(now, busy=self.sequences > 0)
        return super().step()

    def _take_moved(self, events: Iterable[ConnectorEvent], now: Seconds) -> None:
        """Pass the connector's events to what they are about."""
        touched: set[int] = set()
        for event in events:
            if self.fetches is not None and self.fetches.moved(event, now):
                continue
            if self.transfers is not None:
                touched.add(self.transfers.moved(event, now))
        if touched:
            self._note_freed(touched)

    def _report_output(self) -> None:
        if self.transfers is not None:
            made = len(self.deltas)
            self.deltas = self.transfers.explain(self.deltas)
            # What a prompt for a peer has produced counts, though nobody else gets it.
            handed = made - len(self.deltas)
            self._output_tokens += handed
            self._finished += handed
        super()._report_output()

    # ------------------------------------------------------------------ reading and ending

    def stats(self) -> EngineStats:
        """A snapshot of the stats."""
        stats = super().stats()
        return stats if self.transfers is None else self.transfers.stats(stats)

    def add_fetches(self, stats: EngineStats) -> EngineStats:
        """The engine's stats with those of fetches."""
        return stats if self.fetches is None else self.fetches.add_stats(stats)

    def close(self) -> int:
        """End the transfers, then close the engine; returns leaked blocks. Raises `EngineError` if
        transfers cannot be ended; the memory then stays allocated."""
        if self._mover is not None:
            self._mover.close()
        fetches, self.fetches = self.fetches, None
        if fetches is not None:
            fetches.fenced(self.clock.now())
        leaked = super().close()
        transfers, self.transfers = self.transfers, None
        return leaked if transfers is None else leaked + transfers.end()

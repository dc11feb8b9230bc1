"""Admits prompts that other workers prefill into the staging blocks of a self-scheduling engine.

    waits for a reservation ─▶ reserved ─▶ bound: a peer fills staging blocks ─▶ the engine loads
            └── needs more than all staging blocks: the engine computes the prompt itself

Reservations count staging blocks. If there are too few, a prompt waits; the node gives up after its
patience and has it computed here (`PrefillLocally`). The engine's own cached blocks, and frames of
its host tier behind them, are held from `bind` until the engine has loaded the rest. What is on
disk is read to the host from the reservation on. Owned by `StagedTransfers`, driven by
`KvReceiver`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec.structs import replace

from pdserve.engine_core.kv_transfer.remote_prefill import RemotePrefillState
from pdserve.engine_core.scheduler.reservations import BlockReservations
from pdserve.engine_core.scheduler.submission import Submission, build_sequences, end_reason
from pdserve.engine_core.staged_kv.port import HeldFrames, StagedBlocks
from pdserve.errors import InvalidRequest, Overloaded, PdserveError
from pdserve.observe.logs import about
from pdserve.transfer.copy_plan import blocks_for

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Sequence as Seq

    from pdserve.engine_core.scheduler.scheduler_state import SchedulerLimits
    from pdserve.engine_core.scheduler.sequence import Sequence
    from pdserve.engine_core.staged_kv.port import StagedEngine
    from pdserve.ids import Seconds
    from pdserve.kv.block_pool import BlockPool
    from pdserve.messages.handoff import Handoff
    from pdserve.messages.request import GenerateRequest, TokenDelta, TokenLogprob
    from pdserve.messages.tiers import CachedSource

__all__ = ["StagedAdmission"]

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Load:
    """Blocks that the engine copies from, and held blocks of its own before them."""

    shared: list[int]
    """As `StagedAdmission.bind` returns them."""
    fresh: list[int]


@dataclass(slots=True, eq=False)
class _Origin:
    """Where the KV of a running request's prompt has come from."""

    cached: int
    received: int
    """Tokens whose KV was loaded from staging blocks."""
    sources: tuple[CachedSource, ...]
    """The tiers of the cached tokens that were loaded from frames."""
    prompt_logprobs: list[TokenLogprob] | None
    """Those of the prefill worker; the engine here has not computed the prompt."""


class StagedAdmission:
    """The `RemoteAdmissionPort` of an engine that schedules itself."""

    def __init__(
        self,
        engine: StagedEngine,
        pool: BlockPool,
        limits: SchedulerLimits,
        reject: Callable[[int, PdserveError], None],
    ) -> None:
        """`pool`: the staging blocks. `reject` ends a submission that the engine refuses."""
        self.limits = limits
        self.reservations = BlockReservations(pool.num_blocks)
        self.received_tokens = 0
        """Tokens whose KV the engine has loaded from staging blocks."""
        self.failed_loads = 0
        """Loads that failed at least in part, and were computed instead."""
        self._engine = engine
        self._pool = pool
        self._reject = reject
        self._submissions: dict[int, Submission] = {}
        """Submissions that wait for a peer, by handle."""
        self._reading: dict[int, frozenset[bytes]] = {}
        """What the disk was asked for, by handle; from the reservation to its end."""
        self._frames: dict[int, HeldFrames] = {}
        """Frames that are held for a submission that waits for a peer, by handle."""
        self._loads: dict[int, _Load] = {}
        self._origins: dict[int, _Origin] = {}
        """Of requests that have entered the engine from staging blocks, until they end."""
        self._arrivals = 0
        self._loosened = 0
        self._held: tuple[Sequence, int] | None = None
        """The sequence whose reservation did not fit, and `_room` at that moment."""

    # ------------------------------------------------------------------ submissions

    def submit(self, handle: int, request: GenerateRequest, now: Seconds) -> None:
        """Take a request that has passed `check_request`. Raises `InvalidRequest` for one that only
        this engine can compute, `Overloaded` if too many wait."""
        if request.diverged:
            raise InvalidRequest("choices with different outputs cannot be prefilled for a peer")
        if request.pooling:
            raise InvalidRequest("an embedding request cannot be prefilled by another worker")
        if request.images:
            raise InvalidRequest("a prompt with images cannot be prefilled by another worker")
        if len(self._submissions) >= self.limits.max_waiting:
            raise Overloaded(
                f"{len(self._submissions)} requests wait for other workers", retry_after=1.0
            )
        choices = build_sequences(handle, request, now, self._arrivals, self.limits.max_model_len)
        if end_reason(choices[0]) is not None:
            raise InvalidRequest("the given output is already complete: nothing is left to prefill")
        self._arrivals += 1
        state = RemotePrefillState()
        self._submissions[handle] = Submission(handle, request, None, choices, remote=state)
        self.reservations.waiting.push(choices[0])

    def remote(self, handle: int) -> RemotePrefillState | None:
        """The remote state of a submission; None if no other worker is to prefill it."""
        submission = self._submissions.get(handle)
        return None if submission is None else submission.remote

    def stem_of(self, handle: int) -> Sequence:
        """The first live choice of a submission."""
        return self._submissions[handle].live[0]

    def drop(self, handle: int) -> None:
        """Forget a submission that has ended, in any state. The caller has ended its attempt."""
        self._origins.pop(handle, None)
        if handle in self._submissions:
            self._fulfil(handle)

    def _fulfil(self, handle: int) -> Submission:
        """End the reservation, or the wait for one: no peer prefills the submission any more."""
        submission = self._submissions.pop(handle)
        self._reading.pop(handle, None)
        self._frames.pop(handle, None)
        self.reservations.end(submission.live[0])
        self._loosened += 1
        return submission

    @property
    def unstarted(self) -> int:
        """Choices that wait for a peer."""
        return sum(len(submission.live) for submission in self._submissions.values())

    # ------------------------------------------------------------------ reservations

    @property
    def _room(self) -> int:
        return self._pool.releases + self._loosened

    @property
    def may_reserve(self) -> bool:
        """Return whether `reserve` may make a reservation now."""
        stem = self.reservations.first()
        return stem is not None and self._held != (stem, self._room)

    def reserve(self, now: Seconds) -> list[tuple[int, int]]:
        """Make reservations, in order, for the sequences that fit; returns each handle with the
        number of its tokens that are cached now."""
        made: list[tuple[int, int]] = []
        while self.may_reserve:
            stem = self.reservations.waiting.first()
            submission = self._submissions[stem.handle]
            cached = self._engine.cached_blocks(submission.request)
            need = blocks_for(len(stem.tokens), self._pool.block_size) - cached
            if not self._fits(need):
                self._held = (stem, self._room)
                break
            self.reservations.give(stem, need)
            assert submission.remote is not None
            submission.remote.admitted = True
            self._reading[stem.handle] = self._engine.bring_frames(submission.request)
            made.append((stem.handle, cached * self._pool.block_size))
            if need > self._pool.num_blocks:
                _log.info(
                    "a prompt is prefilled here: %d KV blocks are more than all %d for staging",
                    *(need, self._pool.num_blocks),
                    extra=about(submission.request, handle=stem.handle),
                )
                self.prefill_here(stem.handle)
        return made

    def _fits(self, need: int) -> bool:
        """A prompt that can never be staged is let through, since it is computed here."""
        if need > self._pool.num_blocks:
            return True
        if not self.reservations.allows(need):
            return False
        return need + self.reservations.unbound <= self._pool.available

    def bind(self, handle: int) -> tuple[list[int], list[int]] | None:
        """Hold the engine's cached blocks, and frames behind them, and allocate staging blocks for
        the other tokens. None if too few staging blocks are free."""
        stem, request = self.stem_of(handle), self._submissions[handle].request
        cached = self._engine.hold_prefix(request)
        read = self._reading.get(handle, frozenset())
        frames = self._engine.hold_frames(request, len(cached), read)
        # A frame is told from a block of the engine's cache by its sign.
        shared = [*cached, *(~block for block in frames.blocks)]
        need = blocks_for(len(stem.tokens), self._pool.block_size) - len(shared)
        fresh = self._pool.reserve(need)
        if fresh is None:
            self.release_shared(shared)
            self.reservations.lacking.add(handle)
            return None
        self.reservations.bind(handle)
        self._frames[handle] = frames
        return shared, fresh

    def unbind(self, handle: int) -> None:
        """The staging blocks of `bind` have been given back: reserve the room again."""
        self.reservations.unbind(handle)

    def release_shared(self, blocks: Seq[int]) -> None:
        """Release the engine's blocks and the frames that `bind` has held."""
        self._engine.release_prefix([block for block in blocks if block >= 0])
        self._engine.release_frames([~block for block in blocks if block < 0])

    def postpone(self, handle: int) -> None:
        """End a reservation that found no blocks; it is made again when there are some."""
        submission = self._submissions[handle]
        assert submission.remote is not None
        stem = submission.live[0]
        self.reservations.end(stem)
        self._loosened += 1
        submission.remote.admitted = False
        self.reservations.waiting.push(stem)

    # ------------------------------------------------------------------ into the engine

    def prefill_here(self, handle: int) -> None:
        """End the reservation; the engine computes the prompt."""
        submission = self._fulfil(handle)
        try:
            self._engine.add(handle, submission.request)
        except PdserveError as error:
            self._reject(handle, error)

    def activate(
        self, handle: int, shared: list[int], fresh: list[int], handoff: Handoff, now: Seconds
    ) -> list[TokenDelta]:
        """A peer has filled the staging blocks: the request enters the engine, which loads them.

        The handoff's first tokens are not used. The engine computes the last prompt token and
        samples by itself, because only then do its later tokens follow from its own state.
        """
        frames = self._frames.pop(handle)
        request = self._fulfil(handle).request
        held = len(shared) * self._pool.block_size
        slots = (*frames.blocks, *fresh)
        blocks = StagedBlocks(len(shared) - len(frames.blocks), slots, handoff.tokens)
        self._loads[handle] = _Load(shared, fresh)
        self._origins[handle] = _Origin(
            min(held, len(request.prompt)),
            handoff.tokens - held,
            frames.sources,
            handoff.prompt_logprobs,
        )
        # The engine would compute the whole prompt again for its logprobs.
        sampling = replace(request.sampling, prompt_logprobs=None)
        try:
            self._engine.load_staged(handle, replace(request, sampling=sampling), blocks)
        except PdserveError as error:
            del self._origins[handle]  # nothing was loaded
            self.let_go(handle, 0)
            self._reject(handle, error)
        return []

    def loading(self, handle: int) -> bool:
        """Return whether the engine may still read staging blocks for this handle."""
        return handle in self._loads

    def let_go(self, handle: int, failed: int) -> bool:
        """The engine reads the staging blocks no more, and has to compute `failed` of their tokens.
        False: it was not loading."""
        load = self._loads.pop(handle, None)
        if load is None:
            return False
        self._pool.release(load.fresh)
        self.release_shared(load.shared)
        origin = self._origins.get(handle)
        if origin is not None:
            self._note_origin(origin, failed)
        if failed:
            self.failed_loads += 1
            _log.error("request %d: %d tokens of staged KV were not loaded", handle, failed)
        return True

    def _note_origin(self, origin: _Origin, failed: int) -> None:
        """The last `failed` tokens of the prompt have to be computed."""
        lost = max(0, failed - origin.received)
        origin.received -= failed - lost
        self.received_tokens += origin.received
        if lost:
            origin.cached -= min(lost, sum(each.tokens for each in origin.sources))
            origin.sources = ()
        self._engine.loaded_frames(origin.sources)

    # ------------------------------------------------------------------ output

    def explain(self, delta: TokenDelta) -> TokenDelta:
        """Complete a delta with what only the handoff knows."""
        origin = self._origins.get(delta.handle)
        if origin is None:
            return delta
        if delta.started is not None:
            started = replace(
                delta.started,
                cached_tokens=origin.cached,
                received_tokens=origin.received,
                sources=origin.sources,
            )
            delta = replace(delta, started=started, prompt_logprobs=origin.prompt_logprobs)
        if delta.finish is not None:
            finish = replace(delta.finish, cached_tokens=origin.cached)
            delta = replace(delta, finish=finish)
        return delta

    def end(self) -> None:
        """The engine is closed: release all blocks, since nothing reads them any more."""
        for load in self._loads.values():
            self._pool.release(load.fresh)
        self._loads.clear()
        self._frames.clear()

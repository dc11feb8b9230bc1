"""Admits prompts that other workers prefill: they wait for a reservation, then get filled blocks.

They wait in the same order as all others, but for a reservation (`reservations`) instead of blocks.
Who fills them is not known here (`kv_transfer.receiver`). A sequence that `activate` takes in keeps
its blocks while it waits for a place in the running batch, and is the first to get one.
"""

from __future__ import annotations

from bisect import insort
from typing import TYPE_CHECKING

from pdserve.engine_core.kv_transfer.remote_prefill import RemotePrefillState
from pdserve.engine_core.scheduler.scheduler_state import SchedulerState, precedence
from pdserve.engine_core.scheduler.sequence import Sequence, SequenceStatus
from pdserve.engine_core.scheduler.submission import Submission, end_reason
from pdserve.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from pdserve.ids import Seconds
    from pdserve.messages.handoff import FirstToken, Handoff
    from pdserve.messages.request import FirstTokenStats, GenerateRequest, TokenDelta

__all__ = ["RemoteAdmission"]


class RemoteAdmission(SchedulerState):
    """The part of a scheduler that `KvReceiver` drives."""

    def submit_remote(self, handle: int, request: GenerateRequest, now: Seconds) -> None:
        """Submit a request whose prompt another worker prefills: it waits for `reserve`, then for
        `activate`.

        Errors: those of `submit`, and `InvalidRequest` for a request that only this engine can
        compute.
        """
        choices = self._build(handle, request, now)
        if request.diverged:
            raise InvalidRequest("choices with different outputs cannot be prefilled for a peer")
        if request.pooling:
            raise InvalidRequest("an embedding request cannot be prefilled by another worker")
        if end_reason(choices[0]) is not None:
            raise InvalidRequest("the given output is already complete: nothing is left to prefill")
        submission = Submission(handle, request, None, choices, remote=RemotePrefillState())
        self.reservations.waiting.push(self._enter(submission, now))

    def remote(self, handle: int) -> RemotePrefillState | None:
        """The remote state of a submission; None if no other worker is to prefill it."""
        submission = self._submissions.get(handle)
        return None if submission is None else submission.remote

    def stem_of(self, handle: int) -> Sequence:
        """The first live choice of a submission."""
        return self._submissions[handle].live[0]

    # ------------------------------------------------------------------ reservations

    def reserve(self, now: Seconds) -> list[tuple[int, int]]:
        """Make reservations, in order, for the sequences that fit; returns each handle with the
        number of its tokens that are cached now."""
        made: list[tuple[int, int]] = []
        while self.may_reserve:
            stem = self.reservations.waiting.first()
            shared = self._reusable(stem)
            if not self._set_aside(stem, shared):
                self._held = (stem, self._room)
                break
            remote = self._submissions[stem.handle].remote
            assert remote is not None
            remote.admitted = True
            made.append((stem.handle, len(shared) * self._pool.block_size))
            if self.onboarder is not None:
                # What comes before the peer is bound is on the device then, and is not sent.
                hashes = self._reusable_hashes(stem)
                self.onboarder.begin(hashes, shared, now, self._spare, root=stem.root)
        return made

    def _set_aside(self, stem: Sequence, shared: list[int]) -> bool:
        """Make the reservation if it fits. Its cached blocks count as available until `bind`."""
        self._lacks_room = False
        pool = self._pool
        need = self._blocks_for(len(stem.tokens)) - len(shared)
        if self._is_overtaking(stem) or not self.reservations.allows(need):
            return False
        waking = sum(not pool.references(block) for block in shared)
        need += min(len(stem.forks), pool.num_blocks - need - waking)
        if need + waking + self._spare > pool.available:
            self._lacks_room = True
            return False
        self.reservations.give(stem, need)
        return True

    def _is_overtaking(self, stem: Sequence) -> bool:
        """Return whether an earlier sequence waits for blocks."""
        if self._stuck is None or not len(self.waiting):
            return False
        first = self.waiting.first()
        return first is self._stuck[0] and first.order < stem.order

    def _is_behind(self, sequence: Sequence) -> bool:
        stem = self.reservations.first()
        return stem is not None and stem.order < sequence.order

    def bind(self, handle: int) -> tuple[list[int], list[int]] | None:
        """Allocate blocks for all tokens of a reservation: (from the prefix cache, fresh). The
        caller owns them. None if too few are free now."""
        stem = self.stem_of(handle)
        shared = self._reusable(stem)
        fresh = self._pool.reserve(self._blocks_for(len(stem.tokens)) - len(shared), shared=shared)
        if fresh is None:
            self.reservations.lacking.add(handle)
            return None
        self.reservations.bind(handle)
        return shared, fresh

    def unbind(self, handle: int) -> None:
        """The caller has released the blocks of `bind`: reserve the room again."""
        self.reservations.unbind(handle)

    def release_shared(self, blocks: Seq[int]) -> None:
        """Release the cached blocks that `bind` has returned."""
        self._pool.release(blocks)

    def postpone(self, handle: int) -> None:
        """End a reservation that found no blocks; it is made again when the pool has them."""
        submission = self._submissions[handle]
        assert submission.remote is not None
        stem = submission.live[0]
        self.reservations.end(stem)
        self._loosened += 1
        submission.remote.admitted = False
        self.reservations.waiting.push(stem)

    # ------------------------------------------------------------------ the end of a reservation

    def prefill_here(self, handle: int) -> None:
        """End the reservation and queue the sequence by its arrival, to be computed here."""
        stem = self._fulfil(self._submissions[handle])
        self.waiting.push(stem)

    def _fulfil(self, submission: Submission) -> Sequence:
        stem = submission.live[0]
        self.reservations.end(stem)
        self._loosened += 1
        submission.remote = None
        return stem

    def activate(
        self, handle: int, shared: list[int], fresh: list[int], handoff: Handoff, now: Seconds
    ) -> list[TokenDelta]:
        """A peer has filled the blocks of `bind`: they become the sequence's, which decodes from
        there. Returns the deltas of the first tokens."""
        submission = self._submissions[handle]
        stem = self._fulfil(submission)
        self._begin(submission)
        submission.prompt_logprobs = handoff.prompt_logprobs or []
        stem.blocks = shared + fresh
        held = len(shared) * self._pool.block_size
        stem.cached_tokens = min(held, stem.prompt_len)
        stem.received_tokens = len(stem.tokens) - held
        self._set_filled(stem)
        children, stem.forks = stem.forks, []
        for child in children:
            child.cached_tokens, child.received_tokens = stem.cached_tokens, stem.received_tokens
            if self._share(stem, child, stem.prompt_len):
                self._set_ready(child)
        self.counters.prompt_tokens += stem.prompt_len
        self.counters.cached_tokens += stem.cached_tokens
        self.counters.received_tokens += stem.prompt_len - stem.cached_tokens
        self.counters.output_tokens += len(handoff.first)
        return [
            self._append_first(sequence, first, handoff.started, now)
            for sequence, first in zip([stem, *children], handoff.first, strict=True)
        ]

    def _set_filled(self, stem: Sequence) -> None:
        """All tokens are in the sequence's blocks; fresh ones have no hash yet."""
        stem.num_computed = len(stem.tokens)
        stem.num_committed = 0
        if self._names is not None:
            self._commit(stem)
        self._set_ready(stem)

    def _set_ready(self, sequence: Sequence) -> None:
        sequence.status = SequenceStatus.READY
        insort(self.ready, sequence, key=precedence)

    def _append_first(
        self, sequence: Sequence, first: FirstToken, started: FirstTokenStats, now: Seconds
    ) -> TokenDelta:
        """Append a choice's first token. A choice that got no blocks is queued and computes its
        prompt again."""
        sequence.first_step = max(sequence.arrival, now - started.prefill_seconds)
        sequence.work = started.work_seconds
        delta = self._append(sequence, iter([(first.token, first.logprob)]), now)
        if sequence.status is SequenceStatus.WAITING:
            self.waiting.push(sequence)
        return delta

"""Decides what each step computes: `num_computed` chases `num_tokens`, for every sequence alike.

A step has a budget of tokens. First every running sequence that lacks one token gets it (decode),
then prompts that were begun are continued, then waiting sequences are admitted in order of priority
and arrival, each as far as the budget goes. So prefill, decode, prefix hits, recomputation after
preemption and continued outputs of an earlier attempt need no cases of their own.

Blocks. Admission reserves blocks for all tokens a sequence has, on top of what the prefix cache
holds of them, and leaves one block for each running sequence; later only decoding asks for more.
When nothing is left, the running sequence of lowest priority, latest arrived, gives up its blocks
and returns to its place in the queue. The first sequence in that order is never the victim of
another, and alone it fits (checked at submission), so some sequence always ends: no livelock.
A lower priority may wait as long as higher ones keep arriving; that is what priority means here.

Choices. The first live choice of a submission (the stem) computes the prompt; the others then
share its full blocks up to the prompt's last token and copy the block that holds it.

Everything here is synchronous, without torch, sockets or a clock; times are arguments. The engine
core owns the scheduler and calls in turn `schedule`, (its executor), `complete`.

What is known of the sequences and what happens to a single one is in `scheduler_state`. Prompts
that are prefilled elsewhere come in by `remote_admission`. A core in simulated time skips steps by
`fast_forward`; one with a device plans a step before the last one has ended by `run_ahead`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdserve.engine_core.executor import ScheduledChunk, StepPlan, StepResult
from pdserve.engine_core.scheduler.fast_forward import FastForward
from pdserve.engine_core.scheduler.remote_admission import RemoteAdmission
from pdserve.engine_core.scheduler.run_ahead import RunAhead
from pdserve.engine_core.scheduler.sequence import SequenceStatus
from pdserve.engine_core.scheduler.submission import (
    Submission,
    end_reason,
    finish_record,
    first_token_stats,
)
from pdserve.messages.request import GenerateRequest, TokenDelta, TokenLogprob

if TYPE_CHECKING:
    from pdserve.engine_core.scheduler.block_hasher import BlockHasher
    from pdserve.engine_core.scheduler.scheduler_state import SchedulerLimits
    from pdserve.engine_core.scheduler.sequence import Sequence
    from pdserve.engine_core.tiers.onboarder import BlockFetch, Onboarder
    from pdserve.ids import Seconds
    from pdserve.kv.block_pool import BlockPool

__all__ = ["Expired", "Scheduler"]


@dataclass(frozen=True, slots=True)
class Expired:
    """A submission whose deadline passed; it has been dropped."""

    handle: int
    stage: str
    """What it was doing, as text that follows "while"."""


class Scheduler(RemoteAdmission, FastForward, RunAhead):
    """Plans the steps over one block pool and keeps the state of its sequences."""

    def __init__(
        self, pool: BlockPool, limits: SchedulerLimits, names: BlockHasher | None = None
    ) -> None:
        """`names` None: no prefix cache, blocks get no hashes."""
        super().__init__(pool, limits, names)
        self.prefill_tokens = limits.max_batch_tokens
        """Most prompt tokens in a step; the owner may change it between steps."""
        self.prefill_tokens_beside = limits.max_batch_tokens
        """Most prompt tokens in a step that decodes streams, too; the same."""
        self.unsteered = 0
        """Sequences that `steerable` kept out of the last plan or cut short in it."""
        self._copying: list[tuple[int, int]] = []
        """Source blocks of this step's copies, and the handles of the sequences that need them."""

    # ------------------------------------------------------------------ submissions

    def submit(
        self, handle: int, request: GenerateRequest, now: Seconds, *, counted: bool = True
    ) -> list[TokenDelta]:
        """Take a request in; returns the ends of choices whose given output was complete already.

        Raises `InvalidRequest`, `ContextLengthExceeded` or `Overloaded`; then nothing has changed.
        """
        choices = self._build(handle, request, now)
        deltas: list[TokenDelta] = []
        live: list[Sequence] = []
        for choice in choices:
            end = end_reason(choice)
            if end is None:
                live.append(choice)
            else:
                finish = finish_record(choice, *end, now)
                deltas.append(TokenDelta(handle, choice.choice, [], finish))
        if live:
            self._uncounted += not counted
            submission = Submission(handle, request, None, live, counted=counted)
            self.waiting.push(self._enter(submission, now))
        else:
            self.counters.finished += 1
        return deltas

    def rename(self, names: BlockHasher) -> None:
        """Hash blocks with `names` from now on: cached blocks are dropped, blocks in use are hashed
        again at once. Between two steps."""
        self._names = names
        self._pool.unname()
        if self.onboarder is not None:
            self.onboarder.rename()
        for submission in self._submissions.values():
            self._name(submission, names)
            for sequence in submission.live:
                if sequence.blocks:
                    self._commit(sequence)

    def abort(self, handle: int) -> bool:
        """Drop a submission in any state; its blocks are free on return, or when the step under way
        with it has ended. False: unknown."""
        submission = self._submissions.get(handle)
        if submission is None:
            return False
        self._drop(submission)
        self.counters.aborted += submission.counted
        return True

    def handles(self) -> list[int]:
        """Handles of all submissions that have not ended."""
        return list(self._submissions)

    def _drop(self, submission: Submission) -> None:
        for sequence in submission.live:
            self._take_out(sequence)
        if submission.remote is not None:
            self.reservations.end(submission.live[0])
            self._loosened += 1
        self._forget(submission)

    # ------------------------------------------------------------------ time

    def next_deadline(self) -> Seconds | None:
        """Time at which `expire` must be called at the latest; None: never."""
        return self._deadlines.next()

    def expire(self, now: Seconds) -> list[Expired]:
        """Drop the submissions whose deadline has passed; returns them with the stage they were
        in."""
        expired = []
        for handle in self._deadlines.passed(now):
            submission = self._submissions[handle]
            expired.append(Expired(handle, self._stage(submission)))
            self._drop(submission)
            self.counters.aborted += 1
        return expired

    def phase(self, handle: int) -> str:
        """What a submission is doing, as one word for metrics; empty if it is unknown."""
        submission = self._submissions.get(handle)
        if submission is None:
            return ""
        if submission.remote is not None:
            return submission.remote.phase()
        if any(sequence.status is SequenceStatus.ONBOARDING for sequence in submission.live):
            return "onboarding"
        if not any(sequence.blocks for sequence in submission.live):
            preempted = any(sequence.preemptions for sequence in submission.live)
            return "preempted" if preempted else "queued"
        begun = any(sequence.first_token is not None for sequence in submission.live)
        return "decoding" if begun else "prefilling"

    def _stage(self, submission: Submission) -> str:
        produced = sum(sequence.num_output for sequence in submission.live)
        if submission.remote is not None:
            return submission.remote.stage()
        if any(sequence.status is SequenceStatus.ONBOARDING for sequence in submission.live):
            return "fetching KV of the prompt's beginning"
        if not submission.started:
            return f"waiting in the engine's queue with {len(self.waiting)} sequences"
        if any(sequence.blocks for sequence in submission.live):
            return f"decoding, {produced} tokens done" if produced else "computing the prompt"
        return f"waiting for KV blocks after a preemption, {produced} tokens done"

    # ------------------------------------------------------------------ planning a step

    @property
    def has_work(self) -> bool:
        """Whether `schedule` may plan something now. False if all sequences wait for blocks that
        nothing here can free."""
        if self.running or self.ready:
            return True
        return len(self.waiting) > 0 and not self._is_stuck()

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for blocks, for a place in the batch or for a reservation."""
        onboarding = 0 if self.onboarder is None else self.onboarder.num_waiting
        return len(self.waiting) + len(self.ready) + len(self.reservations.waiting) + onboarding

    def uncomputed(self) -> int:
        """Prompt tokens that no step has computed yet, with the output of preempted sequences. It
        is not known before how many of them the prefix cache will supply. O(sequences)."""
        waiting = sum(len(sequence.tokens) for sequence in self.waiting)
        if self.onboarder is not None:
            waiting += self.onboarder.uncomputed(self._pool.block_size)
        lacking = (len(sequence.tokens) - sequence.num_computed for sequence in self.running)
        return waiting + sum(count for count in lacking if count > 1)

    def schedule(self, now: Seconds) -> StepPlan:
        """Plan the next step; empty if there is nothing to compute. Preempts if blocks are
        short."""
        plan = StepPlan()
        self.unsteered = 0
        self._planning = now
        if self.ready:
            self._resume()
        preemptions = self.counters.preemptions
        prefills = self._plan_decodes(plan)
        budget = min(self.limits.max_batch_tokens - len(plan.chunks), self.prefill_tokens)
        if plan.chunks:
            budget = min(budget, self.prefill_tokens_beside)
        for sequence in prefills:
            if budget <= 0:
                break
            budget -= self._plan_chunk(plan, sequence, budget)
        if self.counters.preemptions == preemptions:
            self._admit(plan, budget, now)
        if self._forked and plan.chunks:
            self._plan_copies(plan)
        return plan

    def _resume(self) -> None:
        """Move sequences that a peer has filled into the running batch while it has places."""
        count = self.limits.max_sequences - len(self.running)
        for sequence in self.ready[:count]:
            self._run(sequence)
        del self.ready[:count]

    def _plan_decodes(self, plan: StepPlan) -> list[Sequence]:
        """Plan one token for each running sequence that lacks just one; returns the others.

        Preemption removes sequences from the end of the list, behind the present one, so those
        planned before stay.
        """
        prefills: list[Sequence] = []
        size = self._pool.block_size
        chunks = plan.chunks
        for sequence in self.running:
            start = sequence.num_computed
            length = len(sequence.tokens)
            if length - start != 1:
                prefills.append(sequence)
            elif self._is_unsteered(sequence):
                continue
            elif length <= len(sequence.blocks) * size or self._grow(sequence):
                chunks.append(ScheduledChunk(sequence, start, 1, not sequence.pools))
        return prefills

    def _is_unsteered(self, sequence: Sequence) -> bool:
        """Return whether the sequence's next token cannot be sampled yet."""
        if self.steerable is None or sequence.pools or self.steerable(sequence):
            return False
        self.unsteered += 1
        return True

    def _plan_copies(self, plan: StepPlan) -> None:
        """Plan the copies. Their sources stay referenced until the step is done, so that they are
        not overwritten before."""
        for sequence in self._forked:
            source = sequence.copy_from
            if source is not None:
                block = (sequence.prompt_len - 1) // self._pool.block_size
                plan.copies.append((source, sequence.blocks[block]))
                self._copying.append((source, sequence.handle))
                sequence.copy_from = None
        self._forked.clear()

    def _plan_chunk(self, plan: StepPlan, sequence: Sequence, budget: int) -> int:
        start = sequence.num_computed
        lacking = len(sequence.tokens) - start
        count = min(lacking, budget)
        if count == lacking and self._is_unsteered(sequence):
            count -= 1
            if not count:
                return 0
        samples = count == lacking and not sequence.pools
        plan.chunks.append(ScheduledChunk(sequence, start, count, samples))
        return count

    # ------------------------------------------------------------------ admission

    def _admit(self, plan: StepPlan, budget: int, now: Seconds) -> None:
        """Start waiting sequences strictly in order: none overtakes one that does not fit."""
        while budget > 0 and len(self.waiting) and len(self.running) < self.limits.max_sequences:
            sequence = self.waiting.first()
            if self._is_stuck():
                break
            if self.onboarder is not None and self._onboards(sequence, self.onboarder, now):
                continue
            if not self._place(sequence):
                break
            self.waiting.discard(sequence)
            self._start(sequence, now)
            budget -= self._plan_chunk(plan, sequence, budget)

    def _onboards(self, sequence: Sequence, onboarder: Onboarder, now: Seconds) -> bool:
        """Let a sequence wait for blocks that come from elsewhere, if that is sooner than to
        compute them. It then is not in the queue."""
        if not onboarder.may_take(sequence):
            return False
        hashes = self._reusable_hashes(sequence)
        shared = self._pool.match(hashes)
        if not onboarder.takes(sequence, hashes, shared, now, self._spare):
            return False
        self.waiting.discard(sequence)
        sequence.status = SequenceStatus.ONBOARDING
        return True

    def onboarded(self, sequence: Sequence, onboarding: BlockFetch, now: Seconds) -> None:
        """A fetch has ended for which the sequence has waited: it goes on in its old place."""
        sequence.status = SequenceStatus.WAITING
        sequence.sources = onboarding.sources(self._pool.block_size)
        if sequence.request.trace:
            tokens = sum(source.tokens for source in sequence.sources)
            sequence.note("onboard", onboarding.began, now, tokens)
        self._loosened += 1
        self.waiting.push(sequence)

    def _place(self, sequence: Sequence) -> bool:
        """Allocate blocks for all tokens of a sequence: from the prefix cache as far as possible,
        the rest fresh.

        At least one token stays to be computed, for its logits.
        """
        if self._lacks_room and self._is_behind(sequence):
            self._stuck = (sequence, self._room)
            return False
        pool = self._pool
        early = sequence.early
        shared = self._reusable(sequence) if early is None else early.lent
        need = self._blocks_for(len(sequence.tokens)) - len(shared)
        fresh = pool.reserve(need, shared=shared, spare=self._spare)
        if fresh is None:
            self._stuck = (sequence, self._room)
            return False
        if self._stuck is not None:
            self._stuck = None
            self._loosened += 1
        sequence.blocks = shared + fresh
        self._set_computed(sequence, len(shared))
        if early is not None:
            sequence.num_committed = early.first
        return True

    def keep_fetched(self, sequence: Sequence) -> None:
        """All layers have come of the blocks with which a sequence has started early."""
        if sequence.status is SequenceStatus.RUNNING:
            self._commit(sequence)

    def recompute(self, sequence: Sequence) -> None:
        """They have not: if it runs, it returns to the queue, as if it had not started."""
        if sequence.status is not SequenceStatus.RUNNING:
            return
        self.running.remove(sequence)
        sequence.num_committed = 0
        self._leave(sequence)
        sequence.status = SequenceStatus.WAITING
        self._set_computed(sequence, 0)
        if not sequence.preemptions:
            self._uncount(sequence)
        self.waiting.push(sequence)

    def _uncount(self, sequence: Sequence) -> None:
        """Forget the first admission: the next one counts."""
        sequence.first_step = None
        if self._submissions[sequence.handle].counted:
            self.counters.prompt_tokens -= sequence.prompt_len
            self.counters.cached_tokens -= sequence.cached_tokens

    def _start(self, sequence: Sequence, now: Seconds) -> None:
        self._run(sequence)
        submission = self._submissions[sequence.handle]
        self._begin(submission)
        if sequence.preempted_at is not None:
            sequence.note("preempted", sequence.preempted_at, now)
            sequence.preempted_at = None
        if sequence.first_step is None:
            # A simulated step begins when the last one ended, which may be just before the arrival.
            sequence.first_step = max(sequence.arrival, now)
            sequence.cached_tokens = min(sequence.num_computed, sequence.prompt_len)
            if submission.counted:
                self.counters.prompt_tokens += sequence.prompt_len
                self.counters.cached_tokens += sequence.cached_tokens

    # ------------------------------------------------------------------ taking results in

    def complete(
        self, plan: StepPlan, result: StepResult, now: Seconds, took: Seconds = 0.0
    ) -> list[TokenDelta]:
        """Take in the result of a step that took `took` seconds; returns a delta for each new
        token."""
        self._release_copy_sources()
        for index, rows in result.prompt_logprobs.items():
            self._collect(plan.chunks[index], rows)
        sampled = zip(result.tokens, result.logprobs, strict=True)
        deltas: list[TokenDelta] = []
        computed = 0
        uncounted = self._uncounted_in(plan) if self._uncounted else 0
        per_token = -1.0
        for chunk in plan.chunks:
            sequence = chunk.sequence
            computed += chunk.count
            if sequence.first_token is None:
                # It is computed once, and only in steps that prefill.
                if per_token < 0:
                    per_token = took / plan.num_tokens
                sequence.work += per_token * chunk.count
                if sequence.request.trace:
                    sequence.note("chunk", now - took, now, chunk.count)
            sequence.num_computed = end = chunk.start + chunk.count
            if end >= sequence.commit_at:
                self._commit(sequence)
            if sequence.forks and end >= sequence.prompt_len - 1:
                self._fork(sequence, now)
            if chunk.samples:
                deltas.append(self._append(sequence, sampled, now))
        self.counters.computed_tokens += computed
        self.counters.output_tokens += len(deltas) - uncounted
        for index, vector in result.embeddings.items():
            deltas.append(self._pool_end(plan.chunks[index].sequence, vector, now))
        return deltas

    def _pool_end(self, sequence: Sequence, vector: bytes, now: Seconds) -> TokenDelta:
        """End an embedding request, whose prompt is now computed."""
        sequence.first_token = now
        started = first_token_stats(sequence)
        finish = self._end(sequence, now, vector)
        return TokenDelta(sequence.handle, sequence.choice, [], finish, started=started)

    def _uncounted_in(self, plan: StepPlan) -> int:
        """Tokens of the plan that do not count in the stats."""
        sampling = [chunk.sequence.handle for chunk in plan.chunks if chunk.samples]
        return sum(not self._submissions[handle].counted for handle in sampling)

    def fail(self, plan: StepPlan) -> list[int]:
        """The step failed: drop every submission in it; returns their handles."""
        copying = [handle for _, handle in self._copying]
        self._release_copy_sources()
        handles = dict.fromkeys(chunk.sequence.handle for chunk in plan.chunks)
        handles.update((handle, None) for handle in copying if handle in self._submissions)
        for handle in handles:
            self._drop(self._submissions[handle])
        return list(handles)

    def drop(self, handle: int, *, trusted: bool) -> None:
        """Drop a failed submission. Not `trusted`: the KV of its blocks is never reused, not even
        where others hold them too (choices, parts under way, requests with the same prefix), since
        any of them may be the cause."""
        submission = self._submissions[handle]
        if not trusted:
            for sequence in submission.live:
                self._pool.disown(sequence.blocks)
        self._drop(submission)

    def take_released(self) -> list[Sequence]:
        """Sequences that ended or were preempted since the last call."""
        released, self._released = self._released, []
        return released

    def _collect(self, chunk: ScheduledChunk, rows: list[TokenLogprob]) -> None:
        """Store logprobs of the prompt tokens after `chunk.start`; recomputed ones replace the
        old."""
        submission = self._submissions[chunk.sequence.handle]
        known = submission.prompt_logprobs
        if len(known) < chunk.sequence.prompt_len - 1 and chunk.start <= len(known):
            known[chunk.start :] = rows

    def _release_copy_sources(self) -> None:
        for source, _ in self._copying:
            self._pool.release((source,))
        self._copying.clear()

    # ------------------------------------------------------------------ choices of one prompt

    def _fork(self, stem: Sequence, now: Seconds) -> None:
        """Let the other choices go on from the prompt's end, once the stem has computed it."""
        for child in stem.forks:
            if self._is_cached_further(child):
                self.waiting.push(child)
            elif len(self.running) < self.limits.max_sequences and self._share(stem, child):
                child.first_step = now
                child.cached_tokens = stem.cached_tokens
                self._run(child)
            else:
                self.waiting.push(child)
        stem.forks = []

    def _is_cached_further(self, child: Sequence) -> bool:
        """Whether the prefix cache has some of its given output too, which is more than the stem
        can share."""
        if not child.num_output:
            return False
        return len(self._reusable(child)) > (child.prompt_len - 1) // self._pool.block_size

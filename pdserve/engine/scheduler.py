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

A core in simulated time may skip steps: while `steady` says that they only decode the same batch,
`advance` does in one call what so many turns would do, to the pool as to the sequences.

The handoff of a prefilled sequence joins here twice: a sequence whose blocks were filled by a peer
enters `_admit` with `num_computed` already set, and one that is to be decoded elsewhere leaves
through `_leave` with its blocks kept under a lease instead of released.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdserve.engine.executor import Chunk, StepPlan, StepResult
from pdserve.engine.queues import Deadlines, WaitingQueue
from pdserve.engine.sequence import Sequence, Status
from pdserve.engine.submission import (
    Submission,
    build_sequences,
    check_request,
    ending,
    finish_record,
    started_record,
)
from pdserve.errors import ConfigError, ContextLengthExceeded, Overloaded
from pdserve.messages.request import Finish, GenerateRequest, Started, TokenDelta, TokenLogprob

if TYPE_CHECKING:
    from collections.abc import Iterator
    from collections.abc import Sequence as Seq

    from pdserve.engine.prefix import BlockNames
    from pdserve.ids import Seconds
    from pdserve.kv.block_pool import BlockPool

__all__ = ["Counters", "Expired", "Scheduler", "SchedulerLimits"]


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Bounds of one scheduler; `EngineSpec` and the loaded model supply them."""

    max_model_len: int
    """Tokens of a sequence, prompt and output together."""
    vocab_size: int
    max_batch_tokens: int = 2048
    """Tokens of a step; at least `max_sequences`, so that no running sequence is left out."""
    max_sequences: int = 256
    """Running at once."""
    max_waiting: int = 4096
    """Submissions of which nothing has been computed yet; one more is `Overloaded`."""

    def __post_init__(self) -> None:
        if self.max_sequences < 1 or self.max_waiting < 1 or self.max_model_len < 2:
            raise ConfigError(
                "max_sequences and max_waiting must be positive, max_model_len over 1"
            )
        if self.max_batch_tokens < self.max_sequences:
            raise ConfigError(
                f"max_batch_tokens ({self.max_batch_tokens}) must be at least max_sequences "
                f"({self.max_sequences}): every running sequence takes one token per step"
            )


@dataclass(slots=True)
class Counters:
    """What has happened since the start; the meanings are those of `EngineStats`."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    aborted: int = 0
    finished: int = 0


@dataclass(frozen=True, slots=True)
class Expired:
    """A submission whose deadline passed; it has been dropped."""

    handle: int
    stage: str
    """What it was doing, to follow "while"."""


class Scheduler:
    """Plans steps over one pool and keeps its sequences' books."""

    def __init__(
        self, pool: BlockPool, limits: SchedulerLimits, names: BlockNames | None = None
    ) -> None:
        """`names` None: no prefix cache, blocks get no hashes."""
        self.limits = limits
        self.counters = Counters()
        self.running: list[Sequence] = []
        """In order of precedence: the last one is preempted first."""
        self.waiting = WaitingQueue()
        self._pool = pool
        self._names = names
        self._submissions: dict[int, Submission] = {}
        self._deadlines = Deadlines()
        self._arrivals = 0
        self._unstarted = 0
        self._forked: list[Sequence] = []
        self._copy_sources: list[int] = []
        self._released: list[Sequence] = []
        self._stuck: tuple[Sequence, int] | None = None
        """The waiting sequence that did not fit, and the pool's `releases` at that moment."""

    # ------------------------------------------------------------------ submissions

    def submit(self, handle: int, request: GenerateRequest, now: Seconds) -> list[TokenDelta]:
        """Take a request in; returns the ends of choices whose given output was complete already.

        Raises `InvalidRequest`, `ContextLengthExceeded` or `Overloaded`; then nothing has changed.
        """
        limits = self.limits
        check_request(request, max_model_len=limits.max_model_len, vocab_size=limits.vocab_size)
        if self._unstarted >= limits.max_waiting:
            raise Overloaded(
                f"{self._unstarted} requests are waiting for the engine", retry_after=1.0
            )
        choices = build_sequences(handle, request, now, self._arrivals, limits.max_model_len)
        self._check_fits(choices[0])
        self._arrivals += 1
        deltas: list[TokenDelta] = []
        live: list[Sequence] = []
        for choice in choices:
            end = ending(choice)
            if end is None:
                live.append(choice)
            else:
                finish = finish_record(choice, *end, now)
                deltas.append(TokenDelta(handle, choice.choice, [], finish))
        if live:
            self._enter(Submission(handle, request, None, live), now)
        else:
            self.counters.finished += 1
        return deltas

    def _check_fits(self, sequence: Sequence) -> None:
        """The last token of a sequence is never computed, so it needs no room."""
        need = self._blocks_for(max(sequence.prompt_len, sequence.max_len - 1))
        if need > self._pool.num_blocks:
            raise ContextLengthExceeded(
                f"prompt and output need {need} KV blocks of {self._pool.block_size} tokens, the "
                f"engine has {self._pool.num_blocks}",
                param="max_tokens",
            )

    def _enter(self, submission: Submission, now: Seconds) -> None:
        stem, *stem.forks = submission.live
        request = submission.request
        if request.deadline is not None:
            submission.deadline = now + request.deadline
            self._deadlines.add(submission.deadline, submission.handle)
        if self._names is not None:
            self._name(submission, self._names)
        self._submissions[submission.handle] = submission
        self._unstarted += 1
        self.waiting.push(stem)

    def _name(self, submission: Submission, names: BlockNames) -> None:
        """Begin the chains of a submission's choices."""
        root = names.root(submission.request.cache_salt)
        given = names.given(submission.request, root)
        for sequence in submission.live:
            sequence.root = root
            sequence.hashes = given.copy()
            sequence.num_committed = 0
            sequence.commit_at = self._pool.block_size

    def rename(self, names: BlockNames) -> None:
        """From now on blocks are named by `names`: what is cached is forgotten, what is in use gets
        its new name at once. Between two steps."""
        self._names = names
        self._pool.unname()
        for submission in self._submissions.values():
            self._name(submission, names)
            for sequence in submission.live:
                if sequence.status is Status.RUNNING:
                    self._commit(sequence)

    def abort(self, handle: int) -> bool:
        """Drop a submission in whatever state; its blocks are free on return. False: unknown."""
        submission = self._submissions.get(handle)
        if submission is None:
            return False
        self._drop(submission)
        self.counters.aborted += 1
        return True

    def handles(self) -> list[int]:
        """Every submission that has not ended."""
        return list(self._submissions)

    def _drop(self, submission: Submission) -> None:
        for sequence in submission.live:
            if sequence.status is Status.RUNNING:
                self.running.remove(sequence)
                self._leave(sequence)
            else:
                self.waiting.discard(sequence)
            sequence.status = Status.FINISHED
        self._forget(submission)

    def _forget(self, submission: Submission) -> None:
        del self._submissions[submission.handle]
        if submission.deadline is not None:
            self._deadlines.discard(submission.deadline, submission.handle)
        if not submission.started:
            self._unstarted -= 1

    # ------------------------------------------------------------------ time

    def next_deadline(self) -> Seconds | None:
        """When `expire` has to be called although nothing else happens."""
        return self._deadlines.next()

    def expire(self, now: Seconds) -> list[Expired]:
        """Drop what has run out of time, with the stage it was in."""
        expired = []
        for handle in self._deadlines.passed(now):
            submission = self._submissions[handle]
            expired.append(Expired(handle, self._stage(submission)))
            self._drop(submission)
            self.counters.aborted += 1
        return expired

    def _stage(self, submission: Submission) -> str:
        produced = sum(sequence.num_output for sequence in submission.live)
        if not submission.started:
            return f"waiting in the engine's queue with {len(self.waiting)} sequences"
        if any(sequence.status is Status.RUNNING for sequence in submission.live):
            return f"decoding, {produced} tokens done" if produced else "computing the prompt"
        return f"waiting for KV blocks after a preemption, {produced} tokens done"

    # ------------------------------------------------------------------ planning a step

    @property
    def has_work(self) -> bool:
        """Whether `schedule` may plan something now. False while the only sequences there are wait
        for blocks that nobody here can free."""
        return bool(self.running) or (len(self.waiting) > 0 and not self._is_stuck())

    def uncomputed(self) -> int:
        """Prompt tokens that no step has computed yet, a preempted sequence's output included; what
        the prefix cache will spare is not known before. O(sequences)."""
        waiting = sum(len(sequence.tokens) for sequence in self.waiting)
        lacking = (len(sequence.tokens) - sequence.num_computed for sequence in self.running)
        return waiting + sum(count for count in lacking if count > 1)

    def schedule(self, now: Seconds) -> StepPlan:
        """The next step; empty if there is nothing to compute. Preempts if blocks are short."""
        plan = StepPlan()
        preemptions = self.counters.preemptions
        prefills = self._plan_decodes(plan)
        self._plan_copies(plan)
        budget = self.limits.max_batch_tokens - len(plan.chunks)
        for sequence in prefills:
            if budget <= 0:
                break
            budget -= self._plan_chunk(plan, sequence, budget)
        if self.counters.preemptions == preemptions:
            self._admit(plan, budget, now)
        return plan

    def _plan_decodes(self, plan: StepPlan) -> list[Sequence]:
        """One token for each running sequence that lacks just one; returns the others.

        Preemption takes sequences off the end of the list, behind the one being looked at: what
        has been planned stays.
        """
        prefills: list[Sequence] = []
        size = self._pool.block_size
        chunks = plan.chunks
        for sequence in self.running:
            start = sequence.num_computed
            length = len(sequence.tokens)
            if length - start != 1:
                prefills.append(sequence)
            elif length <= len(sequence.blocks) * size or self._grow(sequence):
                chunks.append(Chunk(sequence, start, 1, True))
        return prefills

    def _grow(self, sequence: Sequence) -> bool:
        """One more block, at the price of preemptions; False if the price was `sequence`."""
        while (fresh := self._pool.reserve(1)) is None:
            victim = self.running.pop()
            self._preempt(victim)
            if victim is sequence:
                return False
        sequence.blocks += fresh
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the queue with its tokens; what it computed may survive in the prefix cache."""
        self._leave(sequence)
        sequence.status = Status.WAITING
        self._set_computed(sequence, 0)
        sequence.preemptions += 1
        self.counters.preemptions += 1
        self.waiting.push(sequence)

    def _plan_copies(self, plan: StepPlan) -> None:
        """The sources stay referenced until the step is done, lest they be written before."""
        if not self._forked:
            return
        for sequence in self._forked:
            source = sequence.copy_from
            if source is not None:
                block = (sequence.prompt_len - 1) // self._pool.block_size
                plan.copies.append((source, sequence.blocks[block]))
                self._copy_sources.append(source)
                sequence.copy_from = None
        self._forked.clear()

    @staticmethod
    def _plan_chunk(plan: StepPlan, sequence: Sequence, budget: int) -> int:
        start = sequence.num_computed
        lacking = len(sequence.tokens) - start
        count = min(lacking, budget)
        plan.chunks.append(Chunk(sequence, start, count, count == lacking))
        return count

    # ------------------------------------------------------------------ admission

    def _admit(self, plan: StepPlan, budget: int, now: Seconds) -> None:
        """Start waiting sequences, strictly in order: nobody overtakes one that does not fit."""
        while budget > 0 and len(self.waiting) and len(self.running) < self.limits.max_sequences:
            sequence = self.waiting.first()
            if self._is_stuck() or not self._place(sequence):
                break
            self.waiting.discard(sequence)
            self._start(sequence, now)
            budget -= self._plan_chunk(plan, sequence, budget)

    def _is_stuck(self) -> bool:
        """The first in the queue did not fit, and nothing has been released since."""
        if self._stuck is None:
            return False
        sequence, releases = self._stuck
        return releases == self._pool.releases and sequence is self.waiting.first()

    def _place(self, sequence: Sequence) -> bool:
        """Blocks for all its tokens: as many as possible from the cache, the rest fresh.

        At least one token stays to be computed, for its logits.
        """
        pool = self._pool
        shared: list[int] = []
        if self._names is not None and self._submissions[sequence.handle].reads_cache:
            reusable = (len(sequence.tokens) - 1) // pool.block_size
            shared = pool.match(self._names.of(sequence, reusable)[:reusable])
        need = self._blocks_for(len(sequence.tokens)) - len(shared)
        fresh = pool.reserve(need, shared=shared, spare=len(self.running))
        if fresh is None:
            self._stuck = (sequence, pool.releases)
            return False
        self._stuck = None
        sequence.blocks = shared + fresh
        self._set_computed(sequence, len(shared))
        return True

    def _set_computed(self, sequence: Sequence, blocks: int) -> None:
        """The first `blocks` blocks are complete and known to the pool."""
        size = self._pool.block_size
        sequence.num_computed = blocks * size
        sequence.num_committed = blocks
        if self._names is not None:
            sequence.commit_at = (blocks + 1) * size

    def _start(self, sequence: Sequence, now: Seconds) -> None:
        self._run(sequence)
        submission = self._submissions[sequence.handle]
        if not submission.started:
            submission.started = True
            self._unstarted -= 1
        if sequence.first_step is None:
            sequence.first_step = now
            sequence.cached_tokens = min(sequence.num_computed, sequence.prompt_len)
            self.counters.prompt_tokens += sequence.prompt_len
            self.counters.cached_tokens += sequence.cached_tokens

    def _run(self, sequence: Sequence) -> None:
        sequence.status = Status.RUNNING
        insort(self.running, sequence, key=_precedence)

    # ------------------------------------------------------------------ taking results in

    def complete(
        self, plan: StepPlan, result: StepResult, now: Seconds, took: Seconds = 0.0
    ) -> list[TokenDelta]:
        """Advance the plan's sequences by what was computed in `took` seconds; returns a delta for
        each new token."""
        self._release_copy_sources()
        for index, rows in result.prompt_logprobs.items():
            self._collect(plan.chunks[index], rows)
        sampled = zip(result.tokens, result.logprobs, strict=True)
        deltas: list[TokenDelta] = []
        computed = 0
        per_token = -1.0
        for chunk in plan.chunks:
            sequence = chunk.sequence
            computed += chunk.count
            if sequence.first_token is None:
                if per_token < 0:  # a step that only decodes need not know
                    per_token = took / plan.num_tokens
                sequence.work += per_token * chunk.count
            sequence.num_computed = end = chunk.start + chunk.count
            if end >= sequence.commit_at:
                self._commit(sequence)
            if sequence.forks and end >= sequence.prompt_len - 1:
                self._fork(sequence, now)
            if chunk.samples:
                deltas.append(self._append(sequence, sampled, now))
        self.counters.computed_tokens += computed
        self.counters.output_tokens += len(deltas)
        return deltas

    def fail(self, plan: StepPlan) -> list[int]:
        """The step could not be computed: drop every submission in it; returns their handles."""
        self._release_copy_sources()
        handles = list(dict.fromkeys(chunk.sequence.handle for chunk in plan.chunks))
        for handle in handles:
            self._drop(self._submissions[handle])
        return handles

    def take_released(self) -> list[Sequence]:
        """Sequences that ended or were preempted since the last call."""
        released, self._released = self._released, []
        return released

    def _append(
        self,
        sequence: Sequence,
        sampled: Iterator[tuple[int, TokenLogprob | None]],
        now: Seconds,
    ) -> TokenDelta:
        token, logprob = next(sampled)
        tokens = sequence.tokens
        tokens.append(token)
        prompt_logprobs: list[TokenLogprob] | None = None
        started: Started | None = None
        if sequence.first_token is None:
            sequence.first_token = now
            started = started_record(sequence)
            if sequence.request.sampling.prompt_logprobs is not None:
                prompt_logprobs = list(self._submissions[sequence.handle].prompt_logprobs)
        finish: Finish | None = None
        length = len(tokens)
        if length >= sequence.max_len or (token in sequence.stop_ids and length > sequence.min_len):
            finish = self._end(sequence, now)
        return TokenDelta(
            sequence.handle,
            sequence.choice,
            [token],
            finish,
            None if logprob is None else [logprob],
            prompt_logprobs,
            started,
        )

    def _end(self, sequence: Sequence, now: Seconds) -> Finish:
        end = ending(sequence)
        assert end is not None
        self.running.remove(sequence)
        self._leave(sequence)
        sequence.status = Status.FINISHED
        submission = self._submissions[sequence.handle]
        submission.live.remove(sequence)
        if not submission.live:
            self._forget(submission)
            self.counters.finished += 1
        return finish_record(sequence, *end, now)

    def _commit(self, sequence: Sequence) -> None:
        """Tell the pool the names of the blocks that have become full."""
        assert self._names is not None
        full = sequence.num_computed // self._pool.block_size
        hashes = self._names.of(sequence, full)
        first = sequence.num_committed
        parent = hashes[first - 1] if first else sequence.root
        # One may have its name already: it is shared, and another holder was renamed first.
        sequence.blocks[first:full] = self._pool.commit_run(
            sequence.blocks[first:full], hashes[first:full], parent
        )
        sequence.num_committed = full
        sequence.commit_at = (full + 1) * self._pool.block_size

    def _collect(self, chunk: Chunk, rows: list[TokenLogprob]) -> None:
        """Logprobs of the prompt tokens after `chunk.start`; recomputed ones replace the old."""
        submission = self._submissions[chunk.sequence.handle]
        known = submission.prompt_logprobs
        if len(known) < chunk.sequence.prompt_len - 1 and chunk.start <= len(known):
            known[chunk.start :] = rows

    # ------------------------------------------------------------------ many steps at once

    def steady(self, limit: int) -> int:
        """How many steps from now on, `limit` at most, only decode what runs now, unless a stop id
        or somebody outside ends it sooner. Within them no block is lacking and nobody can be
        admitted; a sequence may reach its length in the last one. O(running)."""
        running, pool = self.running, self._pool
        if not running or self._forked:
            return 0
        open_door = len(self.waiting) > 0 and len(running) < self.limits.max_sequences
        if open_door and not self._is_stuck():
            return 0
        steps = limit
        for sequence in running:
            length = len(sequence.tokens)
            if length - sequence.num_computed != 1 or sequence.first_token is None:
                return 0
            steps = min(steps, sequence.max_len - length)
            if open_door:  # a commit may free a block, and so unstick the queue
                steps = min(steps, sequence.commit_at - length + 1)
        while steps > 0 and self._growth(steps) > pool.available:
            steps //= 2
        return steps

    def _growth(self, steps: int) -> int:
        """Blocks that the running sequences will have asked for when so many steps are planned."""
        return sum(
            max(0, self._blocks_for(len(sequence.tokens) + steps - 1) - len(sequence.blocks))
            for sequence in self.running
        )

    def advance(self, tokens: Seq[list[int]], now: Seconds) -> list[TokenDelta]:
        """What so many steps of decoding would do that end with `now`: one list of tokens for each
        running sequence, in order, all of one length, which `steady` has allowed. One delta for
        each sequence. O(running, and blocks begun and filled)."""
        running, steps = list(self.running), len(tokens[0])
        ends = self._change_blocks(running, tokens, steps)
        deltas: list[TokenDelta] = []
        for index, (sequence, fresh) in enumerate(zip(running, tokens, strict=True)):
            sequence.num_computed = len(sequence.tokens) - 1
            if index in ends:
                self._commit(sequence)
            finish = self._end(sequence, now) if ending(sequence) is not None else None
            deltas.append(TokenDelta(sequence.handle, sequence.choice, fresh, finish))
        self.counters.computed_tokens += steps * len(running)
        self.counters.output_tokens += steps * len(running)
        return deltas

    def _change_blocks(
        self, running: list[Sequence], tokens: Seq[list[int]], steps: int
    ) -> set[int]:
        """Append the tokens; reserve and commit in the order of single steps. Returns who has a
        block to commit in the last step, when sequences also end, each in its turn."""
        size = self._pool.block_size
        changes: list[tuple[int, bool, int]] = []
        for index, sequence in enumerate(running):
            length = len(sequence.tokens)
            full = len(sequence.blocks) * size + 2 - length
            changes += [(step, False, index) for step in range(full, steps + 1, size)]
            full = sequence.commit_at - length + 1
            changes += [(step, True, index) for step in range(full, steps + 1, size)]
            sequence.tokens += tokens[index]
        changes.sort()
        last: set[int] = set()
        for step, filled, index in changes:
            sequence = running[index]
            if not filled:
                grown = self._grow(sequence)
                assert grown, "a steady batch lacks no block"
            elif step == steps:
                last.add(index)
            else:
                sequence.num_computed = sequence.commit_at
                self._commit(sequence)
        return last

    # ------------------------------------------------------------------ choices of one prompt

    def _fork(self, stem: Sequence, now: Seconds) -> None:
        """Let the other choices go on from the prompt's end, once the stem has come so far."""
        for child in stem.forks:
            if len(self.running) < self.limits.max_sequences and self._share(stem, child):
                child.first_step = now
                child.cached_tokens = stem.cached_tokens
                self._run(child)
            else:
                self.waiting.push(child)
        stem.forks = []

    def _share(self, stem: Sequence, child: Sequence) -> bool:
        """Reference the stem's blocks before the one that holds the prompt's last token.

        That token is computed again, for logits of the child's own; the block before which it
        stands is copied if anything is in it.
        """
        pool = self._pool
        last = stem.prompt_len - 1
        index, offset = divmod(last, pool.block_size)
        shared = stem.blocks[:index]
        fresh = pool.reserve(self._blocks_for(len(child.tokens)) - index, shared=shared)
        if fresh is None:
            return False
        child.blocks = shared + fresh
        child.hashes = stem.hashes[:index]
        self._set_computed(child, index)
        child.num_computed = last
        if offset:
            child.copy_from = stem.blocks[index]
            pool.acquire((child.copy_from,))
            self._forked.append(child)
        return True

    # ------------------------------------------------------------------ blocks

    def _leave(self, sequence: Sequence) -> None:
        """Give back everything a running sequence holds.

        A copy's source goes first: it follows the blocks that the sequence shares with it.
        """
        if sequence.copy_from is not None:
            self._pool.release((sequence.copy_from,))
            sequence.copy_from = None
        self._pool.release(sequence.blocks)
        sequence.blocks = []
        self._released.append(sequence)

    def _release_copy_sources(self) -> None:
        for source in self._copy_sources:
            self._pool.release((source,))
        self._copy_sources.clear()

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._pool.block_size)


def _precedence(sequence: Sequence) -> tuple[int, int, int]:
    return sequence.order

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

Prompts that are prefilled elsewhere wait in the same order, but for a promise of room instead of
blocks (`promises`); who fills them is not known here (`incoming`). `activate` takes in one that has
been filled: it keeps its blocks while it waits for a place among the running, and is the first to
get one.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdserve.engine.attempt import Remote
from pdserve.engine.executor import Chunk, StepPlan, StepResult
from pdserve.engine.promises import Promises
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
from pdserve.errors import ConfigError, ContextLengthExceeded, InvalidRequest, Overloaded
from pdserve.messages.request import Finish, GenerateRequest, Started, TokenDelta, TokenLogprob

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from collections.abc import Sequence as Seq

    from pdserve.engine.prefix import BlockNames
    from pdserve.ids import Seconds
    from pdserve.kv.block_pool import BlockPool
    from pdserve.messages.handoff import FirstToken, Handoff

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
    unfilled: float = 0.3
    """Of the pool, at most so much is set aside for prompts that others prefill."""
    embeds: bool = False
    """The executor makes vectors."""
    generates: bool = True
    """The executor makes text."""

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
    received_tokens: int = 0
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
        self.prefill_tokens = limits.max_batch_tokens
        """Tokens of a step that are not decoded; its owner may change it between steps."""
        self.counters = Counters()
        self.running: list[Sequence] = []
        """In order of precedence: the last one is preempted first."""
        self.ready: list[Sequence] = []
        """In order of precedence: who has blocks that were filled elsewhere, and no place yet."""
        self.waiting = WaitingQueue()
        self.promises = Promises(int(limits.unfilled * pool.num_blocks))
        self._pool = pool
        self._names = names
        self._submissions: dict[int, Submission] = {}
        self._deadlines = Deadlines()
        self._arrivals = 0
        self._unstarted = 0
        self._uncounted = 0
        """Submissions that no counter is to show."""
        self._forked: list[Sequence] = []
        self._copying: list[tuple[int, int]] = []
        """Blocks that are copied in this step, and the handles of those who wait for it."""
        self._released: list[Sequence] = []
        self.keeps: Callable[[Sequence], bool] = lambda sequence: False
        """Asked about each sequence that leaves; who says yes holds its blocks from then on."""
        self.steerable: Callable[[Sequence], bool] | None = None
        """Asked before a chunk that would sample: until it says yes, what it is to be computed of
        the sequence is all but its last token. None: every sequence is."""
        self.unsteered = 0
        """Sequences that were left out of the last plan, or cut short in it, for that."""
        self._loosened = 0
        """Grows when somebody may fit although no block was released."""
        self._stuck: tuple[Sequence, int] | None = None
        """The waiting sequence that did not fit, and `_room` at that moment."""
        self._held: tuple[Sequence, int] | None = None
        """The same of who waits for a promise."""
        self._lacks_room = False
        """It is blocks that the promise waits for: nobody overtakes it."""

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
            end = ending(choice)
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

    def _build(self, handle: int, request: GenerateRequest, now: Seconds) -> list[Sequence]:
        limits = self.limits
        if not (limits.generates or request.pooling):
            raise InvalidRequest(
                "this model has no output layer: it makes vectors (/v1/embeddings), not text",
                param="model",
            )
        check_request(
            request,
            max_model_len=limits.max_model_len,
            vocab_size=limits.vocab_size,
            embeds=limits.embeds,
        )
        if self._unstarted >= limits.max_waiting:
            raise Overloaded(
                f"{self._unstarted} requests are waiting for the engine", retry_after=1.0
            )
        choices = build_sequences(handle, request, now, self._arrivals, limits.max_model_len)
        self._check_fits(choices[0])
        self._arrivals += 1
        return choices

    def _check_fits(self, sequence: Sequence) -> None:
        """The last token of a sequence is never computed, so it needs no room."""
        need = self._blocks_for(max(sequence.prompt_len, sequence.max_len - 1))
        if need > self._pool.num_blocks:
            raise ContextLengthExceeded(
                f"prompt and output need {need} KV blocks of {self._pool.block_size} tokens, the "
                f"engine has {self._pool.num_blocks}",
                param="max_tokens",
            )

    def _enter(self, submission: Submission, now: Seconds) -> Sequence:
        """Take it into the books; returns its stem."""
        stem, *stem.forks = submission.live
        request = submission.request
        if request.deadline is not None:
            submission.deadline = now + request.deadline
            self._deadlines.add(submission.deadline, submission.handle)
        if self._names is not None:
            self._name(submission, self._names)
        self._submissions[submission.handle] = submission
        self._unstarted += 1
        return stem

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
                if sequence.blocks:
                    self._commit(sequence)

    def abort(self, handle: int) -> bool:
        """Drop a submission in whatever state; its blocks are free on return. False: unknown."""
        submission = self._submissions.get(handle)
        if submission is None:
            return False
        self._drop(submission)
        self.counters.aborted += submission.counted
        return True

    def handles(self) -> list[int]:
        """Every submission that has not ended."""
        return list(self._submissions)

    def _drop(self, submission: Submission) -> None:
        for sequence in submission.live:
            self._take_out(sequence)
        if submission.remote is not None:
            self.promises.end(submission.live[0])
            self._loosened += 1
        self._forget(submission)

    def _take_out(self, sequence: Sequence) -> None:
        """From wherever it is, for good."""
        match sequence.status:
            case Status.RUNNING:
                self.running.remove(sequence)
                self._leave(sequence)
            case Status.READY:
                self.ready.remove(sequence)
                self._leave(sequence)
            case _:
                self.waiting.discard(sequence)
                self._loosened += 1
        sequence.status = Status.FINISHED

    def _forget(self, submission: Submission) -> None:
        del self._submissions[submission.handle]
        if submission.deadline is not None:
            self._deadlines.discard(submission.deadline, submission.handle)
        if not submission.started:
            self._unstarted -= 1
        self._uncounted -= not submission.counted

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

    def phase(self, handle: int) -> str:
        """What a submission is doing, in a word for metrics; empty: it is unknown."""
        submission = self._submissions.get(handle)
        if submission is None:
            return ""
        if submission.remote is not None:
            return submission.remote.phase()
        if not any(sequence.blocks for sequence in submission.live):
            preempted = any(sequence.preemptions for sequence in submission.live)
            return "preempted" if preempted else "queued"
        begun = any(sequence.first_token is not None for sequence in submission.live)
        return "decoding" if begun else "prefilling"

    def _stage(self, submission: Submission) -> str:
        produced = sum(sequence.num_output for sequence in submission.live)
        if submission.remote is not None:
            return submission.remote.stage()
        if not submission.started:
            return f"waiting in the engine's queue with {len(self.waiting)} sequences"
        if any(sequence.blocks for sequence in submission.live):
            return f"decoding, {produced} tokens done" if produced else "computing the prompt"
        return f"waiting for KV blocks after a preemption, {produced} tokens done"

    # ------------------------------------------------------------------ planning a step

    @property
    def has_work(self) -> bool:
        """Whether `schedule` may plan something now. False while the only sequences there are wait
        for blocks that nobody here can free."""
        if self.running or self.ready:
            return True
        return len(self.waiting) > 0 and not self._is_stuck()

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for blocks, a place or a promise."""
        return len(self.waiting) + len(self.ready) + len(self.promises.waiting)

    def uncomputed(self) -> int:
        """Prompt tokens that no step has computed yet, a preempted sequence's output included; what
        the prefix cache will spare is not known before. O(sequences)."""
        waiting = sum(len(sequence.tokens) for sequence in self.waiting)
        lacking = (len(sequence.tokens) - sequence.num_computed for sequence in self.running)
        return waiting + sum(count for count in lacking if count > 1)

    def schedule(self, now: Seconds) -> StepPlan:
        """The next step; empty if there is nothing to compute. Preempts if blocks are short."""
        plan = StepPlan()
        self.unsteered = 0
        if self.ready:
            self._resume()
        preemptions = self.counters.preemptions
        prefills = self._plan_decodes(plan)
        budget = min(self.limits.max_batch_tokens - len(plan.chunks), self.prefill_tokens)
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
        """Whose prompt was prefilled elsewhere runs as soon as there is a place."""
        count = self.limits.max_sequences - len(self.running)
        for sequence in self.ready[:count]:
            self._run(sequence)
        del self.ready[:count]

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
            elif self._is_unsteered(sequence):
                continue
            elif length <= len(sequence.blocks) * size or self._grow(sequence):
                chunks.append(Chunk(sequence, start, 1, not sequence.pools))
        return prefills

    def _is_unsteered(self, sequence: Sequence) -> bool:
        """Whether nobody can choose its next token yet."""
        if self.steerable is None or sequence.pools or self.steerable(sequence):
            return False
        self.unsteered += 1
        return True

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
        plan.chunks.append(Chunk(sequence, start, count, samples))
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

    @property
    def _room(self) -> int:
        """Grows whenever somebody may fit who did not before."""
        return self._pool.releases + self._loosened

    def _is_stuck(self) -> bool:
        """The first in the queue did not fit, and nothing has been released since."""
        if self._stuck is None:
            return False
        sequence, room = self._stuck
        return room == self._room and sequence is self.waiting.first()

    def _place(self, sequence: Sequence) -> bool:
        """Blocks for all its tokens: as many as possible from the cache, the rest fresh.

        At least one token stays to be computed, for its logits.
        """
        if self._lacks_room and self._is_behind(sequence):
            self._stuck = (sequence, self._room)
            return False
        pool = self._pool
        shared = self._reusable(sequence)
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
        return True

    @property
    def _spare(self) -> int:
        """Blocks that an admission leaves over: one for each that decodes, and what is promised."""
        return len(self.running) + len(self.ready) + self.promises.unbound

    def _reusable(self, sequence: Sequence) -> list[int]:
        """What the prefix cache has of it; at least one token stays to be computed."""
        if self._names is None or not self._submissions[sequence.handle].reads_cache:
            return []
        reusable = (len(sequence.tokens) - 1) // self._pool.block_size
        return self._pool.match(self._names.of(sequence, reusable)[:reusable])

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
        self._begin(submission)
        if sequence.first_step is None:
            sequence.first_step = now
            sequence.cached_tokens = min(sequence.num_computed, sequence.prompt_len)
            if submission.counted:
                self.counters.prompt_tokens += sequence.prompt_len
                self.counters.cached_tokens += sequence.cached_tokens

    def _begin(self, submission: Submission) -> None:
        if not submission.started:
            submission.started = True
            self._unstarted -= 1

    def _run(self, sequence: Sequence) -> None:
        sequence.status = Status.RUNNING
        insort(self.running, sequence, key=_precedence)

    # ------------------------------------------------------------------ prompts prefilled elsewhere

    def submit_remote(self, handle: int, request: GenerateRequest, now: Seconds) -> None:
        """Like `submit`, but nothing is computed: it waits for `promise`, then for `activate`.

        Raises besides `InvalidRequest` for what can only be computed here.
        """
        choices = self._build(handle, request, now)
        if request.diverged:
            raise InvalidRequest("several choices with given outputs are prefilled here only")
        if request.pooling:
            raise InvalidRequest("vectors are computed here only")
        if ending(choices[0]) is not None:
            raise InvalidRequest("the given output is complete: nothing is left to be prefilled")
        submission = Submission(handle, request, None, choices, remote=Remote())
        self.promises.waiting.push(self._enter(submission, now))

    def remote(self, handle: int) -> Remote | None:
        """Of a submission whose prompt is still to come from elsewhere."""
        submission = self._submissions.get(handle)
        return None if submission is None else submission.remote

    def stem_of(self, handle: int) -> Sequence:
        """The first live choice of a submission."""
        return self._submissions[handle].live[0]

    @property
    def may_promise(self) -> bool:
        """Whether `promise` may get further than it did."""
        stem = self.promises.first()
        return stem is not None and self._held != (stem, self._room)

    def promise(self) -> list[tuple[int, int]]:
        """Set room aside, in order, for those who fit: handle, and tokens that are cached now."""
        made: list[tuple[int, int]] = []
        while self.may_promise:
            stem = self.promises.waiting.first()
            shared = self._reusable(stem)
            if not self._set_aside(stem, shared):
                self._held = (stem, self._room)
                break
            remote = self._submissions[stem.handle].remote
            assert remote is not None
            remote.admitted = True
            made.append((stem.handle, len(shared) * self._pool.block_size))
        return made

    def _set_aside(self, stem: Sequence, shared: list[int]) -> bool:
        """Of the promise's blocks, those that are cached count as available until it is bound."""
        self._lacks_room = False
        pool = self._pool
        need = self._blocks_for(len(stem.tokens)) - len(shared)
        if self._is_overtaking(stem) or not self.promises.allows(need):
            return False
        waking = sum(not pool.references(block) for block in shared)
        need += min(len(stem.forks), pool.num_blocks - need - waking)
        if need + waking + self._spare > pool.available:
            self._lacks_room = True
            return False
        self.promises.give(stem, need)
        return True

    def _is_overtaking(self, stem: Sequence) -> bool:
        """Somebody who waits for blocks is before it."""
        if self._stuck is None or not len(self.waiting):
            return False
        first = self.waiting.first()
        return first is self._stuck[0] and first.order < stem.order

    def _is_behind(self, sequence: Sequence) -> bool:
        stem = self.promises.first()
        return stem is not None and stem.order < sequence.order

    def bind(self, handle: int) -> tuple[list[int], list[int]] | None:
        """Blocks for all tokens of a promised sequence: (from the prefix cache, fresh), the
        caller's. None if there are too few now."""
        stem = self.stem_of(handle)
        shared = self._reusable(stem)
        fresh = self._pool.reserve(self._blocks_for(len(stem.tokens)) - len(shared), shared=shared)
        if fresh is None:
            self.promises.lacking.add(handle)
            return None
        self.promises.bind(handle)
        return shared, fresh

    def unbind(self, handle: int) -> None:
        """The caller has given back what `bind` gave: room is set aside again."""
        self.promises.unbind(handle)

    def prefill_here(self, handle: int) -> None:
        """It waits to be computed, at its arrival's place."""
        stem = self._fulfil(self._submissions[handle])
        self.waiting.push(stem)

    def _fulfil(self, submission: Submission) -> Sequence:
        stem = submission.live[0]
        self.promises.end(stem)
        self._loosened += 1
        submission.remote = None
        return stem

    def activate(
        self, handle: int, shared: list[int], fresh: list[int], handoff: Handoff, now: Seconds
    ) -> list[TokenDelta]:
        """A peer has filled the blocks of `bind`, which are now the sequence's: go on from there.
        Returns the deltas of the first tokens."""
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
        """All its tokens are in its blocks, none of which may have a name yet."""
        stem.num_computed = len(stem.tokens)
        stem.num_committed = 0
        if self._names is not None:
            self._commit(stem)
        self._set_ready(stem)

    def _set_ready(self, sequence: Sequence) -> None:
        sequence.status = Status.READY
        insort(self.ready, sequence, key=_precedence)

    def _append_first(
        self, sequence: Sequence, first: FirstToken, started: Started, now: Seconds
    ) -> TokenDelta:
        """A choice without blocks of its own waits for some, and computes its prompt anew."""
        sequence.first_step = max(sequence.arrival, now - started.prefill_seconds)
        sequence.work = started.work_seconds
        delta = self._append(sequence, iter([(first.token, first.logprob)]), now)
        if sequence.status is Status.WAITING:
            self.waiting.push(sequence)
        return delta

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
        uncounted = self._uncounted_in(plan) if self._uncounted else 0
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
        self.counters.output_tokens += len(deltas) - uncounted
        for index, vector in result.embeddings.items():
            deltas.append(self._pool_end(plan.chunks[index].sequence, vector, now))
        return deltas

    def _pool_end(self, sequence: Sequence, vector: bytes, now: Seconds) -> TokenDelta:
        """It has become a vector: the prompt was all there was to compute."""
        sequence.first_token = now
        started = started_record(sequence)
        finish = self._end(sequence, now, vector)
        return TokenDelta(sequence.handle, sequence.choice, [], finish, started=started)

    def _uncounted_in(self, plan: StepPlan) -> int:
        """Tokens of the plan that no counter is to show."""
        sampling = [chunk.sequence.handle for chunk in plan.chunks if chunk.samples]
        return sum(not self._submissions[handle].counted for handle in sampling)

    def fail(self, plan: StepPlan) -> list[int]:
        """The step could not be computed: drop every submission in it; returns their handles."""
        copying = [handle for _, handle in self._copying]
        self._release_copy_sources()
        handles = dict.fromkeys(chunk.sequence.handle for chunk in plan.chunks)
        handles.update((handle, None) for handle in copying if handle in self._submissions)
        for handle in handles:
            self._drop(self._submissions[handle])
        return list(handles)

    def spoil(self, handle: int) -> None:
        """What was computed for a submission is wrong: drop it, and what nobody else uses of it."""
        submission = self._submissions[handle]
        for sequence in submission.live:
            self._pool.disown(sequence.blocks)
        self._drop(submission)

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

    def _end(self, sequence: Sequence, now: Seconds, vector: bytes = b"") -> Finish:
        end = ("stop", None) if vector else ending(sequence)
        assert end is not None
        self._take_out(sequence)
        submission = self._submissions[sequence.handle]
        submission.live.remove(sequence)
        if not submission.live:
            self._forget(submission)
            self.counters.finished += submission.counted
        return finish_record(sequence, *end, now, vector)

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
        if not running or self._forked or self.may_promise:
            return 0
        if self.ready and len(running) < self.limits.max_sequences:
            return 0
        open_door = len(self.waiting) > 0 and len(running) < self.limits.max_sequences
        if open_door and not self._is_stuck():
            return 0
        hungry = open_door or len(self.promises.waiting) > 0 or bool(self.promises.lacking)
        steps = limit
        for sequence in running:
            length = len(sequence.tokens)
            if length - sequence.num_computed != 1 or sequence.first_token is None:
                return 0
            steps = min(steps, sequence.max_len - length)
            if hungry:  # a commit may free a block, and so unstick the queue
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
        """The prefix cache has some of its given output, too: more than it could share."""
        if not child.num_output:
            return False
        return len(self._reusable(child)) > (child.prompt_len - 1) // self._pool.block_size

    def _share(self, stem: Sequence, child: Sequence, computed: int | None = None) -> bool:
        """Reference the stem's blocks before the one in which the child goes on, which is copied if
        anything is in it.

        Of the prompt, `computed` tokens are taken over; as a rule the last one is computed again,
        for logits of the child's own.
        """
        pool = self._pool
        if computed is None:
            computed = stem.prompt_len - 1
        index, offset = divmod(computed, pool.block_size)
        shared = stem.blocks[:index]
        fresh = pool.reserve(self._blocks_for(len(child.tokens)) - index, shared=shared)
        if fresh is None:
            return False
        child.blocks = shared + fresh
        child.hashes = stem.hashes[:index]
        self._set_computed(child, index)
        child.num_computed = computed
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
        if not self.keeps(sequence):
            self._pool.release(sequence.blocks)
        sequence.blocks = []
        self._released.append(sequence)

    def _release_copy_sources(self) -> None:
        for source, _ in self._copying:
            self._pool.release((source,))
        self._copying.clear()

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._pool.block_size)


def _precedence(sequence: Sequence) -> tuple[int, int, int]:
    return sequence.order

"""Holds the state of a scheduler's sequences and the operations on a single one: submission,
blocks, tokens, end.

It does not decide which sequence is next. Three parts act on it: `scheduler` plans steps,
`remote_admission` takes in prompts that other workers prefill, and `fast_forward` skips steps that
only decode.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdserve.blocks.hashing import salt_owner
from pdserve.engine_core.kit import RequestDeadlines, check_request
from pdserve.engine_core.scheduler.queues import WaitingQueue
from pdserve.engine_core.scheduler.reservations import BlockReservations
from pdserve.engine_core.scheduler.sequence import Sequence, SequenceStatus
from pdserve.engine_core.scheduler.submission import (
    Submission,
    build_sequences,
    end_reason,
    finish_record,
    first_token_stats,
)
from pdserve.errors import ConfigError, ContextLengthExceeded, InvalidRequest, Overloaded
from pdserve.messages.request import (
    Finish,
    FirstTokenStats,
    GenerateRequest,
    TokenDelta,
    TokenLogprob,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pdserve.engine_core.scheduler.block_hasher import BlockHasher
    from pdserve.engine_core.scheduler.step_holds import StepHolds
    from pdserve.engine_core.tiers.onboarder import Onboarder
    from pdserve.ids import Seconds
    from pdserve.kv.block_pool import BlockPool

__all__ = ["Counters", "SchedulerLimits", "SchedulerState", "precedence"]


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Bounds of one scheduler; `EngineSpec` and the loaded model supply them."""

    max_model_len: int
    """Most tokens of a sequence, prompt and output together."""
    vocab_size: int
    max_batch_tokens: int = 2048
    """Most tokens of a step; at least `max_sequences`, so that every running sequence gets one."""
    max_sequences: int = 256
    """Most sequences running at once."""
    max_waiting: int = 4096
    """Most submissions of which nothing has been computed yet; one more is `Overloaded`."""
    unfilled: float = 0.3
    """Most of the pool, as a share, that is reserved for prompts that other workers prefill."""
    embeds: bool = False
    """Whether the executor makes embeddings."""
    classifies: bool = False
    """Whether the model has a classification head."""
    generates: bool = True
    """Whether the executor makes text."""

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
    """Counts since the start; the meanings are those of `EngineStats`."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    received_tokens: int = 0
    computed_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    aborted: int = 0
    finished: int = 0


class SchedulerState:
    """State of one scheduler over one pool; `Scheduler` is what an engine core owns."""

    def __init__(
        self, pool: BlockPool, limits: SchedulerLimits, names: BlockHasher | None = None
    ) -> None:
        """`names` None: no prefix cache, blocks get no hashes."""
        self.limits = limits
        self.counters = Counters()
        self.running: list[Sequence] = []
        """The running batch, by precedence: the last one is preempted first."""
        self.ready: list[Sequence] = []
        """Sequences with blocks that a peer has filled but without a place in the batch, by
        precedence."""
        self.waiting = WaitingQueue()
        self.reservations = BlockReservations(int(limits.unfilled * pool.num_blocks))
        self._pool = pool
        self._names = names
        self._submissions: dict[int, Submission] = {}
        self._deadlines = RequestDeadlines()
        self._arrivals = 0
        self._planning: Seconds = 0.0
        """When the present step was planned."""
        self._unstarted = 0
        self._uncounted = 0
        """Number of submissions that do not count in the stats."""
        self._forked: list[Sequence] = []
        self._released: list[Sequence] = []
        self.keeps: Callable[[Sequence], bool] = lambda sequence: False
        self.sends: Callable[[Sequence], bool] = lambda sequence: False
        """Whether parts of a sequence are under way, so that a preemption frees no blocks. `keeps`
        is called for each sequence that leaves; if it returns True, the callee holds the blocks
        from then on."""
        self._loosened = 0
        """Grows when a sequence may fit although no block was released."""
        self._stuck: tuple[Sequence, int] | None = None
        """The waiting sequence that did not fit, and `_room` at that moment."""
        self._held: tuple[Sequence, int] | None = None
        """The sequence whose reservation did not fit, and `_room` at that moment."""
        self._lacks_room = False
        """Whether that reservation waits for blocks: then no later sequence overtakes it."""
        self.onboarder: Onboarder | None = None
        """Brings blocks from lower tiers and other workers; None: there are none."""
        self.steerable: Callable[[Sequence], bool] | None = None
        """Asked before a chunk would sample a sequence's next token; until it returns True, that
        sequence is computed up to its last token only. None: never asked."""
        self._in_flight: StepHolds | None = None
        """What the last step on the device still uses; None: no step is under way."""
        self.left: Callable[[Sequence], None] | None = None
        """Called for each sequence that gives back its blocks, before it does."""

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self._pool.block_size

    @property
    def names(self) -> BlockHasher | None:
        """What hashes the blocks; None: nothing does."""
        return self._names

    # ------------------------------------------------------------------ a submission's life

    def _build(self, handle: int, request: GenerateRequest, now: Seconds) -> list[Sequence]:
        limits = self.limits
        if not (limits.generates or request.pooling):
            raise InvalidRequest(
                "this model has no output layer: it makes embeddings (/v1/embeddings), not text",
                param="model",
            )
        check_request(
            request,
            max_model_len=limits.max_model_len,
            vocab_size=limits.vocab_size,
            embeds=limits.embeds,
        )
        if request.classify and not (limits.classifies and request.pooling == "last"):
            raise InvalidRequest("this model has no classification head", param="model")
        if self._unstarted >= limits.max_waiting:
            raise Overloaded(
                f"{self._unstarted} requests are waiting for the engine", retry_after=1.0
            )
        choices = build_sequences(handle, request, now, self._arrivals, limits.max_model_len)
        self._check_fits(choices[0])
        self._arrivals += 1
        return choices

    def _check_fits(self, sequence: Sequence) -> None:
        """Check that the pool can hold the sequence. Its last token is never computed and needs no
        room."""
        need = self._blocks_for(max(sequence.prompt_len, sequence.max_len - 1))
        if need > self._pool.num_blocks:
            raise ContextLengthExceeded(
                f"prompt and output need {need} KV blocks of {self._pool.block_size} tokens, the "
                f"engine has {self._pool.num_blocks}",
                param="max_tokens",
            )

    def _enter(self, submission: Submission, now: Seconds) -> Sequence:
        """Register a submission; returns its stem."""
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

    def owner_mark(self, cache_salt: str) -> bytes:
        """A name for all blocks of the owner of a cache salt; empty without a prefix cache."""
        return b"" if self._names is None else self._names.owner_mark(salt_owner(cache_salt))

    def _name(self, submission: Submission, names: BlockHasher) -> None:
        """Start the hash chains of a submission's choices."""
        request = submission.request
        root = names.root(request.cache_salt, request.lora)
        given = names.given(request, root)
        for sequence in submission.live:
            sequence.root = root
            sequence.hashes = given.copy()
            sequence.num_committed = 0
            sequence.commit_at = self._pool.block_size

    def _begin(self, submission: Submission) -> None:
        if not submission.started:
            submission.started = True
            self._unstarted -= 1

    def _take_out(self, sequence: Sequence) -> None:
        """Remove a sequence for good, in any state."""
        match sequence.status:
            case SequenceStatus.RUNNING:
                self.running.remove(sequence)
                self._leave(sequence)
            case SequenceStatus.READY:
                self.ready.remove(sequence)
                self._leave(sequence)
            case SequenceStatus.ONBOARDING:
                assert self.onboarder is not None
                self.onboarder.cancel(sequence, self._planning)
            case _:
                sequence.early = None
                self.waiting.discard(sequence)
                self._loosened += 1
        sequence.status = SequenceStatus.FINISHED

    def _forget(self, submission: Submission) -> None:
        del self._submissions[submission.handle]
        if submission.deadline is not None:
            self._deadlines.discard(submission.deadline, submission.handle)
        if not submission.started:
            self._unstarted -= 1
        self._uncounted -= not submission.counted

    # ------------------------------------------------------------------ free capacity

    @property
    def _room(self) -> int:
        """Grows whenever a sequence may fit that did not fit before."""
        return self._pool.releases + self._loosened

    def _is_stuck(self) -> bool:
        """Whether the first waiting sequence did not fit, and nothing has been released since."""
        if self._stuck is None:
            return False
        sequence, room = self._stuck
        return room == self._room and sequence is self.waiting.first()

    @property
    def may_reserve(self) -> bool:
        """Return whether `reserve` may make a reservation now."""
        stem = self.reservations.first()
        return stem is not None and self._held != (stem, self._room)

    @property
    def _spare(self) -> int:
        """Blocks that an admission must leave free: one per decoding sequence, and the reserved
        ones."""
        return len(self.running) + len(self.ready) + self.reservations.unbound

    # ------------------------------------------------------------------ blocks

    def _reusable(self, sequence: Sequence) -> list[int]:
        """The sequence's blocks in the prefix cache; at least one token stays to be computed."""
        return self._pool.match(self._reusable_hashes(sequence))

    def _reusable_hashes(self, sequence: Sequence) -> list[bytes]:
        """Hashes of the blocks that the sequence may reuse if they are anywhere."""
        if self._names is None or not self._submissions[sequence.handle].reads_cache:
            return []
        reusable = (len(sequence.tokens) - 1) // self._pool.block_size
        return self._names.of(sequence, reusable)[:reusable]

    def _set_computed(self, sequence: Sequence, blocks: int) -> None:
        """The first `blocks` blocks are computed and committed."""
        size = self._pool.block_size
        sequence.num_computed = blocks * size
        sequence.num_committed = blocks
        if self._names is not None:
            sequence.commit_at = (blocks + 1) * size

    def _grow(self, sequence: Sequence) -> bool:
        """Reserve one more block, preempting if need be; False if `sequence` itself was
        preempted."""
        while (fresh := self._pool.reserve(1)) is None:
            victim = self._victim(sequence)
            self._preempt(victim)
            if victim is sequence:
                return False
        sequence.blocks += fresh
        return True

    def _victim(self, hungry: Sequence) -> Sequence:
        """Choose the sequence to preempt: the last one behind `hungry` whose blocks are freed at
        once, or else the last one."""
        running = self.running
        last = len(running) - 1
        behind = range(last, running.index(hungry), -1)
        return running.pop(next((i for i in behind if not self.sends(running[i])), last))

    def _preempt(self, sequence: Sequence) -> None:
        """Return a sequence to the queue with its tokens; its KV may survive in the prefix
        cache."""
        sequence.borrowed = range(0)  # it comes back for them
        self._leave(sequence)
        sequence.status = SequenceStatus.WAITING
        self._set_computed(sequence, 0)
        sequence.fetched = False
        sequence.preemptions += 1
        if sequence.request.trace:
            sequence.preempted_at = self._planning
        self.counters.preemptions += 1
        self.waiting.push(sequence)

    def _share(self, stem: Sequence, child: Sequence, computed: int | None = None) -> bool:
        """Reference the stem's blocks before the one in which the child goes on, which is copied if
        it is partly filled.

        The child takes over the KV of `computed` prompt tokens. By default the last prompt token is
        computed again, for logits of the child's own.
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

    def _commit(self, sequence: Sequence) -> None:
        """Commit the blocks that have become full to the pool, with their hashes."""
        assert self._names is not None
        full = sequence.num_computed // self._pool.block_size
        hashes = self._names.of(sequence, full)
        first = sequence.num_committed
        parent = hashes[first - 1] if first else sequence.root
        blocks = sequence.blocks[first:full]
        if self._in_flight is not None and sequence in self._in_flight:
            self._hold_twins(self._in_flight, sequence, blocks, hashes[first:full])
        # Another holder of a shared block may have committed it first, so it may have its hash.
        sequence.blocks[first:full] = self._pool.commit_run(blocks, hashes[first:full], parent)
        sequence.num_committed = full
        sequence.commit_at = (full + 1) * self._pool.block_size

    def _hold_twins(
        self, step: StepHolds, sequence: Sequence, blocks: list[int], hashes: list[bytes]
    ) -> None:
        """Hold the blocks that a commit replaces by others of the same content: the step under way
        reads them."""
        pool = self._pool
        replaced = [
            block
            for block, name in zip(blocks, hashes, strict=True)
            if pool.name(block) is None and name in pool
        ]
        if replaced:
            pool.acquire(replaced)
            step.hold(sequence, replaced, [])

    def _leave(self, sequence: Sequence) -> None:
        """Give back everything a running sequence holds.

        A copy's source goes first: it follows the blocks that the sequence shares with it.
        """
        if self.left is not None:
            self.left(sequence)
        if sequence.copy_from is not None:
            self._pool.release((sequence.copy_from,))
            sequence.copy_from = None
        if not self.keeps(sequence):
            kept = sequence.kept_blocks
            self._give_back(sequence, sequence.blocks[:kept], sequence.blocks[kept:])
        sequence.blocks = []
        sequence.early = None
        self._released.append(sequence)

    def _give_back(self, sequence: Sequence, kept: list[int], others: list[int]) -> None:
        """Release blocks, or leave them to the step that still uses them. `others`: those behind
        that are not worth keeping in the cache."""
        if self._in_flight is not None and sequence in self._in_flight:
            self._in_flight.hold(sequence, kept, others)
            return
        if others:
            self._pool.release_early(others)
        self._pool.release(kept)

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._pool.block_size)

    # ------------------------------------------------------------------ running sequences

    def _run(self, sequence: Sequence) -> None:
        sequence.status = SequenceStatus.RUNNING
        insort(self.running, sequence, key=precedence)

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
        started: FirstTokenStats | None = None
        if sequence.first_token is None:
            sequence.first_token = now
            started = first_token_stats(sequence)
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
        end = ("stop", None) if vector else end_reason(sequence)
        assert end is not None
        self._take_out(sequence)
        submission = self._submissions[sequence.handle]
        submission.live.remove(sequence)
        if not submission.live:
            self._forget(submission)
            self.counters.finished += submission.counted
        return finish_record(sequence, *end, now, vector)


def precedence(sequence: Sequence) -> tuple[int, int, int]:
    """The sort key of all lists of sequences."""
    return sequence.order

"""The instant core: each stream's tokens are known in advance, so a step only says which are due.

It honours lengths, stop ids, end-of-sequence ids, `min_tokens`, several choices, output given by an
earlier attempt, aborts and deadlines. Output token k of every choice is entry k of one cycle of
ordinary words. Logprobs are made up: -0.25 for the token, one less for each alternative, which are
the next tokens of the cycle. Sampling parameters change nothing, there is no KV and no queue.

Unpaced, streams advance together and a step fills one frame with some hundreds of deltas of one
token each. Paced (`tokens_per_second`, `ttft_ms`), every token of every stream has a due time of
its own, and a step takes what is due; streams are staggered, so that tokens become due singly.
A core that falls behind catches up: no token is dropped, the times shift.

The host owns it, like any `Core`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, heapreplace
from typing import TYPE_CHECKING

from pdserve.engine.core import STATS_INTERVAL
from pdserve.engine.queues import Deadlines
from pdserve.engine.rejection import rejected
from pdserve.engine.submission import check_request
from pdserve.errors import DeadlineExceeded, Overloaded, PdserveError
from pdserve.messages.engine import (
    Abort,
    ClearCache,
    Command,
    EngineCapabilities,
    EngineSpec,
    EngineStats,
    Event,
    Progress,
    QueryStats,
    Rekey,
    Stats,
    Step,
    Submit,
)
from pdserve.messages.request import (
    Finish,
    FinishReason,
    GenerateRequest,
    SamplingParams,
    Started,
    TokenDelta,
    TokenLogprob,
)
from pdserve_engines.instant.settings import Vocabulary, parse_options, read_vocabulary

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.clock import Clock
    from pdserve.ids import Seconds

__all__ = ["InstantCore"]

_BATCH = 512
"""Deltas of an unpaced step: enough to make the cost of a frame small against its content."""

_BATCH_DUE = 8 * _BATCH
"""Deltas of a paced step at most: a core that has fallen behind catches up in such portions."""

_WORK = 1e-6
"""Seconds that a prompt costs: next to nothing, which routers are to learn like anything else."""

_GOLDEN = 0.6180339887498949
"""Multiples of it, modulo 1, spread evenly however many there are."""


@dataclass(slots=True, eq=False)
class _Stream:
    """One choice."""

    handle: int
    choice: int
    position: int
    """Output tokens so far."""
    end: int
    """Output tokens at its end."""
    reason: FinishReason
    stop_reason: int | None
    request: GenerateRequest
    submitted: Seconds
    started: Seconds | None = None
    plain: bool = False
    """Its next token comes with nothing else: not the first one, no logprobs."""
    dead: bool = False
    """Ended or aborted; still in a queue until its turn."""


@dataclass(slots=True, eq=False)
class _Submission:
    deadline: Seconds | None
    streams: list[_Stream]
    """That have not ended."""


class InstantCore:
    """A `Core` that computes nothing."""

    def __init__(self, clock: Clock) -> None:
        self.on_freed: Callable[[int, str], None] = lambda handle, phase: None
        """See `engine.core.EngineCore`."""
        self._clock = clock
        self._events: list[Event] = []
        self._deltas: list[TokenDelta] = []
        self._submissions: dict[int, _Submission] = {}
        self._deadlines = Deadlines()
        self._ready: deque[_Stream] = deque()
        """Unpaced streams, in turn."""
        self._due: list[tuple[Seconds, int, _Stream]] = []
        """Heap of paced streams, and of all before their first token; the number breaks ties."""
        self._number = 0
        self._live = 0
        self._dead = 0
        self._steps = 0
        self._prompt_tokens = 0
        self._output_tokens = 0
        self._finished = 0
        self._aborted = 0
        self._stats_at: Seconds = clock.now()
        self._changed = False

    def sibling(self) -> InstantCore:
        """See `engine.executor.Sharing`; there are no weights to share."""
        return InstantCore(self._clock)

    # ------------------------------------------------------------------ loading

    def load(self, spec: EngineSpec, progress: Callable[[Progress], None]) -> EngineCapabilities:
        """Read `config.json` and `tokenizer.json`."""
        progress(Progress(stage="reading the tokenizer"))
        self._options = parse_options(spec.options)
        self._vocabulary = read_vocabulary(spec, self._options)
        self._max_streams = spec.max_sequences + spec.max_waiting
        self._period = 1 / rate if (rate := self._options.tokens_per_second) else 0.0
        self._cycle = self._vocabulary.tokens
        self._singles = [[token] for token in self._cycle]
        return _capabilities(spec, self._vocabulary)

    # ------------------------------------------------------------------ commands

    def handle(self, command: Command) -> None:
        """Submissions that cannot be taken end with a `Rejected` event."""
        match command:
            case Submit():
                try:
                    self._submit(command.handle, command.request)
                except PdserveError as error:
                    self._events.append(rejected(command.handle, error))
            case Abort():
                self._abort(command.handle)
            case QueryStats():
                self._events.append(Stats(stats=self.statistics()))
            case ClearCache() | Rekey():
                pass
            case _:
                raise ValueError(f"{type(command).__name__} is for the host")

    def _submit(self, handle: int, request: GenerateRequest) -> None:
        vocabulary = self._vocabulary
        check_request(
            request, max_model_len=vocabulary.max_model_len, vocab_size=vocabulary.vocab_size
        )
        live = request.live
        if self._live + len(live) > self._max_streams:
            raise Overloaded(f"{self._live} streams are running", retry_after=1.0)
        now = self._clock.now()
        streams = [self._stream(handle, choice, request, now) for choice in live]
        submission = self._submissions[handle] = _Submission(None, list(streams))
        if request.deadline is not None:
            submission.deadline = now + request.deadline
            self._deadlines.add(submission.deadline, handle)
        self._prompt_tokens += len(request.prompt)
        self._live += len(streams)
        self._changed = True
        for stream in streams:
            if stream.position >= stream.end:
                self._deltas.append(
                    TokenDelta(handle, stream.choice, [], self._finish(stream, now))
                )
            else:
                self._enqueue(stream, now)

    def _stream(self, handle: int, choice: int, request: GenerateRequest, now: Seconds) -> _Stream:
        given = request.output[choice] if request.output else []
        room = self._vocabulary.max_model_len - len(request.prompt)
        end, reason, stop_reason = _plan_end(request.sampling, given, self._cycle, room)
        return _Stream(handle, choice, len(given), end, reason, stop_reason, request, now)

    def _enqueue(self, stream: _Stream, now: Seconds) -> None:
        options = self._options
        if not (self._period or options.ttft):
            self._ready.append(stream)
            return
        self._number += 1
        stagger = (self._number * _GOLDEN) % 1.0 * self._period
        heappush(self._due, (now + options.ttft + stagger, self._number, stream))

    def _abort(self, handle: int) -> None:
        submission = self._submissions.get(handle)
        begun = submission is not None and any(s.started is not None for s in submission.streams)
        phase = "decoding" if begun else "queued"
        self._drop(handle)
        self.on_freed(handle, "" if submission is None else phase)

    def _drop(self, handle: int) -> None:
        submission = self._submissions.get(handle)
        if submission is None:
            return
        for stream in submission.streams:
            stream.dead = True
        self._dead += len(submission.streams)
        self._live -= len(submission.streams)
        self._aborted += 1
        self._forget(handle, submission)
        if self._dead > self._live + _BATCH:
            self._sweep()

    def _sweep(self) -> None:
        """Dead streams leave the queues at their turn; sooner if they are the majority."""
        self._ready = deque(stream for stream in self._ready if not stream.dead)
        self._due = [entry for entry in self._due if not entry[2].dead]
        heapify(self._due)
        self._dead = 0

    def _forget(self, handle: int, submission: _Submission) -> None:
        del self._submissions[handle]
        if submission.deadline is not None:
            self._deadlines.discard(submission.deadline, handle)
        self._changed = True

    # ------------------------------------------------------------------ steps

    @property
    def has_work(self) -> bool:
        """Unpaced streams run, or something waits to be said."""
        return bool(self._ready or self._events or self._deltas)

    def wake_at(self) -> Seconds | None:
        """The next due token or deadline."""
        deadline = self._deadlines.next()
        if not self._due:
            return deadline
        due = self._due[0][0]
        return due if deadline is None else min(due, deadline)

    def step(self) -> list[Event]:
        """What is due now, as one `Step`."""
        now = self._clock.now()
        deadline = self._deadlines.next()
        if deadline is not None and deadline <= now:
            self._expire(now)
        if self._due:
            self._advance_due(now)
        if self._ready:
            self._advance_ready(now)
        if self._deltas:
            self._steps += 1
            self._events.append(Step(deltas=self._deltas))
            self._deltas = []
            self._changed = True
        if self._changed and (not self._live or now - self._stats_at >= STATS_INTERVAL):
            self._stats_at, self._changed = now, False
            self._events.append(Stats(stats=self.statistics()))
        events, self._events = self._events, []
        return events

    def _expire(self, now: Seconds) -> None:
        for handle in self._deadlines.passed(now):
            produced = sum(stream.position for stream in self._submissions[handle].streams)
            stage = f"decoding, {produced} tokens done" if produced else "waiting for its turn"
            self._drop(handle)
            error = DeadlineExceeded(f"the deadline passed while {stage}")
            self._events.append(rejected(handle, error))

    def _advance_ready(self, now: Seconds) -> None:
        ready = self._ready
        for _ in range(max(_BATCH, len(ready))):
            if not ready:
                return
            stream = ready.popleft()
            if stream.dead:
                self._dead -= 1
            elif self._emit(stream, now):
                ready.append(stream)

    def _advance_due(self, now: Seconds) -> None:
        queue, period = self._due, self._period
        for _ in range(_BATCH_DUE):
            if not queue or (entry := queue[0])[0] > now:
                return
            due, number, stream = entry
            if stream.dead:
                heappop(queue)
                self._dead -= 1
            elif not period:
                heappop(queue)
                self._ready.append(stream)
            elif self._emit(stream, now):
                heapreplace(queue, (due + period, number, stream))
            else:
                heappop(queue)

    def _emit(self, stream: _Stream, now: Seconds) -> bool:
        """One token; True if more will follow."""
        position = stream.position
        stream.position = position + 1
        self._output_tokens += 1
        more = position + 1 < stream.end
        if more and stream.plain:
            tokens = self._singles[position % len(self._singles)]
            self._deltas.append(TokenDelta(stream.handle, stream.choice, tokens))
            return True
        self._deltas.append(self._full_delta(stream, position, now, more))
        return more

    def _full_delta(self, stream: _Stream, position: int, now: Seconds, more: bool) -> TokenDelta:
        """A delta with whatever the first, the last or a logged token carries besides."""
        sampling = stream.request.sampling
        prompt_logprobs = started = None
        if stream.started is None:
            stream.started = now
            started = Started(0, 0.0, now - stream.submitted, _WORK)
            stream.plain = sampling.logprobs is None
            if sampling.prompt_logprobs is not None:
                top = sampling.prompt_logprobs
                prompt_logprobs = [self._logprob(t, 0, top) for t in stream.request.prompt[1:]]
        token = self._cycle[position % len(self._cycle)]
        logprobs = None
        if sampling.logprobs is not None:
            logprobs = [self._logprob(token, position, sampling.logprobs)]
        finish = None if more else self._finish(stream, now)
        return TokenDelta(
            stream.handle, stream.choice, [token], finish, logprobs, prompt_logprobs, started
        )

    def _logprob(self, token: int, position: int, top: int) -> TokenLogprob:
        """Made up; `top` alternatives, the token itself first."""
        cycle = self._cycle
        others = [cycle[(position + i) % len(cycle)] for i in range(1, top)]
        ranked = [token, *others][:top]
        return TokenLogprob(token, -0.25, 1, [(t, -0.25 - i) for i, t in enumerate(ranked)])

    def _finish(self, stream: _Stream, now: Seconds) -> Finish:
        self._live -= 1
        submission = self._submissions[stream.handle]
        submission.streams.remove(stream)
        if not submission.streams:
            self._forget(stream.handle, submission)
            self._finished += 1
        started = now if stream.started is None else stream.started
        return Finish(
            reason=stream.reason,
            stop_reason=stream.stop_reason,
            prompt_tokens=len(stream.request.prompt),
            completion_tokens=stream.position,
            prefill_seconds=started - stream.submitted,
        )

    # ------------------------------------------------------------------ reading and ending

    def statistics(self) -> EngineStats:
        """There are no blocks."""
        return EngineStats(
            running=self._live,
            steps=self._steps,
            prompt_tokens=self._prompt_tokens,
            output_tokens=self._output_tokens,
            aborted=self._aborted,
            finished=self._finished,
        )

    def close(self) -> int:
        """Nothing is held."""
        for handle in list(self._submissions):
            self._drop(handle)
        self._sweep()
        return 0


def _plan_end(
    sampling: SamplingParams, given: list[int], cycle: tuple[int, ...], room: int
) -> tuple[int, FinishReason, int | None]:
    """(output tokens at the end, reason, stop token id): tokens repeat, so one round tells."""
    limit = min(sampling.max_tokens, room)
    eos = () if sampling.ignore_eos else sampling.eos_token_ids
    first = max(len(given) - 1, 0)
    for position in range(first, min(limit, max(first, sampling.min_tokens) + len(cycle) + 1)):
        token = given[position] if position < len(given) else cycle[position % len(cycle)]
        if position < sampling.min_tokens:
            continue
        if token in eos:
            return position + 1, "stop", None
        if token in sampling.stop_token_ids:
            return position + 1, "stop", token
    return max(limit, len(given)), "length", None


def _capabilities(spec: EngineSpec, vocabulary: Vocabulary) -> EngineCapabilities:
    return EngineCapabilities(
        engine=spec.engine,
        model_type=vocabulary.model_type,
        dtype="none",
        device="none",
        max_model_len=vocabulary.max_model_len,
        vocab_size=vocabulary.vocab_size,
        block_size=spec.block_size,
        num_blocks=0,
        block_bytes=0,
        max_batch_tokens=spec.max_batch_tokens,
        max_sequences=spec.max_sequences,
        kv_events=False,
        eos_token_ids=vocabulary.eos_token_ids,
    )

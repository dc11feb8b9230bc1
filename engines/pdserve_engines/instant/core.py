"""Implements the instant core: all tokens are known in advance, and a step returns those due.

It honours lengths, stop ids, end-of-sequence ids, `min_tokens`, several choices, output given with
the request, aborts and deadlines. Output token k of every choice is entry k of a cycle of ordinary
words. Logprobs are made up: -0.25 for the token, one less for each alternative, which are the next
tokens of the cycle. Sampling parameters change nothing; there is no KV and no queue.

Unpaced, streams advance together, and a step fills one frame with some hundreds of deltas of one
token each. Paced (`tokens_per_second`, `ttft_ms`), every token of every stream has a due time of
its own, and a step returns what is due; streams are staggered, so that tokens become due singly. A
core that falls behind catches up: no token is dropped, the times shift.

The `CoreLoop` owns it, like any `Core`; the kit handles commands, deadlines and stats.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, heapreplace
from typing import TYPE_CHECKING

from pdserve.engine_core.kit import SelfSchedulingCore, capabilities_without_kv
from pdserve.errors import Overloaded
from pdserve.messages.engine import LoadProgress
from pdserve.messages.request import (
    Finish,
    FinishReason,
    FirstTokenStats,
    GenerateRequest,
    SamplingParams,
    TokenDelta,
    TokenLogprob,
)
from pdserve_engines.instant.settings import parse_options, read_vocabulary

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.clock import Clock
    from pdserve.ids import Seconds
    from pdserve.messages.engine import EngineCapabilities, EngineSpec

__all__ = ["InstantCore"]

_BATCH = 512
"""Deltas of an unpaced step: enough to make the cost of a frame small against its content."""

_BATCH_DUE = 8 * _BATCH
"""Most deltas of a paced step; a core that has fallen behind catches up in steps of this size."""

_WORK = 1e-6
"""Reported compute seconds of a prompt: nearly none, but routers learn it like any other."""

_GOLDEN = 0.6180339887498949
"""Its multiples modulo 1 are spread evenly, however many there are."""


@dataclass(slots=True, eq=False)
class _Stream:
    """Output of one choice."""

    handle: int
    choice: int
    position: int
    """Number of output tokens so far."""
    end: int
    """Number of output tokens at its end."""
    reason: FinishReason
    stop_reason: int | None
    request: GenerateRequest
    submitted: Seconds
    started: Seconds | None = None
    plain: bool = False
    """Whether the next delta carries only a token: it is not the first one and has no logprobs."""
    dead: bool = False
    """Aborted; the stream stays in its queue until its turn."""


class InstantCore(SelfSchedulingCore):
    """A core that computes nothing."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self._streams: dict[int, list[_Stream]] = {}
        """Handle -> streams that have not ended."""
        self._ready: deque[_Stream] = deque()
        """Unpaced streams, in the order of their turns."""
        self._due: list[tuple[Seconds, int, _Stream]] = []
        """Heap of paced streams, and of all streams before their first token; the number breaks
        ties."""
        self._number = 0
        self._dead = 0

    def sibling(self) -> InstantCore:
        """Return a core for another worker of this process; there are no weights to share."""
        return InstantCore(self.clock)

    def open(
        self, spec: EngineSpec, progress: Callable[[LoadProgress], None]
    ) -> EngineCapabilities:
        """Read `config.json` and `tokenizer.json`."""
        progress(LoadProgress(stage="reading the tokenizer"))
        self._options = parse_options(spec.options)
        vocabulary = read_vocabulary(spec, self._options)
        self._max_model_len = vocabulary.max_model_len
        self._max_streams = spec.max_sequences + spec.max_waiting
        self._period = 1 / rate if (rate := self._options.tokens_per_second) else 0.0
        self._cycle = vocabulary.tokens
        self._singles = [[token] for token in self._cycle]
        return capabilities_without_kv(spec, vocabulary.limits, prompt_logprobs=True)

    # ------------------------------------------------------------------ submissions

    def add(self, handle: int, request: GenerateRequest) -> None:
        """Start all choices at once. Raises `Overloaded` if there are too many streams."""
        if self.sequences > self._max_streams:
            running = self.sequences - len(request.live)
            raise Overloaded(f"{running} streams are running", retry_after=1.0)
        now = self.clock.now()
        streams = [self._stream(handle, choice, request, now) for choice in request.live]
        self._streams[handle] = list(streams)
        for stream in streams:
            if stream.position >= stream.end:
                self.deltas.append(TokenDelta(handle, stream.choice, [], self._finish(stream, now)))
            else:
                self._enqueue(stream, now)

    def _stream(self, handle: int, choice: int, request: GenerateRequest, now: Seconds) -> _Stream:
        given = request.output[choice] if request.output else []
        room = self._max_model_len - len(request.prompt)
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

    def drop(self, handle: int) -> None:
        """Mark the submission's streams; they leave their queue later."""
        streams = self._streams.pop(handle, [])
        for stream in streams:
            stream.dead = True
        self._dead += len(streams)
        if self._dead > self.sequences + _BATCH:
            self._sweep()

    def _sweep(self) -> None:
        """Remove the dead streams once they are the majority; otherwise each leaves at its turn."""
        self._ready = deque(stream for stream in self._ready if not stream.dead)
        self._due = [entry for entry in self._due if not entry[2].dead]
        heapify(self._due)
        self._dead = 0

    # ------------------------------------------------------------------ steps

    @property
    def busy(self) -> bool:
        """Return whether unpaced streams run."""
        return bool(self._ready)

    def next_due(self) -> Seconds | None:
        """Time at which the next paced token is due."""
        return self._due[0][0] if self._due else None

    def advance(self, now: Seconds) -> None:
        """Emit the tokens that are due now."""
        if self._due:
            self._advance_due(now)
        if self._ready:
            self._advance_ready(now)

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
        """Emit one token; True if more will follow."""
        position = stream.position
        stream.position = position + 1
        more = position + 1 < stream.end
        if more and stream.plain:
            tokens = self._singles[position % len(self._singles)]
            self.deltas.append(TokenDelta(stream.handle, stream.choice, tokens))
            return True
        self.deltas.append(self._full_delta(stream, position, now, more))
        return more

    def _full_delta(self, stream: _Stream, position: int, now: Seconds, more: bool) -> TokenDelta:
        """A delta with the records of a first or last token, and its logprobs."""
        sampling = stream.request.sampling
        prompt_logprobs = started = None
        if stream.started is None:
            stream.started = now
            started = FirstTokenStats(0, 0.0, now - stream.submitted, _WORK)
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
        """A made-up logprob with `top` alternatives, the token itself first."""
        cycle = self._cycle
        others = [cycle[(position + i) % len(cycle)] for i in range(1, top)]
        ranked = [token, *others][:top]
        return TokenLogprob(token, -0.25, 1, [(t, -0.25 - i) for i, t in enumerate(ranked)])

    def _finish(self, stream: _Stream, now: Seconds) -> Finish:
        streams = self._streams[stream.handle]
        streams.remove(stream)
        if not streams:
            del self._streams[stream.handle]
        started = now if stream.started is None else stream.started
        return Finish(
            reason=stream.reason,
            stop_reason=stream.stop_reason,
            prompt_tokens=len(stream.request.prompt),
            completion_tokens=stream.position,
            prefill_seconds=started - stream.submitted,
        )

    def shutdown(self) -> int:
        """Clear the queues; there are no blocks to leak."""
        self._sweep()
        return 0


def _plan_end(
    sampling: SamplingParams, given: list[int], cycle: tuple[int, ...], room: int
) -> tuple[int, FinishReason, int | None]:
    """(output tokens at the end, reason, stop token id). Tokens repeat, so one cycle is enough to
    look at."""
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

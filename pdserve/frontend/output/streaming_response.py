"""Streams answers: a token becomes bytes on the socket within the call that delivered it.

No task, queue or future is touched per token. A choice of plain text takes the fast path
(`FastTextChoice`); one with stop strings, logprobs or the like takes `StreamedChoice`; one with
parsed markup takes `ParsedChoice`. `AdaptedResponseBuilder` lets an API adapter write the events.

If the client reads too slowly, text is held back and merged, so waiting output costs only its own
length; past the bound the connection is cut.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from pdserve.frontend.output.chat_parts import chat_delta
from pdserve.frontend.output.chunk_coalescer import ChunkCoalescer
from pdserve.frontend.output.logprobs import (
    chat_logprobs,
    completion_logprobs,
    prompt_logprobs,
)
from pdserve.frontend.output.output_processor import (
    OutputDelta,
    choice_output_processor,
    merge_deltas,
)
from pdserve.frontend.output.response_builder import ChoiceSink, ResponseBuilder
from pdserve.frontend.output.response_memory import delta_bytes
from pdserve.protocols.openai_errors import error_body
from pdserve.protocols.sse import DONE_EVENT, WAITING_COMMENT, encode_event
from pdserve.protocols.stream_chunks import NULL, ChunkExtras, ChunkTemplate, ChunkWriter
from pdserve.text.output_parts import ContentDelta
from pdserve.text.tokenization.token_text_table import json_escape

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.errors import PdserveError
    from pdserve.frontend.http.sse_response import SseWriter
    from pdserve.frontend.output.api_adapter import ApiAdapter
    from pdserve.frontend.output.response_memory import ResponseMemory
    from pdserve.frontend.plan import Prompt, RequestPlan
    from pdserve.ids import Bytes, Seconds
    from pdserve.messages.request import TokenDelta
    from pdserve.observe.metrics import ModelMetrics
    from pdserve.protocols.completion_responses import CompletionLogprobs, FinishReason

_json = msgspec.json.Encoder().encode

_LOGPROB_BYTES = 128
"""Approximate bytes of one logprob entry that is held back."""


class StreamingResponseBuilder(ResponseBuilder):
    """Writes chunks as tokens come. `finish` or `abort` ends the stream."""

    def __init__(
        self,
        plan: RequestPlan,
        metrics: ModelMetrics,
        arrival: Seconds,
        time: Callable[[], Seconds],
        wire: SseWriter,
    ) -> None:
        self.wire = wire
        self.chunks = ChunkWriter(
            chat=plan.chat,
            answer_id=plan.answer_id,
            created=plan.created,
            model=plan.model_name,
            fingerprint=plan.model.fingerprint,
            usage_field=plan.include_usage or plan.continuous_usage,
            reasons=plan.reasons,
        )
        super().__init__(plan, metrics, arrival, time)
        wire.on_resume(self._flush)

    @property
    def client_slow(self) -> Seconds | None:
        return self.wire.slow_since

    def begin(self, now: Seconds) -> None:
        """Sends, with the first token, the headers, unless they were sent before, and a chat's role
        chunks."""
        super().begin(now)
        if not self.wire.started:
            self.wire.begin(self.served_lines())
        self.wire.write(self._opening())

    def tell_waiting(self) -> bool:
        """Sends the headers, as far as known, and something that clients skip, because no token has
        come for long and a proxy might close a silent connection. Returns False if a token has
        come."""
        if self.first_token is not None or self.finished.done() or self.wire.ended:
            return False
        if not self.wire.started:
            self.wire.begin(self.served_lines())
        self.wire.write(self._waiting())
        return True

    def on_prompt_done(self) -> None:
        """Ends the stream together with its last token, so that both leave in one write."""
        waits = not self.finished.done()
        super().on_prompt_done()
        if waits and self.finished.done():
            self.finish()

    def finish(self) -> None:
        """Ends the stream after all choices have ended; writes usage if it was requested.
        Idempotent."""
        if self.wire.ended:
            return
        self._flush()
        self.wire.end(self._ending())

    def abort(self, error: PdserveError) -> None:
        """Ends a stream that has begun and failed, unless it has ended: writes the error, and no
        `[DONE]`."""
        if self.wire.ended:
            return
        self._flush()
        self.wire.end(self._failure(error))

    def _choice(self, index: int, prompt: Prompt) -> ChoiceSink:
        if self.plan.parser is not None:
            return ParsedChoice(self, index, prompt)
        if self.plan.plain:
            return FastTextChoice(self, index, prompt)
        return StreamedChoice(self, index, prompt)

    def _opening(self) -> bytes:
        plan = self.plan
        if not plan.chat:
            return b""
        ids = plan.prompts[0].tokens.tolist() if plan.token_ids else None
        # With tools, the answer may be nothing but a call; its content is null then.
        content = NULL if plan.tools else b'""'
        usage = self.usage() if plan.continuous_usage else None
        numbers = range(len(self.choices))
        return b"".join([self.chunks.role(n, ids, content=content, usage=usage) for n in numbers])

    def _ending(self) -> bytes:
        last = self.chunks.usage(self.usage(last=True)) if self.plan.include_usage else b""
        return last + DONE_EVENT

    def _failure(self, error: PdserveError) -> bytes:
        return encode_event(error_body(error))

    def _waiting(self) -> bytes:
        return WAITING_COMMENT

    def _flush(self) -> None:
        """Writes what was held back, one chunk per choice."""
        for choice in self.choices:
            choice.flush()  # type: ignore[attr-defined]  # both kinds below have it


class AdaptedResponseBuilder(StreamingResponseBuilder):
    """Writes the answer in another API's format, with an `ApiAdapter`."""

    def __init__(
        self,
        adapter: ApiAdapter,
        plan: RequestPlan,
        metrics: ModelMetrics,
        arrival: Seconds,
        time: Callable[[], Seconds],
        wire: SseWriter,
        gathered: ResponseMemory,
    ) -> None:
        """`gathered` limits the memory that the adapter may use to repeat output at the end."""
        self.adapter = adapter
        self._gathered = gathered
        super().__init__(plan, metrics, arrival, time, wire)

    def cancel(self) -> None:
        super().cancel()
        self._gathered.forget(self)

    def grow(self, more: Bytes) -> None:
        """Counts `more` bytes that the adapter keeps."""
        self._gathered.grow(self, more)

    def _choice(self, index: int, prompt: Prompt) -> ChoiceSink:
        return AdaptedChoice(self, index, prompt, self.adapter)

    def _opening(self) -> bytes:
        return self.adapter.begin(self.plan, self.usage())

    def _ending(self) -> bytes:
        only = self.choices[0]
        assert isinstance(only, AdaptedChoice)
        reason, stop_reason = only.outcome
        return self.adapter.finish(reason, stop_reason, self.usage(last=True))

    def _failure(self, error: PdserveError) -> bytes:
        return self.adapter.error(error)

    def _waiting(self) -> bytes:
        return self.adapter.waiting()


def streaming_response_builder(
    plan: RequestPlan,
    metrics: ModelMetrics,
    arrival: Seconds,
    time: Callable[[], Seconds],
    wire: SseWriter,
    gathered: ResponseMemory,
) -> StreamingResponseBuilder:
    """Makes the kind of builder that a plan needs."""
    if plan.adapter is None:
        return StreamingResponseBuilder(plan, metrics, arrival, time, wire)
    return AdaptedResponseBuilder(plan.adapter, plan, metrics, arrival, time, wire, gathered)


class FastTextChoice:
    """A choice whose chunks contain only text, until the last one."""

    __slots__ = (
        "_answer",
        "_detokenizer",
        "_feed",
        "_form",
        "_held",
        "_pace",
        "_wire",
        "completion_tokens",
        "done",
        "finish_reason",
        "first",
        "last",
        "reasoning_tokens",
    )

    def __init__(self, answer: StreamingResponseBuilder, index: int, prompt: Prompt) -> None:
        self._answer = answer
        self._wire = answer.wire
        self._form: ChunkTemplate = answer.chunks.form(index)
        self._detokenizer = answer.plan.detokenizer(prompt)
        self._feed = self._detokenizer.feed_json
        self._pace = answer.metrics.inter_token_latency
        self.first: Seconds | None = None
        self.last: Seconds | None = None
        self._held = bytearray()
        self.finish_reason: FinishReason | None = None
        self.completion_tokens = 0
        self.reasoning_tokens = 0
        self.done = False

    def on_delta(self, delta: TokenDelta, now: Seconds) -> None:
        tokens = delta.tokens
        count = len(tokens)
        self.completion_tokens += count
        last = self.last
        if last is None:
            self.first = now
        elif count:
            self._pace.observe((now - last) / count, count)
        self.last = now
        if delta.finish is not None:
            self._finish(delta)
        elif count == 1:
            text = self._feed(tokens)
            if text:
                self._write(text)
        else:
            self._write_each(tokens)

    def flush(self) -> None:
        """Writes what was held back while the client did not read."""
        if self._held:
            form = self._form
            self._wire.write(form.head + self._held + form.tail)
            self._wire.held -= len(self._held)
            self._held.clear()

    def _write(self, text: bytes) -> None:
        wire = self._wire
        if wire.paused:
            self._held += text
            wire.hold(len(text))
        else:
            form = self._form
            wire.write_parts(form.head, text, form.tail)

    def _write_each(self, tokens: list[int]) -> None:
        for token in tokens:
            text = self._feed((token,))
            if text:
                self._write(text)

    def _finish(self, delta: TokenDelta) -> None:
        assert delta.finish is not None
        tokens = delta.tokens
        self._write_each(tokens[:-1])
        text = self._feed(tokens[-1:])
        self.flush()
        text += json_escape(self._detokenizer.flush())
        extras = ChunkExtras(
            finish_reason=delta.finish.reason, stop_reason=delta.finish.stop_reason
        )
        self._wire.write(self._answer.chunks.full(self._form, text, extras))
        self.finish_reason = delta.finish.reason
        self.done = True


class StreamedChoice:
    """A choice with stop strings, logprobs, an echo, token ids or running usage."""

    def __init__(self, answer: StreamingResponseBuilder, index: int, prompt: Prompt) -> None:
        plan = answer.plan
        self._answer = answer
        self._plan = plan
        self._wire = answer.wire
        self._form = answer.chunks.form(index)
        self._prompt = prompt
        self._text = choice_output_processor(plan, prompt)
        self._pace = answer.metrics.inter_token_latency
        self.first: Seconds | None = None
        self.last: Seconds | None = None
        self._held: list[OutputDelta] = []
        self._interval = ChunkCoalescer(plan.stream_interval) if plan.stream_interval > 1 else None
        self._echo_due = plan.echo
        self._prompt_due = plan.token_ids and not plan.chat
        """True while the prompt's ids must go out with the first chunk; a chat's go out with the
        role."""
        self.completion_tokens = 0
        self.reasoning_tokens = 0
        self.done = False

    def on_delta(self, delta: TokenDelta, now: Seconds) -> None:
        self._keep_pace(len(delta.tokens), now)
        if self._echo_due:
            self._write_echo(delta)
        pieces = self._text.feed(delta)
        self.done = self._text.finish_reason is not None
        if self._plan.scores_only:
            pieces = [OutputDelta("")] if self.done else []
        for number, piece in enumerate(pieces, 1):
            self._gather(piece, last=self.done and number == len(pieces))

    def _keep_pace(self, count: int, now: Seconds) -> None:
        if self.last is None:
            self.first = now
        elif count:
            self._pace.observe((now - self.last) / count, count)
        self.last = now

    @property
    def finish_reason(self) -> FinishReason | None:
        return self._text.finish_reason

    def flush(self) -> None:
        """Writes what was held back while the client did not read, as one chunk."""
        rest = None if self._interval is None else self._interval.rest()
        if rest is not None:
            self._count(rest)
            self._held.append(rest)
            self._wire.held += _size(rest)
        if self._held:
            self._wire.held -= sum(map(_size, self._held))
            piece, self._held = merge_deltas(self._held), []
            self._write(piece, last=False)

    def _gather(self, piece: OutputDelta, *, last: bool) -> None:
        """Merges pieces if the client wants one chunk per several tokens."""
        if self._interval is None:
            self._take(piece, last=last)
            return
        whole = self._interval.take(piece, _size(piece), last=last)
        if whole is not None:
            self._take(whole, last=last)

    def _count(self, piece: OutputDelta) -> None:
        # Usage on a chunk counts the tokens that the client has been sent, not all that were fed.
        self.completion_tokens += len(piece.tokens)
        self.reasoning_tokens += piece.reasoning_tokens

    def _take(self, piece: OutputDelta, *, last: bool) -> None:
        self._count(piece)
        if last:
            self.flush()
            self._write(piece, last=True)
        elif self._wire.paused:
            self._held.append(piece)
            self._wire.hold(_size(piece))
        else:
            self._write(piece, last=False)

    def _write(self, piece: OutputDelta, *, last: bool) -> None:
        extras = self._extras(piece, last=last)
        self._wire.write(self._answer.chunks.full(self._form, json_escape(piece.text), extras))

    def _extras(self, piece: OutputDelta, *, last: bool) -> ChunkExtras:
        text = self._text
        return ChunkExtras(
            logprobs=self._logprobs(piece),
            finish_reason=text.finish_reason if last else None,
            stop_reason=text.stop_reason if last else None,
            token_ids=piece.tokens if self._plan.token_ids else None,
            prompt_token_ids=self._prompt_ids(),
            usage=self._answer.usage() if self._plan.continuous_usage else None,
        )

    def _prompt_ids(self) -> list[int] | None:
        """The prompt's ids, once, if they were requested."""
        due, self._prompt_due = self._prompt_due, False
        return self._prompt.tokens.tolist() if due else None

    def _logprobs(self, piece: OutputDelta) -> bytes:
        if not self._plan.logprobs:
            return NULL
        tokenizer, as_ids = self._plan.model.tokenizer, self._plan.tokens_as_ids
        if self._plan.chat:
            own = self._plan.tells_chosen
            return _json(chat_logprobs(tokenizer, piece.logprobs, as_ids, own=own))
        return _json(completion_logprobs(tokenizer, piece.logprobs, piece.offsets, as_ids))

    def _write_echo(self, delta: TokenDelta) -> None:
        """Writes the prompt, or a chat's last message, as the choice's first chunk."""
        self._echo_due = False
        plan, prompt = self._plan, self._prompt
        logprobs: CompletionLogprobs | None = None
        if plan.logprobs and not plan.chat:
            logprobs = prompt_logprobs(
                plan.model.tokenizer,
                prompt.tokens,
                prompt.echo,
                delta.prompt_logprobs or [],
                plan.skip_special_tokens,
                plan.tokens_as_ids,
            )
        extras = ChunkExtras(
            logprobs=NULL if logprobs is None else _json(logprobs),
            prompt_token_ids=self._prompt_ids(),
            usage=self._answer.usage() if plan.continuous_usage else None,
        )
        self._wire.write(self._answer.chunks.full(self._form, json_escape(prompt.echo), extras))


class ParsedChoice(StreamedChoice):
    """A chat's choice in parts: content, reasoning, tool calls."""

    def __init__(self, answer: StreamingResponseBuilder, index: int, prompt: Prompt) -> None:
        super().__init__(answer, index, prompt)
        plan = answer.plan
        self._index = index
        self._bare = not (plan.logprobs or plan.token_ids or plan.continuous_usage)
        """True if chunks carry only parts, until the last one."""
        self._settled = False

    def on_delta(self, delta: TokenDelta, now: Seconds) -> None:
        if not self._settled:
            super().on_delta(delta, now)
            self._settled = self._bare and self._interval is None and self._text.settled
        elif delta.finish is not None or self._wire.paused or self._held:
            super().on_delta(delta, now)
        else:
            self._pass_on(delta.tokens, now)

    def _pass_on(self, tokens: list[int], now: Seconds) -> None:
        """Writes content after the reasoning, as fast as a `FastTextChoice`."""
        self._keep_pace(len(tokens), now)
        self.completion_tokens += len(tokens)
        form = self._form
        for token in tokens:
            text = self._text.pass_on((token,))
            if text:
                self._wire.write_parts(form.head, text, form.tail)

    def _write(self, piece: OutputDelta, *, last: bool) -> None:
        if self._bare and not last and len(piece.parts) == 1:
            part = piece.parts[0]
            if isinstance(part, ContentDelta):
                # Most pieces are plain content, which is written without making chunk records.
                form = self._form
                self._wire.write_parts(form.head, json_escape(part.text), form.tail)
                return
        delta = chat_delta(piece.parts, self._plan.call_id)
        chunk = self._answer.chunks.delta(
            self._index,
            _json(delta),
            self._extras(piece, last=last),
            reasoning=delta.reasoning is not None,
        )
        self._wire.write(chunk)


class AdaptedChoice(StreamedChoice):
    """The one choice of an answer that an adapter writes."""

    def __init__(
        self, answer: AdaptedResponseBuilder, index: int, prompt: Prompt, adapter: ApiAdapter
    ) -> None:
        super().__init__(answer, index, prompt)
        self._adapter = adapter
        self._grow = answer.grow

    def on_delta(self, delta: TokenDelta, now: Seconds) -> None:
        if delta.logprobs:
            self._grow(delta_bytes(delta))
        super().on_delta(delta, now)

    @property
    def outcome(self) -> tuple[FinishReason, int | str | None]:
        """How it ended: the finish reason, and what stopped it."""
        reason = self._text.finish_reason
        # The outcome is read only after the choice has ended.
        assert reason is not None
        return reason, self._text.stop_reason

    def _write(self, piece: OutputDelta, *, last: bool) -> None:
        self._wire.write(self._adapter.parts(piece.shown, piece))


def _size(piece: OutputDelta) -> int:
    tops = sum(1 + len(logprob.top) for logprob in piece.logprobs)
    return piece.size + 8 * len(piece.tokens) + _LOGPROB_BYTES * tops

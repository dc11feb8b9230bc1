"""Writes the answers of Ollama's API: one JSON object, or a stream with one object per line.

A tool call is written when it is complete, because its arguments are an object. Owned by one
request's answer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET
from msgspec.structs import asdict

from pdserve.frontend.api.adapters.common import arguments_object
from pdserve.frontend.output.logprobs import chat_logprobs
from pdserve.protocols.completion_responses import Served
from pdserve.protocols.ollama.answers import (
    NDJSON,
    OllamaCallMade,
    OllamaChatAnswer,
    OllamaFigures,
    OllamaGenerateAnswer,
    OllamaReply,
    OllamaToolUse,
    OllamaVector,
    OllamaVectors,
    ollama_error_body,
)
from pdserve.text.output_parts import ContentDelta, ReasoningDelta, ToolCallArguments, ToolCallStart

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.errors import PdserveError
    from pdserve.frontend.output.output_processor import OutputDelta
    from pdserve.frontend.plan import RequestPlan
    from pdserve.frontend.preprocess.input_processor import PlanContext
    from pdserve.ids import Bytes, Seconds
    from pdserve.protocols.completion_responses import (
        ChatCompletion,
        ChatLogprob,
        FinishReason,
        Usage,
    )
    from pdserve.protocols.ollama.answers import DoneReason
    from pdserve.text.output_parts import OutputPart

_encode = msgspec.json.Encoder().encode
_NANOSECONDS = 10**9
_AROUND_CHAT = (b'","message":{"role":"assistant","content":', b'},"done":false}\n')
_AROUND_RESPONSE = (b'","response":', b',"done":false}\n')
"""What a line of text has before and after it."""


class OllamaAdapter:
    """Writes one answer in Ollama's format."""

    stream_type = NDJSON

    def __init__(
        self,
        model_name: str,
        context: PlanContext,
        *,
        chat: bool,
        plan: RequestPlan | None = None,
    ) -> None:
        """Args: `chat` is true for `/api/chat`; `plan` is None for an answer without tokens."""
        self._name = model_name
        self._context = context
        self._chat = chat
        self._plan = plan
        self._calls = PendingCalls()
        self._bare = plan is not None and not plan.logprobs
        """True if a line of text carries nothing else."""
        self._head = b'{"model":%s,"created_at":"' % _encode(model_name)
        self._middle, self._tail = _AROUND_CHAT if chat else _AROUND_RESPONSE

    def repeats(self) -> Bytes:
        return 0

    def waiting(self) -> bytes:
        return self._line(OllamaReply())

    def begin(self, plan: RequestPlan, usage: Usage) -> bytes:
        return b""

    def parts(self, parts: Sequence[OutputPart], piece: OutputDelta) -> bytes:
        if self._bare and len(parts) == 1 and isinstance(parts[0], ContentDelta):
            return self._text(parts[0].text)
        texts: list[str] = []
        thoughts: list[str] = []
        for part in parts:
            match part:
                case ReasoningDelta(text):
                    thoughts.append(text)
                case ContentDelta(text):
                    texts.append(text)
                case _:
                    self._calls.add(part)
        reply = OllamaReply(content="".join(texts))
        if thoughts:
            reply.thinking = "".join(thoughts)
        if calls := self._calls.complete():
            reply.tool_calls = self._tool_uses(calls)
        logprobs = self._logprobs(piece)
        if not (reply.content or thoughts or calls or logprobs):
            return b""
        return self._line(reply, logprobs=logprobs or UNSET)

    def finish(
        self, finish_reason: FinishReason, stop_reason: int | str | None, usage: Usage
    ) -> bytes:
        calls = self._calls.end()
        last = self._line(OllamaReply(tool_calls=self._tool_uses(calls))) if calls else b""
        return last + self._line(OllamaReply(), **self._done(finish_reason, usage))

    def error(self, error: PdserveError) -> bytes:
        return ollama_error_body(error) + b"\n"

    def whole(self, answer: ChatCompletion) -> bytes:
        assert answer.usage is not None, "it is an answer of our own"
        choice = answer.choices[0]
        message = choice.message
        reply = OllamaReply(content=message.content or "")
        if message.reasoning:
            reply.thinking = message.reasoning
        if message.tool_calls:
            called = [(call.function.name, call.function.arguments) for call in message.tool_calls]
            reply.tool_calls = self._tool_uses(list(enumerate(called)))
        entries = choice.logprobs.content if choice.logprobs else None
        done = self._done(choice.finish_reason, answer.usage)
        return self._written(reply, logprobs=entries if entries is not None else UNSET, **done)

    def loaded(self) -> bytes:
        """The answer to a request without a prompt."""
        return self._line(OllamaReply(), done=True, done_reason="load")

    # ---------------------------------------------------------------- one object

    def _text(self, text: str) -> bytes:
        """A line of text, as most are, written without making records."""
        now = timestamp().encode()
        return b"".join((self._head, now, self._middle, _encode(text), self._tail))

    def _line(self, reply: OllamaReply, **fields: Any) -> bytes:
        return self._written(reply, **fields) + b"\n"

    def _written(self, reply: OllamaReply, *, done: bool = False, **fields: Any) -> bytes:
        common: dict[str, Any] = {
            "model": self._name,
            "created_at": timestamp(),
            "done": done,
        } | fields
        if self._chat:
            return _encode(OllamaChatAnswer(message=reply, **common))
        return _encode(
            OllamaGenerateAnswer(response=reply.content, thinking=reply.thinking, **common)
        )

    def _done(self, finish_reason: str, usage: Usage) -> dict[str, Any]:
        reason: DoneReason = "length" if finish_reason == "length" else "stop"
        elapsed = self._context.time() - self._context.arrival
        return {"done": True, "done_reason": reason} | asdict(figures(usage, elapsed))

    def _tool_uses(self, calls: Sequence[tuple[int, tuple[str, str]]]) -> list[OllamaToolUse]:
        assert self._plan is not None, "an answer without tokens calls no tool"
        make_id = self._plan.call_id
        return [
            OllamaToolUse(
                id=make_id(),
                function=OllamaCallMade(
                    index=index, name=name, arguments=arguments_object(arguments)
                ),
            )
            for index, (name, arguments) in calls
        ]

    def _logprobs(self, piece: OutputDelta) -> list[ChatLogprob]:
        if self._plan is None or not self._plan.logprobs:
            return []
        return chat_logprobs(self._plan.model.tokenizer, piece.logprobs).content or []


Call = tuple[int, tuple[str, str]]
"""Index of a call, the function's name, and its arguments as JSON."""


@dataclass
class PendingCalls:
    """Collects the arguments of tool calls. The answer's length bounds what is held."""

    _name: str | None = None
    _texts: list[str] = field(default_factory=list)
    _complete: list[Call] = field(default_factory=list)
    _index: int = -1

    def add(self, part: ToolCallStart | ToolCallArguments) -> None:
        """Takes a part of a call."""
        if isinstance(part, ToolCallStart):
            self._close()
            self._index, self._name = part.index, part.name
        else:
            self._texts.append(part.text)

    def complete(self) -> list[Call]:
        """The calls that are complete since the last time."""
        found, self._complete = self._complete, []
        return found

    def end(self) -> list[Call]:
        """The rest, at the end of the answer."""
        self._close()
        return self.complete()

    def _close(self) -> None:
        if self._name is not None:
            self._complete.append((self._index, (self._name, "".join(self._texts))))
        self._name = None
        self._texts = []


# ---------------------------------------------------------------- figures


def figures(usage: Usage, elapsed: Seconds) -> OllamaFigures:
    """Tokens and times of an answer that took `elapsed` since its request arrived. The parts add up
    to the whole: loading, the prompt, the output."""
    found = OllamaFigures(
        total_duration=_ns(elapsed),
        prompt_eval_count=usage.prompt_tokens,
        eval_count=usage.completion_tokens,
    )
    served = usage.pdserve
    if not isinstance(served, Served) or served.ttft_ms is None:
        return found
    first = min(elapsed, served.ttft_ms / 1000)
    found.eval_duration = _ns(elapsed - first)
    if served.prefill_ms is not None:
        prompt = min(first, served.prefill_ms / 1000)
        found.prompt_eval_duration = _ns(prompt)
        found.load_duration = _ns(first - prompt)
    return found


def _ns(time: Seconds) -> int:
    return max(0, round(time * _NANOSECONDS))


def timestamp(at: float | None = None) -> str:
    """Unix seconds, or now, in RFC 3339."""
    moment = datetime.now(UTC) if at is None else datetime.fromtimestamp(at, UTC)
    return moment.isoformat().replace("+00:00", "Z")


# ---------------------------------------------------------------- vectors


def vectors_body(plan: RequestPlan, vectors: list[list[float]], usage: Usage) -> bytes:
    """The answer of `/api/embed`."""
    return _encode(
        OllamaVectors(
            model=plan.model_name, embeddings=vectors, prompt_eval_count=usage.prompt_tokens
        )
    )


def vector_body(plan: RequestPlan, vectors: list[list[float]], usage: Usage) -> bytes:
    """The answer of `/api/embeddings`."""
    return _encode(OllamaVector(embedding=vectors[0]))


def loaded_vectors(model_name: str, *, one: bool) -> bytes:
    """The answer to a request without input."""
    if one:
        return _encode(OllamaVector(embedding=[]))
    return _encode(OllamaVectors(model=model_name, embeddings=[]))

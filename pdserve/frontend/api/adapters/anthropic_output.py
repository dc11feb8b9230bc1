"""Writes the answer of `/v1/messages`: content blocks, and the events of a stream that build them.

Parts of the output open and close blocks: thinking, text, one block per tool call. Owned by one
request's answer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from pdserve.frontend.api.adapters.common import (
    EventStreamAdapter,
    arguments_object,
    cached_tokens,
    reasoning_tokens,
)
from pdserve.protocols.anthropic_messages import (
    MessageObject,
    MessagesOutputDetails,
    MessagesUsage,
    OutputBlock,
    TextBlock,
    ThinkingBlock,
    ToolUseBlock,
    messages_error_body,
)
from pdserve.text.output_parts import ContentDelta, ReasoningDelta, ToolCallArguments, ToolCallStart

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdserve.errors import PdserveError
    from pdserve.frontend.output.output_processor import OutputDelta
    from pdserve.frontend.plan import RequestPlan
    from pdserve.ids import Bytes
    from pdserve.protocols.anthropic_messages import StopReason
    from pdserve.protocols.completion_responses import ChatCompletion, FinishReason, Usage
    from pdserve.text.output_parts import OutputPart

_encode = msgspec.json.Encoder().encode
_SIGNATURE = "unsigned"
"""Some clients drop thinking with an empty signature."""

Event = dict[str, Any]


class AnthropicAdapter(EventStreamAdapter):
    """Writes one answer in Anthropic's format."""

    def __init__(self, plan: RequestPlan, *, cut: bool = False) -> None:
        """`cut`: the context leaves less room than was requested."""
        self._plan = plan
        self._cut = cut
        self._blocks = ContentBlocks(plan.call_id)

    def repeats(self) -> Bytes:
        return 0

    def begin(self, plan: RequestPlan, usage: Usage) -> bytes:
        message = MessageObject(
            id=plan.answer_id,
            model=plan.model_name,
            content=[],
            stop_reason=None,
            stop_sequence=None,
            usage=self._usage(usage),
        )
        return _event({"type": "message_start", "message": message})

    def parts(self, parts: Sequence[OutputPart], piece: OutputDelta) -> bytes:
        return b"".join([_event(event) for part in parts for event in self._blocks.add(part)])

    def finish(
        self, finish_reason: FinishReason, stop_reason: int | str | None, usage: Usage
    ) -> bytes:
        reason, sequence = _stop(finish_reason, stop_reason, cut=self._cut)
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        last = {"type": "message_delta", "delta": delta, "usage": self._usage(usage)}
        events = [*self._blocks.close(), last, {"type": "message_stop"}]
        return b"".join(map(_event, events))

    def error(self, error: PdserveError) -> bytes:
        body = messages_error_body(error, self._plan.requests[0].request_id)
        return b"event: error\ndata: %s\n\n" % body

    def whole(self, answer: ChatCompletion) -> bytes:
        assert answer.usage is not None, "it is an answer of our own"
        choice = answer.choices[0]
        reason, sequence = _stop(choice.finish_reason, choice.stop_reason, cut=self._cut)
        message = choice.message
        content: list[OutputBlock] = []
        if message.reasoning:
            content.append(ThinkingBlock(thinking=message.reasoning, signature=_SIGNATURE))
        if message.content:
            content.append(TextBlock(text=message.content))
        for call in message.tool_calls or ():
            arguments = arguments_object(call.function.arguments)
            content.append(ToolUseBlock(id=call.id, name=call.function.name, input=arguments))
        return _encode(
            MessageObject(
                id=answer.id,
                model=answer.model,
                content=content,
                stop_reason=reason,
                stop_sequence=sequence,
                usage=self._usage(answer.usage),
            )
        )

    def _usage(self, usage: Usage) -> MessagesUsage:
        """Usage in Anthropic's fields. Whole blocks of the prompt are cached for the next request
        that begins with them."""
        cached = cached_tokens(usage)
        block = self._plan.model.card.block_size
        kept = max(0, usage.prompt_tokens // block * block - cached)
        return MessagesUsage(
            input_tokens=usage.prompt_tokens - cached - kept,
            cache_creation_input_tokens=kept,
            cache_read_input_tokens=cached,
            output_tokens=usage.completion_tokens,
            output_tokens_details=MessagesOutputDetails(thinking_tokens=reasoning_tokens(usage)),
            pdserve=usage.pdserve,
        )


class ContentBlocks:
    """Builds content blocks from parts."""

    def __init__(self, call_id: Callable[[], str]) -> None:
        self._call_id = call_id
        self._index = -1
        self._open: type[OutputBlock] | None = None

    def add(self, part: OutputPart) -> list[Event]:
        """The events for a part."""
        match part:
            case ReasoningDelta(text):
                block = ThinkingBlock(thinking="", signature="")
                events = self._switch(ThinkingBlock, block)
                delta = {"type": "thinking_delta", "thinking": text}
            case ContentDelta(text):
                events = self._switch(TextBlock, TextBlock(text=""))
                delta = {"type": "text_delta", "text": text}
            case ToolCallStart(_, name, id):
                return self._begin(ToolUseBlock(id=id or self._call_id(), name=name, input={}))
            case ToolCallArguments(_, text):
                events = []
                delta = {"type": "input_json_delta", "partial_json": text}
        return [*events, self._delta(delta)]

    def close(self) -> list[Event]:
        """Ends the open block, if there is one."""
        opened, self._open = self._open, None
        if opened is None:
            return []
        events = []
        if opened is ThinkingBlock:
            events.append(self._delta({"type": "signature_delta", "signature": _SIGNATURE}))
        return [*events, {"type": "content_block_stop", "index": self._index}]

    def _switch(self, kind: type[OutputBlock], empty: OutputBlock) -> list[Event]:
        return [] if self._open is kind else self._begin(empty)

    def _begin(self, block: OutputBlock) -> list[Event]:
        events = self.close()
        self._open = type(block)
        self._index += 1
        start = {"type": "content_block_start", "index": self._index, "content_block": block}
        return [*events, start]

    def _delta(self, delta: dict[str, str]) -> Event:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}


def _event(event: Event) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (event["type"].encode(), _encode(event))


def _stop(
    finish_reason: str, stop_reason: int | str | None, *, cut: bool
) -> tuple[StopReason, str | None]:
    """The stop reason in Anthropic's words, and the stop sequence that was met."""
    if finish_reason == "length":
        return "model_context_window_exceeded" if cut else "max_tokens", None
    if finish_reason == "tool_calls":
        return "tool_use", None
    if isinstance(stop_reason, str):
        return "stop_sequence", stop_reason
    return "end_turn", None

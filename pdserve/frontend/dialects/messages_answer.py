"""The answer of `/v1/messages`: content blocks, and the events that build them up in a stream.

Parts of the output open and close blocks: thinking, text, one block per call of a tool. Owned by
one request's answer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from pdserve.frontend.dialects.common import cached_tokens, reasoning_tokens
from pdserve.openai.messages_api import (
    MessageObject,
    MessagesOutputDetails,
    MessagesUsage,
    OutputBlock,
    TextBlock,
    ThinkingBlock,
    ToolUseBlock,
    messages_error_body,
)
from pdserve.text.parts import CallArguments, CallBegin, Content, Reasoning

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdserve.errors import PdserveError
    from pdserve.frontend.output import Piece
    from pdserve.frontend.plan import Plan
    from pdserve.openai.messages_api import StopReason
    from pdserve.openai.responses import ChatCompletion, FinishReason, Usage
    from pdserve.text.parts import Part

_encode = msgspec.json.Encoder().encode
_SIGNATURE = "unsigned"
"""Some clients drop thinking whose signature is empty."""

Event = dict[str, Any]


class MessagesDialect:
    """A `Dialect`."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._blocks = Blocks(plan.call_id)

    def begin(self, plan: Plan, usage: Usage) -> bytes:
        message = MessageObject(
            id=plan.answer_id,
            model=plan.model_name,
            content=[],
            stop_reason=None,
            stop_sequence=None,
            usage=_usage(usage),
        )
        return _event({"type": "message_start", "message": message})

    def parts(self, parts: Sequence[Part], piece: Piece) -> bytes:
        return b"".join([_event(event) for part in parts for event in self._blocks.add(part)])

    def finish(
        self, finish_reason: FinishReason, stop_reason: int | str | None, usage: Usage
    ) -> bytes:
        reason, sequence = _stop(finish_reason, stop_reason)
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        last = {"type": "message_delta", "delta": delta, "usage": _usage(usage)}
        events = [*self._blocks.close(), last, {"type": "message_stop"}]
        return b"".join(map(_event, events))

    def error(self, error: PdserveError) -> bytes:
        body = messages_error_body(error, self._plan.requests[0].request_id)
        return b"event: error\ndata: %s\n\n" % body

    def whole(self, answer: ChatCompletion) -> bytes:
        assert answer.usage is not None, "it is an answer of our own"
        choice = answer.choices[0]
        reason, sequence = _stop(choice.finish_reason, choice.stop_reason)
        message = choice.message
        content: list[OutputBlock] = []
        if message.reasoning:
            content.append(ThinkingBlock(thinking=message.reasoning, signature=_SIGNATURE))
        if message.content:
            content.append(TextBlock(text=message.content))
        for call in message.tool_calls or ():
            arguments = _object(call.function.arguments)
            content.append(ToolUseBlock(id=call.id, name=call.function.name, input=arguments))
        return _encode(
            MessageObject(
                id=answer.id,
                model=answer.model,
                content=content,
                stop_reason=reason,
                stop_sequence=sequence,
                usage=_usage(answer.usage),
            )
        )


class Blocks:
    """Content blocks as parts come."""

    def __init__(self, call_id: Callable[[], str]) -> None:
        self._call_id = call_id
        self._index = -1
        self._open: type[OutputBlock] | None = None

    def add(self, part: Part) -> list[Event]:
        """The events that tell of a part."""
        match part:
            case Reasoning(text):
                block = ThinkingBlock(thinking="", signature="")
                events = self._switch(ThinkingBlock, block)
                delta = {"type": "thinking_delta", "thinking": text}
            case Content(text):
                events = self._switch(TextBlock, TextBlock(text=""))
                delta = {"type": "text_delta", "text": text}
            case CallBegin(_, name):
                return self._begin(ToolUseBlock(id=self._call_id(), name=name, input={}))
            case CallArguments(_, text):
                events = []
                delta = {"type": "input_json_delta", "partial_json": text}
        return [*events, self._delta(delta)]

    def close(self) -> list[Event]:
        """The open block ends, if there is one."""
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


def _stop(finish_reason: str, stop_reason: int | str | None) -> tuple[StopReason, str | None]:
    """In that API's words, and the stop sequence that was met."""
    if finish_reason == "length":
        return "max_tokens", None
    if finish_reason == "tool_calls":
        return "tool_use", None
    if isinstance(stop_reason, str):
        return "stop_sequence", stop_reason
    return "end_turn", None


def _object(arguments: str) -> dict[str, Any]:
    """A call's arguments; those of one that was cut off are told as none."""
    try:
        found = msgspec.json.decode(arguments)
    except msgspec.MsgspecError:
        return {}
    return found if isinstance(found, dict) else {}


def _usage(usage: Usage) -> MessagesUsage:
    cached = cached_tokens(usage)
    return MessagesUsage(
        input_tokens=usage.prompt_tokens - cached,
        cache_read_input_tokens=cached,
        output_tokens=usage.completion_tokens,
        output_tokens_details=MessagesOutputDetails(thinking_tokens=reasoning_tokens(usage)),
        pdserve=usage.pdserve,
    )

"""Writes output parts as chat completion fields: stream deltas or a whole message.

Adjacent text of one kind becomes one field, so a chunk may carry reasoning, content and tool calls
at once. Clients concatenate each field separately, so only the order within a field matters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import UNSET

from pdserve.protocols.completion_responses import (
    AssistantMessage,
    CalledFunction,
    CalledTool,
    ChatDelta,
    FunctionDelta,
    ToolCallDelta,
)
from pdserve.text.output_parts import ContentDelta, ReasoningDelta, ToolCallArguments, ToolCallStart

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from pdserve.text.output_parts import OutputPart


def chat_delta(parts: Iterable[OutputPart], call_id: Callable[[], str]) -> ChatDelta:
    """The parts as a chunk's delta. A tool call that begins gets an id if the model wrote none."""
    content, reasoning = _text(parts, ContentDelta), _text(parts, ReasoningDelta)
    calls: dict[int, ToolCallDelta] = {}
    for part in parts:
        match part:
            case ToolCallStart(index, name, id):
                function = FunctionDelta(name=name, arguments="")
                calls[index] = ToolCallDelta(
                    index=index, id=id or call_id(), type="function", function=function
                )
            case ToolCallArguments(index, text):
                call = calls.setdefault(index, ToolCallDelta(index=index, function=FunctionDelta()))
                call.function.arguments = (call.function.arguments or "") + text
    return ChatDelta(
        content=content or None,
        reasoning=reasoning or None,
        reasoning_content=reasoning or None,
        tool_calls=list(calls.values()) or None,
    )


def chat_message(
    parts: Iterable[OutputPart], call_id: Callable[[], str], *, reasons: bool = True
) -> AssistantMessage:
    """The parts as a whole message. `reasons`: include the reasoning field even if it is empty."""
    calls: list[CalledTool] = []
    arguments: list[list[str]] = []
    for part in parts:
        if isinstance(part, ToolCallStart):
            arguments.append([])
            function = CalledFunction(name=part.name, arguments="")
            calls.append(CalledTool(id=part.id or call_id(), function=function))
        elif isinstance(part, ToolCallArguments):
            arguments[part.index].append(part.text)
    for call, texts in zip(calls, arguments, strict=True):
        call.function.arguments = "".join(texts)
    content, reasoning = _text(parts, ContentDelta), _text(parts, ReasoningDelta)
    return AssistantMessage(
        content=None if calls and not content else content,
        reasoning=(reasoning or None) if reasons else UNSET,
        reasoning_content=(reasoning or None) if reasons else UNSET,
        tool_calls=calls or UNSET,
    )


def _text(parts: Iterable[OutputPart], kind: type[ContentDelta] | type[ReasoningDelta]) -> str:
    return "".join([part.text for part in parts if isinstance(part, kind)])

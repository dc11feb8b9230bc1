"""Parts of an answer in the words of chat completions: a stream's deltas, a whole message.

Text of one kind that comes together becomes one field, so that a chunk may carry reasoning, content
and calls at once: fields add up one by one, and in a chat only their own order matters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import UNSET

from pdserve.openai.responses import (
    AssistantMessage,
    CalledFunction,
    CalledTool,
    ChatDelta,
    FunctionDelta,
    ToolCallDelta,
)
from pdserve.text.parts import CallArguments, CallBegin, Content, Reasoning

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from pdserve.text.parts import Part


def delta_of(parts: Iterable[Part], call_id: Callable[[], str]) -> ChatDelta:
    """What a chunk says of them. A call that begins gets an id."""
    content, reasoning = _text(parts, Content), _text(parts, Reasoning)
    calls: dict[int, ToolCallDelta] = {}
    for part in parts:
        match part:
            case CallBegin(index, name):
                function = FunctionDelta(name=name, arguments="")
                calls[index] = ToolCallDelta(
                    index=index, id=call_id(), type="function", function=function
                )
            case CallArguments(index, text):
                call = calls.setdefault(index, ToolCallDelta(index=index, function=FunctionDelta()))
                call.function.arguments = (call.function.arguments or "") + text
    return ChatDelta(
        content=content or None,
        reasoning=reasoning or None,
        reasoning_content=reasoning or None,
        tool_calls=list(calls.values()) or None,
    )


def message_of(parts: Iterable[Part], call_id: Callable[[], str]) -> AssistantMessage:
    """What a whole answer says of them."""
    calls: list[CalledTool] = []
    arguments: list[list[str]] = []
    for part in parts:
        if isinstance(part, CallBegin):
            arguments.append([])
            calls.append(
                CalledTool(id=call_id(), function=CalledFunction(name=part.name, arguments=""))
            )
        elif isinstance(part, CallArguments):
            arguments[part.index].append(part.text)
    for call, texts in zip(calls, arguments, strict=True):
        call.function.arguments = "".join(texts)
    content, reasoning = _text(parts, Content), _text(parts, Reasoning)
    return AssistantMessage(
        content=None if calls and not content else content,
        reasoning=reasoning or UNSET,
        reasoning_content=reasoning or UNSET,
        tool_calls=calls or UNSET,
    )


def _text(parts: Iterable[Part], kind: type[Content] | type[Reasoning]) -> str:
    return "".join([part.text for part in parts if isinstance(part, kind)])

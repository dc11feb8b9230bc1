"""Rewrites older and rarer chat forms into the one form that later code handles.

Examples: messages of role `function`, refusals as content parts, a choice of several tools. Plain
functions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from pdserve.errors import InvalidRequest
from pdserve.protocols.completion_requests import (
    AllowedTools,
    ChatRequest,
    ContentPart,
    NamedTool,
    ToolCall,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.protocols.completion_requests import Message, Tool

__all__ = ["normalize_chat", "normalize_messages"]


def normalize_chat(request: ChatRequest) -> tuple[ChatRequest, Sequence[str]]:
    """The chat in its usual form, and the place of each of its tools in the original; empty if
    unchanged.

    Errors: `InvalidRequest`.
    """
    changed = replace(request, messages=normalize_messages(request.messages))
    if request.thinking_token_budget == -1:
        changed.thinking_token_budget = None
    choice = request.tool_choice
    allowed = choice.allowed_tools if isinstance(choice, NamedTool) else None
    if not isinstance(allowed, AllowedTools):
        return changed, ()
    kept = _kept(allowed, request.tools or ())
    changed.tools = [tool for _, tool in kept]
    changed.tool_choice = allowed.mode
    return changed, [f"tools[{index}]" for index, _ in kept]


def normalize_messages(messages: list[Message]) -> list[Message]:
    """The conversation in its usual form."""
    return [_message(message) for message in messages]


def _message(message: Message) -> Message:
    # This role belongs to the older API, in which an answer had one call at most.
    if message.role == "function":
        return replace(message, role="tool")
    if message.role != "assistant":
        return message
    called = message.function_call
    if called is not None and message.tool_calls is None:
        call = ToolCall(function=called, type="function")
        message = replace(message, tool_calls=[call], function_call=None)
    content = message.content
    if isinstance(content, list) and any(part.type == "refusal" for part in content):
        return replace(message, content=[_part(part) for part in content])
    return message


def _part(part: ContentPart) -> ContentPart:
    return ContentPart(type="text", text=part.refusal) if part.type == "refusal" else part


def _kept(allowed: AllowedTools, tools: Sequence[Tool]) -> list[tuple[int, Tool]]:
    """The tools that may be called, with their original numbers."""
    known = {tool.function.name for tool in tools}
    for index, each in enumerate(allowed.tools):
        if each.function.name not in known:
            where = f"tool_choice.allowed_tools.tools[{index}].function.name"
            raise InvalidRequest(f"'{where}' is not the name of one of 'tools'", param=where)
    names = {each.function.name for each in allowed.tools}
    return [(index, tool) for index, tool in enumerate(tools) if tool.function.name in names]

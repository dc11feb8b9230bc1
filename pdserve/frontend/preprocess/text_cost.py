"""Estimates an upper bound of a request's text work, to decide if it may run on the event loop.

Every text that a template can read counts, in any field. Where the cost follows the structure of
the input and not its length (tools, documents, template arguments), the answer is always above the
limit for the event loop. Renders and builds nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from pdserve.text.text_pool import INLINE_CHARS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pdserve.protocols.completion_requests import (
        ChatRequest,
        Message,
        TokenizeRequest,
        Tool,
        ToolCall,
    )

__all__ = ["MIN_STRUCTURED_CHARS", "chat_chars", "encoded_chars", "texts_chars"]

MIN_STRUCTURED_CHARS: Final = INLINE_CHARS + 1
"""Least cost of work that follows structure: a kilobyte of structure may cost anything."""
_UNKNOWN: Final = 1 << 24
_ITEM_CHARS: Final = 64
"""Cost of an empty message, part or call, in characters of text: many of them are long work too."""


def chat_chars(request: ChatRequest | TokenizeRequest, tools: Sequence[Tool]) -> int:
    """Upper bound of the characters that rendering and tokenizing a conversation handles."""
    chars = sum(map(_message, request.messages or ()))
    given = [tools, request.documents, request.chat_template_kwargs]
    if not any(given):
        return chars
    return max(MIN_STRUCTURED_CHARS, chars + encoded_chars(given))


def texts_chars(texts: Iterable[str]) -> int:
    """Characters that tokenizing texts handles: many short texts are long work too."""
    return sum(_ITEM_CHARS + len(text) for text in texts)


def _message(message: Message) -> int:
    content = message.content
    chars = _ITEM_CHARS
    if isinstance(content, str):
        chars += len(content)
    elif content is not None:
        chars += sum(_ITEM_CHARS + len(part.type) + len(part.text or "") for part in content)
    if message.tool_calls is not None:
        chars += sum(map(_call, message.tool_calls))
    for text in (message.reasoning, message.reasoning_content, message.name, message.tool_call_id):
        if text is not None:
            chars += len(text)
    return chars


def _call(call: ToolCall) -> int:
    function = call.function
    chars = _ITEM_CHARS + len(function.name) + len(function.arguments)
    return chars + len(call.id or "") + len(call.type or "")


def encoded_chars(value: object) -> int:
    """Characters of a value's JSON; what uses the value handles about as many."""
    try:
        return len(msgspec.json.encode(value))
    except (OverflowError, UnicodeError, RecursionError):
        # The code that uses the value reports what is wrong with it.
        return _UNKNOWN

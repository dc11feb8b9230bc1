"""Estimates a request's text work, to decide if it may run on the event loop.

The unit is a character that `tokenizers` encodes; where the extension encodes, text costs less.
Every text that a template can read counts, in any field. Tools count several times, because
templates walk through them. Where the cost follows the structure of the input and not its length
(documents, template arguments), the answer is always above the limit for the event loop. Renders
and builds nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from pdserve.text.text_pool import INLINE_CHARS, encoding_chars, text_size

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pdserve.protocols.completion_requests import (
        ChatRequest,
        Message,
        TokenizeRequest,
        Tool,
        ToolCall,
    )
    from pdserve.text.tokenization.tokenizer import Tokenizer

__all__ = ["MIN_STRUCTURED_CHARS", "chat_cost", "encoded_chars", "texts_chars", "texts_cost"]

MIN_STRUCTURED_CHARS: Final = INLINE_CHARS + 1
"""Least cost of work that follows structure: a kilobyte of structure may cost anything."""
_TOOL_CHARS: Final = 4
"""Cost of a character of the tools' JSON, so that 1,024 of them run in place. There a chat with one
to three tools takes 0.08 to 0.13 ms; a thread costs 0.11 ms of CPU more. Of the worst 1,000
characters of tools that were found, the 786 public templates of the tests take 0.2 ms in the
median, one in a hundred over 2.7 ms, and the slowest 7.4 ms; of 4,000, the slowest takes 42 ms."""
_UNKNOWN: Final = 1 << 24
_ITEM_CHARS: Final = 64
"""Cost of an empty message, part or call, in characters of text: many of them are long work too."""


def chat_cost(
    request: ChatRequest | TokenizeRequest, tools: Sequence[Tool], tokenizer: Tokenizer
) -> int:
    """Cost of rendering and tokenizing a conversation."""
    items = text = 0
    for message in request.messages or ():
        found = _message(message)
        items, text = items + found[0], text + found[1]
    chars = items * _ITEM_CHARS + encoding_chars(text, tokenizer)
    if tools:
        chars += _TOOL_CHARS * encoded_chars(tools)
    given = [request.documents, request.chat_template_kwargs]
    if not any(given):
        return chars
    return max(MIN_STRUCTURED_CHARS, chars + encoded_chars(given))


def texts_cost(texts: Sequence[str], tokenizer: Tokenizer) -> int:
    """Cost of tokenizing texts: many short texts are long work too."""
    return _ITEM_CHARS * len(texts) + encoding_chars(sum(map(text_size, texts)), tokenizer)


def texts_chars(texts: Iterable[str]) -> int:
    """Characters that tokenizing texts handles; each text counts for some."""
    return sum(_ITEM_CHARS + len(text) for text in texts)


def _message(message: Message) -> tuple[int, int]:
    """Number of items of a message, and the size of all its text."""
    items, text = 1, 0
    content = message.content
    if isinstance(content, str):
        text += text_size(content)
    elif content is not None:
        items += len(content)
        text += sum(len(part.type) + text_size(part.text or "") for part in content)
    if message.tool_calls is not None:
        items += len(message.tool_calls)
        text += sum(map(_call, message.tool_calls))
    for each in (message.reasoning, message.reasoning_content, message.name, message.tool_call_id):
        if each is not None:
            text += text_size(each)
    return items, text


def _call(call: ToolCall) -> int:
    function = call.function
    size = text_size(function.name) + text_size(function.arguments)
    return size + len(call.id or "") + len(call.type or "")


def encoded_chars(value: object) -> int:
    """Characters of a value's JSON; what uses the value handles about as many."""
    try:
        return len(msgspec.json.encode(value))
    except (OverflowError, UnicodeError, RecursionError):
        # The code that uses the value reports what is wrong with it.
        return _UNKNOWN

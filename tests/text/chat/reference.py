"""What transformers makes of a client's conversation.

transformers leaves it to the caller in which form content and arguments reach a template. So the
conversation is rendered in each form that clients, transformers and vLLM use, and the first one
that shows most of its words, and no Python representation, is the reference.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from datetime import datetime, tzinfo
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from tests.text.chat.conversations import Conversation, parts

if TYPE_CHECKING:
    from collections.abc import Iterator

NOW = datetime(2026, 2, 3, 14, 5, 6)
SPECIAL = {"bos_token": "<BOS>", "eos_token": "<EOS>", "unk_token": "<UNK>", "pad_token": "<PAD>"}

_REPRESENTATION = re.compile(r"""\{'(city|trip)|None|'text'|"text"|"\{\\\"""")
"""Signs of a wrong form: `{'city': …}`, `{"type": "text", "text": …}`, and JSON in a string."""


@dataclass(frozen=True)
class Rendering:
    """The text, or the words of the refusals in all forms."""

    text: str | None
    refusals: tuple[str, ...] = ()


def render(source: str, conversation: Conversation) -> Rendering:
    """What transformers makes of the conversation in its best form."""
    best, most, refusals = None, 0, []
    for form in _forms(source, conversation):
        try:
            text = _render_as_is(source, form)
        except Exception as error:  # a template may raise any
            refusals.append(str(error))
            continue
        found = _found(text, conversation)
        if best is None or found > most:
            best, most = text, found
        if found == len(conversation.words):
            break
    return Rendering(best, tuple(refusals))


def _render_as_is(source: str, conversation: Conversation) -> str:
    from transformers.utils import chat_template_utils

    arguments: dict[str, Any] = {
        "conversations": [json.loads(json.dumps(conversation.messages))],
        "tools": conversation.tools,
        "documents": conversation.documents,
        "chat_template": source,
        "continue_final_message": conversation.continued,
        "add_generation_prompt": conversation.generation,
        **SPECIAL,
        **conversation.kwargs,
    }
    with patch.object(chat_template_utils, "datetime", _Clock):
        # `apply_chat_template` would remove the fields that are None before it calls this.
        rendered: Any = chat_template_utils.render_jinja_template(**arguments)
    return str(rendered[0][0])


class _Clock(datetime):
    @classmethod
    def now(cls, tz: tzinfo | None = None) -> _Clock:
        return cls(NOW.year, NOW.month, NOW.day, NOW.hour, NOW.minute, NOW.second)


def _found(text: str, conversation: Conversation) -> int:
    """How many words came through; a representation weighs two."""
    shown = sum(word in text for word in conversation.words)
    return shown - 2 * len(_REPRESENTATION.findall(text))


# -------------------------------------------------------------------- forms


def _forms(source: str, conversation: Conversation) -> list[Conversation]:
    forms = [replace(conversation, messages=chat) for chat in _chats(conversation)]
    if conversation.called and not any(_shows_a_call(source, form) for form in forms):
        # A template that leaves calls out reads a content.
        forms = [form for form in forms if not _lacks_content(form)] + forms
    return forms


def _shows_a_call(source: str, form: Conversation) -> bool:
    try:
        text = _render_as_is(source, form)
    except Exception:
        return False
    return any(re.search(word, text) for word in ("KOELN", "BERNE"))


def _lacks_content(form: Conversation) -> bool:
    return any(message.get("content") is None for message in form.messages)


def _chats(conversation: Conversation) -> Iterator[list[dict[str, Any]]]:
    """The messages in each form that makes a difference, the usual ones first."""
    seen: list[Any] = []
    for reasoning, content, arguments, missing in product(
        (["reasoning_content"], ["reasoning"], ["thinking"]),
        (_keep, _join, _split),
        (json.loads, str),
        ("as it is", "absent", "none", "empty"),
    ):
        form = partial(
            _message,
            reasoning=["reasoning_content", *reasoning],
            content=content,
            arguments=arguments,
            missing=missing,
        )
        chat = [form(message) for message in conversation.messages]
        if chat not in seen:
            seen.append(chat)
            yield chat


def _message(
    message: dict[str, Any], *, reasoning: list[str], content: Any, arguments: Any, missing: str
) -> dict[str, Any]:
    message = dict(message)
    if "reasoning_content" in message:
        message |= dict.fromkeys(reasoning, message.pop("reasoning_content"))
    if "tool_calls" in message:
        message["tool_calls"] = [_with_arguments(call, arguments) for call in message["tool_calls"]]
        if not message.get("content"):
            message = _with_missing_content(message, missing)
    if message.get("content") is not None:
        message["content"] = content(message["content"])
    return message


def _with_missing_content(message: dict[str, Any], missing: str) -> dict[str, Any]:
    # `content: null` is no content, as in transformers.
    if missing == "as it is" and message.get("content") == "":
        return message
    rest = {name: value for name, value in message.items() if name != "content"}
    if missing in ("as it is", "absent"):
        return rest
    return {"content": None if missing == "none" else "", **rest}


def _with_arguments(call: dict[str, Any], arguments: Any) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": arguments(function["arguments"])}}


def _keep(content: Any) -> Any:
    return content


def _join(content: Any) -> Any:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def _split(content: Any) -> Any:
    return parts(content) if isinstance(content, str) else content

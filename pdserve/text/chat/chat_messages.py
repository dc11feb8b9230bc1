"""Converts API messages to the form that a chat template expects.

API messages have null fields, content in parts, and the arguments of tool calls as a JSON string.
Templates differ: some expect a string as content, some parts; some expect arguments as an object,
some as a string. `message_forms.py` finds out what a template expects, `chat_template.py` renders;
this file converts. It also cuts a rendered chat behind an open last message.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import msgspec

from pdserve.errors import InvalidRequest

ChatMessage = Mapping[str, Any]
ContentFormat = Literal["string", "parts", "either"]
"""Form of a message's content that a template accepts."""

MAX_NESTING = 64
"""Maximum depth of JSON values handed to a template."""

_REASONING = ("reasoning_content", "thinking", "reasoning")
_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "


@dataclass(frozen=True, slots=True)
class ToolCallForm:
    """Form of messages with tool calls. Model families differ, and no file documents theirs."""

    missing_content: Literal["absent", "none", "empty"] = "absent"
    """Content of a message that only calls tools: no field, None or an empty string."""
    arguments: Literal["object", "string"] = "object"
    """`object`: the template prints arguments as JSON itself; `string`: it expects JSON text."""
    takes_empty: bool = True
    """False if the template leaves out the calls of a message whose content is an empty string,
    which many clients send. Then such a content counts as missing."""

    def apply(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return a message that has tool calls and no null fields in this form."""
        if not self.takes_empty and not message.get("content"):
            message = {name: value for name, value in message.items() if name != "content"}
        if self.missing_content != "absent":
            message = {"content": None if self.missing_content == "none" else "", **message}
        calls = message["tool_calls"]
        if isinstance(calls, list):
            calls = [_with_arguments(call, self.arguments) for call in calls]
        return {**message, "tool_calls": calls}


class MessageForms(Protocol):
    """Forms of messages that a template expects."""

    @property
    def takes_text(self) -> bool:
        """True if content may be a string; else it has to be a list of parts."""
        ...

    def tool_calls(self, reasons: bool) -> ToolCallForm:
        """The form of messages with tool calls; `reasons`: of those that have reasoning as well."""
        ...

    def takes_parts(self, role: str) -> bool:
        """True if the content of this role's messages may be a list of parts."""
        ...


@dataclass(frozen=True, slots=True)
class FixedForms:
    """Forms that are given."""

    takes_text: bool = True
    parts: bool = False
    calls: ToolCallForm = ToolCallForm()

    def tool_calls(self, reasons: bool) -> ToolCallForm:
        return self.calls

    def takes_parts(self, role: str) -> bool:
        return self.parts


def prepare_messages(messages: Sequence[ChatMessage], forms: MessageForms) -> list[dict[str, Any]]:
    """Return copies of the messages in the forms that a template expects.

    Null fields and empty lists of tool calls are removed, and reasoning is set under each of its
    names. An assistant's message without content and without tool calls gets an empty content,
    because templates read that field. Raises `InvalidRequest`.
    """
    return [
        _prepare(copy_plain_json(message, f"messages[{index}]"), index, forms)
        for index, message in enumerate(messages)
    ]


def _prepare(message: dict[str, Any], index: int, forms: MessageForms) -> dict[str, Any]:
    message = {
        name: value
        for name, value in message.items()
        if value is not None and not (name == "tool_calls" and value == [])
    }
    reasoning = next((message[name] for name in _REASONING if name in message), None)
    if "tool_calls" in message:
        message = forms.tool_calls(reasoning is not None).apply(message)
    elif message.get("role") == "assistant":
        message = {"content": "", **message}
    if message.get("content") is not None:
        message["content"] = _content(message, index, forms)
    if reasoning is not None:
        message = {"thinking": reasoning, "reasoning": reasoning, **message}
        message["reasoning_content"] = reasoning
    return message


def _content(message: dict[str, Any], index: int, forms: MessageForms) -> Any:
    content = message["content"]
    if isinstance(content, str):
        return content if forms.takes_text else [{"type": "text", "text": content}]
    where = f"messages[{index}].content"
    if not isinstance(content, list):
        raise InvalidRequest(f"{where} must be a string or a list of parts", param=where)
    texts = [_part_text(part, f"{where}[{number}]") for number, part in enumerate(content)]
    if forms.takes_text and not forms.takes_parts(str(message.get("role"))):
        return "\n".join(texts)
    return [
        {"type": "image"} if _is_image(part) else {"type": "text", "text": text}
        for part, text in zip(content, texts, strict=True)
    ]


def _is_image(part: Any) -> bool:
    """True for a part that stands for an image; its text is for templates that take no parts."""
    return isinstance(part, dict) and part.get("type") == "image"


def _part_text(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in ("text", "image"):
        raise InvalidRequest(
            f"{where}: parts of type {kind!r} are not supported", param=f"{where}.type"
        )
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidRequest(
            f"{where}: a text part needs a string in `text`", param=f"{where}.text"
        )
    return text


def _with_arguments(call: Any, form: Literal["object", "string"]) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or "arguments" not in function:
        return call
    convert = _as_object if form == "object" else _as_text
    function = {**function, "arguments": convert(function["arguments"])}
    # In the order of the API, because some templates print a whole call.
    first = {name: call[name] for name in ("id", "type") if name in call}
    return {**first, **call, "function": function}


def _as_object(arguments: Any) -> Any:
    """Parse JSON text to an object; return the argument if it is no object or nested too deeply."""
    if not isinstance(arguments, str):
        return arguments
    try:
        parsed = msgspec.json.decode(arguments) if arguments else {}
    except (msgspec.MsgspecError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


def _as_text(arguments: Any) -> Any:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def copy_plain_json(value: Any, where: str, depth: int = 0) -> Any:
    """Copy plain JSON values, so that a template cannot reach any other object through them."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if depth >= MAX_NESTING:
        raise InvalidRequest(f"{where} is nested too deeply", param=where)
    if isinstance(value, Mapping):
        return {str(name): copy_plain_json(item, where, depth + 1) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [copy_plain_json(item, where, depth + 1) for item in value]
    raise InvalidRequest(f"{where} holds a {type(value).__name__}, which is not JSON", param=where)


# -------------------------------------------------------------------- continued last message


def mark_final(chat: list[dict[str, Any]]) -> str:
    """Append a mark to the last message's text, else to its reasoning; return the text before."""
    content, reasoning = chat[-1].get("content"), chat[-1].get("reasoning_content")
    if isinstance(reasoning, str) and not _has_text(content):
        chat[-1] |= dict.fromkeys(_REASONING, reasoning + _CONTINUE_TAG)
        # Templates read the content of every message.
        chat[-1].setdefault("content", "")
        return reasoning
    if isinstance(content, str):
        chat[-1]["content"] = content + _CONTINUE_TAG
        return content
    if isinstance(content, list) and content:
        last = content[-1]
        content[-1] = {**last, "text": last["text"] + _CONTINUE_TAG}
        return str(last["text"])
    raise InvalidRequest("the final message has no content to continue", param="messages")


def _has_text(content: Any) -> bool:
    if isinstance(content, list):
        return any(part["text"] for part in content)
    return bool(content)


def cut_at_mark(text: str, final: str) -> str:
    """Return the rendered chat up to the mark. Raises `InvalidRequest` if the mark is missing."""
    mark = _CONTINUE_TAG.strip()
    place = text.rfind(mark)
    if place < 0 or final.strip() not in text:
        raise InvalidRequest(
            "the chat template changes the final message, so it cannot be continued",
            param="continue_final_message",
        )
    if text.startswith(_CONTINUE_TAG, place):
        return text[:place]
    # The template trims messages, so trim this one as well.
    return text[:place].rstrip()

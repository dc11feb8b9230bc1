"""Finds out which forms of messages a chat template expects, by rendering test chats.

No file of a model says whether its template takes content as a string or in parts, and in which
form it takes calls. The words of test chats show it: a form is right if they all come through,
and none as a Python or JSON representation. Words that no form brings through are the template's
choice. Each answer is kept.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from pdserve.text.chat.chat_messages import FixedForms, ToolCallForm, prepare_messages

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.text.chat.chat_messages import ChatMessage, MessageForms

__all__ = ["ProbedForms"]

_WORDS = "what does the user say"
_MORE_WORDS = "and what next"
_THOUGHT = "the user asks"
_TOOL_CALL_FORMS = [
    ToolCallForm(missing_content, arguments)
    for arguments in ("object", "string")
    for missing_content in ("absent", "none", "empty")
]
_PARTS = [{"type": "text", "text": _WORDS}, {"type": "text", "text": _MORE_WORDS}]
_USER: ChatMessage = {"role": "user", "content": "x"}
_CALL: ChatMessage = {
    "role": "assistant",
    "tool_calls": [
        {
            # Mistral's templates accept only ids of nine characters.
            "id": "callcall1",
            "type": "function",
            "function": {"name": "f", "arguments": {"x": _WORDS}},
        }
    ],
}
_RESULT: ChatMessage = {"role": "tool", "tool_call_id": "callcall1", "name": "f", "content": "y"}
_TEXT_CHAT: list[ChatMessage] = [{"role": "user", "content": _WORDS}]
_PARTS_CHATS: dict[str, list[ChatMessage]] = {
    "user": [{"role": "user", "content": _PARTS}],
    "system": [{"role": "system", "content": _PARTS}, _USER],
    "developer": [{"role": "developer", "content": _PARTS}, _USER],
    "assistant": [_USER, {"role": "assistant", "content": _PARTS}, _USER],
    "tool": [_USER, _CALL, {**_RESULT, "content": _PARTS}],
}


class _Rank(NamedTuple):
    """How well a form of tool calls suits a template; more is better."""

    calls: int
    """Test chats that show their call."""
    rendered: int
    """Those that the template does not refuse."""
    thoughts: int
    """Those that show call and reasoning."""
    nones: int
    """How often Python's `None` stands in them, negative."""


class ProbedForms:
    """The forms that one template expects."""

    def __init__(self, render: Callable[[list[dict[str, Any]]], str]) -> None:
        """`render` returns an empty string for a chat that the template refuses."""
        self._render = render
        self._takes_parts: dict[str, bool] = {}
        self._tool_calls: dict[bool, ToolCallForm] = {}

    @cached_property
    def takes_text(self) -> bool:
        """False if a template shows a user's content only in parts."""
        if _WORDS in self._show(_TEXT_CHAT, FixedForms()):
            return True
        return _WORDS not in self._show(_TEXT_CHAT, FixedForms(takes_text=False))

    def takes_parts(self, role: str) -> bool:
        """True if a template shows all parts of this role's content, and nothing but their text."""
        chat = _PARTS_CHATS.get(role)
        if chat is None:
            return False
        if role not in self._takes_parts:
            calls = self.tool_calls(False) if role == "tool" else ToolCallForm()
            text = self._show(chat, FixedForms(self.takes_text, parts=True, calls=calls))
            self._takes_parts[role] = 0 <= text.find(_WORDS) < text.find(_MORE_WORDS) and not any(
                key in text for key in ("'text'", '"text"')
            )
        return self._takes_parts[role]

    def tool_calls(self, reasons: bool) -> ToolCallForm:
        """The form in which most of a call, and of the reasoning before it, comes through.

        It is the first of several. A template that leaves calls out gets the form that all such
        templates take: an empty content.
        """
        if reasons not in self._tool_calls:
            ranks = {form: self._rank(form, reasons) for form in _TOOL_CALL_FORMS}
            best = max(ranks, key=ranks.__getitem__)
            if not ranks[best].calls:
                best = ToolCallForm("empty")
            empty = ranks[replace(best, missing_content="empty")]
            takes_empty = empty.calls >= ranks[best].calls
            self._tool_calls[reasons] = replace(best, takes_empty=takes_empty)
        return self._tool_calls[reasons]

    def _rank(self, form: ToolCallForm, reasons: bool) -> _Rank:
        call = {**_CALL, "reasoning_content": _THOUGHT} if reasons else _CALL
        forms = FixedForms(self.takes_text, calls=form)
        # Some templates read the content of a message that calls only if it is the last, some only
        # if it is not.
        texts = [self._show(chat, forms) for chat in ([_USER, call, _RESULT], [_USER, call])]
        shown = [text for text in texts if _WORDS in text and not _shows_a_representation(text)]
        return _Rank(
            len(shown),
            sum(text != "" for text in texts),
            sum(_THOUGHT in text for text in shown),
            -sum(text.count("None") for text in shown),
        )

    def _show(self, chat: list[ChatMessage], forms: MessageForms) -> str:
        return self._render(prepare_messages(chat, forms))


def _shows_a_representation(text: str) -> bool:
    """Return True if arguments are printed as a Python dictionary, or as JSON inside of JSON."""
    return "{'" in text or '{\\"' in text

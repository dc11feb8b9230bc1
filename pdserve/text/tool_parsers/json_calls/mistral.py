"""Parses Mistral's format: `[TOOL_CALLS]`, then a list of objects, or one call by name.

Older tokenizers (v3 to v7) write `[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`; newer ones
`[TOOL_CALLS]name[ARGS]{...}` once for each call, in some versions with `[CALL_ID]` and an id before
the arguments, or without `[ARGS]`. Any name makes a call. Without the marker, a list is one of
calls if its objects name tools of the request. An id that the model writes is dropped; the
conversation goes on with the id of the answer.
"""

from __future__ import annotations

import re
import secrets
import string
from typing import TYPE_CHECKING, Final

from pdserve.text.tool_parsers.base import SchemaFree, ToolCallReader
from pdserve.text.tool_parsers.partial_json import CallObject, JsonValue
from pdserve.text.tool_parsers.tool_call_grammar import ToolCallGrammar, lark_string

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pdserve.protocols.completion_requests import Tool
    from pdserve.text.output_parts import OutputParser
    from pdserve.text.tool_parsers.base import ToolChoiceMode

START: Final = "[TOOL_CALLS]"
ARGS: Final = "[ARGS]"
ID: Final = "[CALL_ID]"
_START: Final = re.compile(re.escape(START))
_START_OR_LIST: Final = re.compile(rf"{re.escape(START)}|\[")
_NAME: Final = re.compile(r"[a-zA-Z0-9_.-]+")
_LONGEST_HEAD: Final = 256
"""Most characters of a name and the whitespace after it."""
_ALPHABET: Final = string.ascii_letters + string.digits


class Mistral(SchemaFree):
    markers: Final = (START, ARGS, ID)
    starts: Final = (START,)

    def detect(self, template: str) -> bool:
        return START in template

    def parser(self, tools: Sequence[Tool]) -> OutputParser:
        return _Parser(tools)

    def grammar(
        self,
        tools: Sequence[Tool],
        choice: ToolChoiceMode,
        parallel: bool,
        special: Mapping[str, int] | None = None,
    ) -> str:
        """The grammar: calls by name if the tokenizer has a token for `[ARGS]`, else a list."""
        grammar = ToolCallGrammar(tools, choice, parallel, special)
        if grammar.is_special(ARGS):
            named = (
                f"{lark_string(tool.function.name)} {grammar.marker(ARGS)} "
                f"{grammar.arguments(tool)}"
                for tool in grammar.tools
            )
            return grammar.tagged(START, grammar.any_call(named))
        calls = (grammar.json_call(tool, "arguments") for tool in grammar.tools)
        body = f'"[" {grammar.sequence(grammar.any_call(calls), lark_string(", "))} "]"'
        return grammar.tagged(START, body, again=False)

    def call_id(self) -> str:
        """A new id of nine letters and digits, the only form that the templates accept."""
        return "".join(secrets.choice(_ALPHABET) for _ in range(9))


class _Parser(ToolCallReader):
    __slots__ = ("_arguments", "_call", "_known", "_listed", "_marked", "_name", "_raw", "_told")

    def __init__(self, tools: Sequence[Tool]) -> None:
        super().__init__(self._content)
        self._known = {tool.function.name for tool in tools}
        self._marked = False
        """A marker stands before the list."""
        self._call = CallObject()
        self._arguments = JsonValue()
        self._listed = False
        self._name = ""
        self._told = False
        """A marker has shown that the name is complete and arguments follow."""
        self._raw = ""
        """Text since the marker that has not become a call."""

    def _after(self) -> bool:
        """State after a call, which another may follow."""
        if not self.say_blank() or self.meets((START,)) is None:
            return False
        self.drop_half((START,))
        return self.at < len(self.text) and self.turn(self._content)

    def _content(self) -> bool:
        text, found = self.seek(_START_OR_LIST, (START,))
        self.say(text)
        if not found:
            return False
        self.at -= len(found)
        return self.turn(self._bracket)

    def _bracket(self) -> bool:
        """State at a bracket, which may begin the marker or a list without one."""
        marker = self.meets((START,))
        if marker is None:
            return False
        self._marked = bool(marker)
        self._raw = ""
        self.at += len(START) if marker else 1
        if marker:
            self.mark()
            return self.turn(self._head)
        self._listed = True
        self._raw = "["
        return self.turn(self._list)

    def _give_up(self) -> bool:
        self.say_raw(self._raw, _START)
        self._raw = ""
        return self.turn(self._content)

    def _head(self) -> bool:
        if not self.say_blank():
            return False
        char = self.text[self.at]
        self._listed = False
        self._raw = ""
        if char == "{":
            return self._object_begins()
        if char == "[":
            marker = self.meets((START,))
            if marker is None:
                return False
            if not marker:
                self._listed = True
                self._raw = char
                self.at += 1
                return self.turn(self._list)
        elif _NAME.match(char):
            self._name = ""
            self._told = False
            return self.turn(self._named)
        return self.turn(self._content)

    def _object_begins(self) -> bool:
        known = None if self._marked else self._known
        self._call = CallObject((START,), known=known, bare=self._marked)
        return self.turn(self._object)

    def _list(self) -> bool:
        """State between the calls of a list."""
        begin = self.at
        found = self.skip_blank()
        if self._raw:
            self._raw += self.text[begin : self.at]
        if len(self._raw) > _LONGEST_HEAD:
            return self._give_up()
        if not found:
            return self.last and self._give_up()
        char = self.text[self.at]
        if char == "{":
            return self._object_begins()
        if char == "]" and not self._raw:
            self.at += 1
            return self.turn(self._after)
        if char in ",}" and not self._raw:
            self.at += 1
            return True
        return self._give_up()

    def _object(self) -> bool:
        if not self._call.read(self):
            return False
        if self._call.failed:
            self._raw += self._call.raw
            return self._give_up()
        self._raw = ""
        return self.turn(self._list if self._listed else self._after)

    def _named(self) -> bool:
        found = _NAME.match(self.text, self.at)
        if found is not None:
            self._name += found[0]
            self.at = found.end()
        self._raw = self._name
        if len(self._name) > _LONGEST_HEAD:
            return self._give_up()
        if self.at < len(self.text):
            return self.turn(self._tail)
        return self.last and self._cut_short()

    def _tail(self) -> bool:
        """State between a name and its arguments."""
        begin = self.at
        found = self.skip_blank()
        self._raw += self.text[begin : self.at]
        if len(self._raw) > _LONGEST_HEAD:
            return self._give_up()
        if not found:
            return self.last and self._cut_short()
        if self.text[self.at] == "{":
            self._arguments = JsonValue((START,))
            self.begin(self._name)
            return self.turn(self._argue)
        markers = (ARGS, ID, START)
        marker = self.meets(markers)
        if marker is None:
            return False
        self.drop_half(markers)
        if self.at == len(self.text):
            return True
        if marker not in (ARGS, ID):
            return self._cut_short() if marker else self._give_up()
        self.at += len(marker)
        self._told = True
        return self.turn(self._tail if marker == ARGS else self._id)

    def _cut_short(self) -> bool:
        """The call ends without arguments: a marker, or the name of a tool, has made it one."""
        if not self._told and self._name not in self._known:
            return self._give_up()
        self.begin(self._name)
        if not self._told:
            self.argue("{}")
        return self.turn(self._after)

    def _id(self) -> bool:
        found = _NAME.match(self.text, self.at)
        if found is not None:
            self.at = found.end()
        if self.at == len(self.text) and not self.last:
            return False
        return self.turn(self._tail)

    def _argue(self) -> bool:
        self.argue(self._arguments.take(self))
        ended = self._arguments.done or self._arguments.broken
        return ended and self.turn(self._after)

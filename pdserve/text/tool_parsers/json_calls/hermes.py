"""Parses the Hermes format (Hermes, Qwen 2.5 and 3): JSON between `<tool_call>` and `</tool_call>`.

Any name makes a call. Several objects in one block are several calls, and a block that is never
closed counts as closed.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from pdserve.text.tool_parsers.base import SchemaFree, ToolCallReader
from pdserve.text.tool_parsers.partial_json import CallObject
from pdserve.text.tool_parsers.tool_call_grammar import ToolCallGrammar, call_id

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pdserve.protocols.completion_requests import Tool
    from pdserve.text.output_parts import OutputParser
    from pdserve.text.tool_parsers.base import ToolChoiceMode

START: Final = "<tool_call>"
END: Final = "</tool_call>"
_MARKER: Final = re.compile(f"{START}|{END}")
_NAME_KEY: Final = re.compile(r"""\\?["']name\\?["']\s*:""")
_ARGUMENTS_KEY: Final = re.compile(r"""\\?["']arguments\\?["']\s*:""")
_WHOLE_CALL: Final = re.compile(r"\btool_call(\.function)?\s*\|\s*tojson")


class Hermes(SchemaFree):
    markers: Final = (START, END)
    starts: Final = (START,)

    def detect(self, template: str) -> bool:
        """An object with a name and arguments, or a call printed as JSON, follows the marker. The
        words alone are in every template that prints calls."""
        if START not in template or "<function=" in template:
            return False
        behind = template[template.index(START) :]
        keys = _NAME_KEY.search(behind) and _ARGUMENTS_KEY.search(behind)
        return bool(keys or _WHOLE_CALL.search(behind))

    def parser(self, tools: Sequence[Tool]) -> OutputParser:
        return _Parser()

    def grammar(
        self,
        tools: Sequence[Tool],
        choice: ToolChoiceMode,
        parallel: bool,
        special: Mapping[str, int] | None = None,
    ) -> str:
        grammar = ToolCallGrammar(tools, choice, parallel, special)
        calls = (grammar.json_call(tool, "arguments") for tool in grammar.tools)
        body = f'"\\n" {grammar.any_call(calls)} "\\n" {grammar.marker(END)}'
        return grammar.tagged(START, body, between='"\\n"')

    def call_id(self) -> str:
        return call_id()


class _Parser(ToolCallReader):
    __slots__ = ("_call",)

    def __init__(self) -> None:
        super().__init__(self._content)
        self._call = CallObject()

    def _content(self) -> bool:
        marker = self.seek_call(_MARKER, (START, END))
        if marker == START:
            return self.turn(self._block)
        return bool(marker)

    def _block(self) -> bool:
        """State between the start of a block and its object, or between two objects."""
        if not self.say_blank():
            return False
        if self.meets((START, END)) is None:
            return False
        self.drop_half((START, END))
        if self.at == len(self.text):
            return False
        if self.text[self.at] == "{":
            self._call = CallObject((START, END))
            return self.turn(self._object)
        return self.turn(self._content)

    def _object(self) -> bool:
        if not self._call.read(self):
            return False
        if self._call.failed:
            self.say_raw(self._call.raw, _MARKER)
            return self.turn(self._content)
        return self.turn(self._surplus)

    def _surplus(self) -> bool:
        """State after a call; a surplus closing bracket is ignored."""
        if not self.skip_blank():
            return False
        if self.text[self.at] == "}":
            self.at += 1
            return True
        return self.turn(self._block)

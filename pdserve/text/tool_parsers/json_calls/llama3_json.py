"""Parses the format of Llama 3.1 to 3.3: `{"name": ..., "parameters": {...}}`.

Usually the call is the whole answer. Only names tell a call from other JSON, so an object, also in
the middle of text, is a call only if it names a tool of the request. After the token
`<|python_tag|>`, which may follow text, any name makes a call. `;` separates several calls.
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

TAG: Final = "<|python_tag|>"
_TAG: Final = re.compile(re.escape(TAG))
_BEGIN: Final = re.compile(re.escape(TAG) + r"|\{")


class Llama3Json(SchemaFree):
    markers: Final = (TAG,)
    starts: Final = (TAG,)

    def detect(self, template: str) -> bool:
        if "<function=" in template:
            return False
        return TAG in template or (
            "<|start_header_id|>" in template and '"parameters": ' in template
        )

    def parser(self, tools: Sequence[Tool]) -> OutputParser:
        return _Parser(tools)

    def grammar(
        self,
        tools: Sequence[Tool],
        choice: ToolChoiceMode,
        parallel: bool,
        special: Mapping[str, int] | None = None,
    ) -> str:
        """The grammar. In free text a call begins with a brace, or with the tag if that is a token
        of its own."""
        grammar = ToolCallGrammar(tools, choice, parallel, special)
        calls = (grammar.json_call(tool, "parameters") for tool in grammar.tools)
        return grammar.whole("{", grammar.sequence(grammar.any_call(calls), '"; "'), tag=TAG)

    def call_id(self) -> str:
        return call_id()


class _Parser(ToolCallReader):
    __slots__ = ("_call", "_joint", "_known", "_tagged")

    def __init__(self, tools: Sequence[Tool]) -> None:
        super().__init__(self._first)
        self._known = {tool.function.name: not tool.function.parameters for tool in tools}
        """Tool names; the value is True if the tool takes no arguments."""
        self._call = CallObject()
        self._tagged = False
        self._joint = ""
        """Text read between two calls."""

    def _first(self) -> bool:
        """State at the start of the answer, or after a call."""
        if not (self.skip_blank() if self._joint else self.say_blank()):
            return False
        marker = self.meets((TAG,))
        if marker is None:
            return False
        if marker:
            self.at += len(marker)
            self._tagged = True
            return True
        if self.calls:
            self.drop_half((TAG,))
            if self.at == len(self.text):
                return False
        if self.text[self.at] == "{":
            known = None if self._tagged else self._known
            self._call = CallObject((TAG,), known=known, bare=self._tagged)
            return self.turn(self._object)
        self.say(self._joint)
        return self.turn(self._content)

    def _content(self) -> bool:
        text, marker = self.seek(_BEGIN, (TAG,))
        self.say(text)
        self._joint = ""
        if marker == TAG:
            self.mark()
            self._tagged = True
            return self.turn(self._first)
        if marker:
            self.at -= len(marker)
            self._call = CallObject((TAG,), known=self._known)
            return self.turn(self._object)
        return False

    def _object(self) -> bool:
        if not self._call.read(self):
            return False
        if self._call.failed:
            self.say_raw(self._joint + self._call.raw, _TAG)
            return self.turn(self._content)
        self._joint = ""
        return self.turn(self._surplus)

    def _surplus(self) -> bool:
        """State after a call: a surplus closing bracket is ignored; a semicolon announces another
        call."""
        if not self.skip_blank():
            return False
        char = self.text[self.at]
        if char not in "};":
            return self.turn(self._first)
        self.at += 1
        if char == ";":
            self._joint = "; "
            return self.turn(self._first)
        return True

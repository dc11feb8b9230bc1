"""Parses the format of Llama 3.1 to 3.3, and of Llama 4: `{"name": ..., "parameters": {...}}`.

Usually the call is the whole answer. Only names tell a call from other JSON, so an object, also in
the middle of text, is a call only if it names a tool of the request. After the token
`<|python_tag|>`, which may follow text, any name makes a call. `;` separates several calls. Llama 4
writes `<|python_start|>` for the tag, and ends what it began with `<|python_end|>`.
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
START: Final = "<|python_start|>"
END: Final = "<|python_end|>"
_MARKER: Final = re.compile("|".join(map(re.escape, (TAG, START, END))))
_BEGIN: Final = re.compile(_MARKER.pattern + r"|\{")


class Llama3Json(SchemaFree):
    markers: tuple[str, ...] = (TAG,)
    starts: tuple[str, ...] = (TAG,)

    def detect(self, template: str) -> bool:
        if "<function=" in template:
            return False
        return TAG in template or (
            "<|start_header_id|>" in template and '"parameters": ' in template
        )

    def parser(self, tools: Sequence[Tool]) -> OutputParser:
        return _Parser(tools, self.markers)

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
        body = grammar.sequence(grammar.any_call(calls), '"; "')
        return grammar.whole("{", body, tag=self.starts[0])

    def call_id(self) -> str:
        return call_id()


class Llama4Json(Llama3Json):
    """Llama 4, if its template asks for JSON and not for Python."""

    markers = (START, END, TAG)
    starts = (START, TAG)

    def detect(self, template: str) -> bool:
        return (
            "<|header_start|>" in template
            and '"parameters": ' in template
            and "[func_name1(" not in template
        )


class _Parser(ToolCallReader):
    __slots__ = ("_call", "_joint", "_known", "_markers", "_tagged")

    def __init__(self, tools: Sequence[Tool], markers: tuple[str, ...]) -> None:
        super().__init__(self._first)
        self._known = {tool.function.name: not tool.function.parameters for tool in tools}
        """Tool names; the value is True if the tool takes no arguments."""
        self._markers = markers
        self._call = CallObject()
        self._tagged = False
        self._joint = ""
        """Text read between two calls."""

    def _first(self) -> bool:
        """State at the start of the answer, or after a call."""
        if not (self.skip_blank() if self._joint else self.say_blank()):
            return False
        marker = self.meets(self._markers)
        if marker is None:
            return False
        if marker:
            self.at += len(marker)
            self._tagged = marker != END
            return True
        if self.calls:
            self.drop_half(self._markers)
            if self.at == len(self.text):
                return False
        if self.text[self.at] == "{":
            known = None if self._tagged else self._known
            self._call = CallObject(self._markers, known=known, bare=self._tagged)
            return self.turn(self._object)
        self.say(self._joint)
        return self.turn(self._content)

    def _content(self) -> bool:
        text, found = self.seek(_BEGIN, self._markers)
        self.say(text)
        self._joint = ""
        if found in self._markers:
            self.mark()
            self._tagged = found != END
            return self.turn(self._first)
        if found == "{":
            self.at -= len(found)
            self._call = CallObject(self._markers, known=self._known)
            return self.turn(self._object)
        self.say(found)
        return bool(found)

    def _object(self) -> bool:
        if not self._call.read(self):
            return False
        if self._call.failed:
            self.say_raw(self._joint + self._call.raw, _MARKER)
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

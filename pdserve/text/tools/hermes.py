"""Hermes, Qwen 2.5 and 3: JSON between `<tool_call>` and `</tool_call>`, text around it.

Any name makes a call. Several objects in one block are several calls, and a block that is never
closed counts as closed.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from pdserve.text.tools.base import CallReader
from pdserve.text.tools.grammar import Grammar, call_id
from pdserve.text.tools.json_call import CallObject

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pdserve.openai.schema import Tool
    from pdserve.text.parts import PartParser
    from pdserve.text.tools.base import Choice

START: Final = "<tool_call>"
END: Final = "</tool_call>"
_MARKER: Final = re.compile(f"{START}|{END}")


class Hermes:
    name: Final = "hermes"
    markers: Final = (START, END)

    def parser(self, tools: Sequence[Tool]) -> PartParser:
        return _Parser()

    def grammar(
        self,
        tools: Sequence[Tool],
        choice: Choice,
        parallel: bool,
        special: Mapping[str, int] | None = None,
    ) -> str:
        grammar = Grammar(tools, choice, parallel, special)
        calls = [grammar.json_call(tool, "arguments") for tool in grammar.tools]
        body = f'"\\n" {grammar.any_call(calls)} "\\n" {grammar.marker(END)}'
        return grammar.tagged(START, body, between='"\\n"')

    def call_id(self) -> str:
        return call_id()


class _Parser(CallReader):
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
        """Between the start of a block and its object, or between two objects."""
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
        """After a call: a bracket too many is a slip of the pen."""
        if not self.skip_blank():
            return False
        if self.text[self.at] == "}":
            self.at += 1
            return True
        return self.turn(self._block)

"""An example format of tool calls for pdserve: `@call NAME {...}` on a line of its own.

    PYTHONPATH=examples/tool_format pdserve --tool-parser at_calls:AtCalls

Frontends that run as processes of their own are started with the same option. docs/tools.md says
what each part of a format is for.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from pdserve.text.tool_parsers.base import SchemaFree, ToolCallReader
from pdserve.text.tool_parsers.partial_json import JsonValue
from pdserve.text.tool_parsers.tool_call_grammar import ToolCallGrammar, call_id, lark_string

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pdserve.protocols.completion_requests import Tool
    from pdserve.text.output_parts import OutputParser
    from pdserve.text.tool_parsers.base import ToolChoiceMode

START = "@call "
_START = re.compile(START)
_NAME = re.compile(r"([\w.-]{1,64}) (?=\{)")
_LONGEST_HEAD = 66


class AtCalls(SchemaFree):
    """The format: its markers, how a template shows it, its parser and its grammar."""

    markers = (START,)
    starts = (START,)

    def detect(self, template: str) -> bool:
        return START in template

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
        calls = (
            f"{lark_string(f'{tool.function.name} ')} {grammar.arguments(tool)}"
            for tool in grammar.tools
        )
        return grammar.tagged(START, grammar.any_call(calls), between='"\\n"')

    def call_id(self) -> str:
        return call_id()


class _Parser(ToolCallReader):
    """Reads text as it comes; each state returns False where more text is needed."""

    __slots__ = ("_arguments",)

    def __init__(self) -> None:
        super().__init__(self._content)
        self._arguments = JsonValue()

    def _content(self) -> bool:
        marker = self.seek_call(_START, (START,))
        return bool(marker) and self.turn(self._head)

    def _head(self) -> bool:
        found = _NAME.match(self.text, self.at)
        if found is not None:
            self.at = found.end()
            self._arguments = JsonValue()
            self.begin(found[1])
            return self.turn(self._argue)
        # What is no call stays text; a name may still be incomplete.
        short = len(self.text) - self.at < _LONGEST_HEAD
        if short and not self.last and re.fullmatch(r"[\w.-]* ?", self.text[self.at :]):
            return False
        return self.turn(self._content)

    def _argue(self) -> bool:
        self.argue(self._arguments.take(self))
        return self._arguments.done and self.turn(self._content)

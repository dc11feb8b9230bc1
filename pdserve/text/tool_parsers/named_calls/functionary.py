"""Parses the formats of Functionary: `<function=NAME>{...}</function>` in v3.1, recipients in v3.2.

In v3.2 an answer has parts, each for a recipient: `>>>all` and a line break before text,
`>>>NAME` and a line break before a call. The prompt ends with the first `>>>`. Nothing but plain
text tells a part, so a call must name a tool of the request, and its arguments must be an object.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from pdserve.text.tool_parsers.base import SchemaFree, ToolCallReader
from pdserve.text.tool_parsers.named_calls.named_objects import NamedObjects
from pdserve.text.tool_parsers.partial_json import JsonValue
from pdserve.text.tool_parsers.tool_call_grammar import (
    ToolCallGrammar,
    call_id,
    lark_string,
    text_without,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pdserve.protocols.completion_requests import Tool
    from pdserve.text.output_parts import OutputParser
    from pdserve.text.tool_parsers.base import ToolChoiceMode

FUNCTIONARY_V31: Final = NamedObjects(
    call="<function=",
    call_end="</function>",
    header=re.compile(r"\s*(?P<name>[^\s<>{}]+)\s*>\s*"),
    header_before="",
    header_after=">",
    marks=("</function>",),
    foreign=("<parameter", "<tool_call>", "<parameters>"),
)

_PART: Final = ">>>"
_PART_PATTERN: Final = re.compile(_PART)
_LINE: Final = re.compile(r"[^\r\n]*")
_LONGEST_NAME: Final = 128


class FunctionaryV32(SchemaFree):
    markers: Final[tuple[str, ...]] = ()
    starts: Final = (_PART,)

    def detect(self, template: str) -> bool:
        return ">>>all" in template

    def parser(self, tools: Sequence[Tool]) -> OutputParser:
        return _Parser(tools)

    def grammar(
        self,
        tools: Sequence[Tool],
        choice: ToolChoiceMode,
        parallel: bool,
        special: Mapping[str, int] | None = None,
    ) -> str:
        """The grammar. In free text a call begins with a tool's name in the first line, or behind
        the mark of a part."""
        grammar = ToolCallGrammar(tools, choice, parallel, special)
        calls = grammar.any_call(
            f"{lark_string(f'{tool.function.name}{chr(10)}')} {grammar.arguments(tool)}"
            for tool in grammar.tools
        )
        more = f"({lark_string(_PART)} {calls})"
        repeated = f"{more}*" if parallel else ""
        if not grammar.free:
            return grammar.text(f"{calls} {repeated}")
        names = "|".join(re.escape(tool.function.name) for tool in grammar.tools)
        grammar.terminal(f"FREE: {text_without([_PART])} & ~/({names})\\n(?s:.*)/")
        return grammar.text(f"{calls} {repeated} | FREE {repeated or f'{more}?'}")

    def call_id(self) -> str:
        return call_id()


class _Parser(ToolCallReader):
    __slots__ = ("_arguments", "_head", "_known", "_name")

    def __init__(self, tools: Sequence[Tool]) -> None:
        super().__init__(self._first)
        self._known = {tool.function.name for tool in tools}
        self._head: list[str] = []
        """Text of a part that has not become a call."""
        self._name = ""
        self._arguments = JsonValue()

    def _first(self) -> bool:
        """State at the start of the answer, whose part the prompt has begun."""
        found = self.meets((_PART,))
        if found is None:
            return False
        self._head.clear()
        return self.turn(self._content if found else self._recipient)

    def _text(self) -> bool:
        """State behind the line that names `all`: its end is layout."""
        if self.text.startswith("\r\n", self.at):
            self.at += 2
        elif self.text.startswith("\n", self.at):
            self.at += 1
        elif self.text[self.at :] in ("", "\r") and not self.last:
            return False
        return self.turn(self._content)

    def _content(self) -> bool:
        text, found = self.seek(_PART_PATTERN, (_PART,))
        self.say(text)
        if not found:
            return False
        self._head[:] = [found]
        self._name = ""
        return self.turn(self._recipient)

    def _recipient(self) -> bool:
        """State in the line that names a recipient."""
        # No more than shows that it is no name: the rest is read as content, wherever it is cut.
        line = _LINE.match(self.text, self.at, self.at + _LONGEST_NAME + 1 - len(self._name))
        # The pattern matches an empty string too.
        assert line is not None
        self._name += line[0]
        self._head.append(line[0])
        self.at = line.end()
        if len(self._name) > _LONGEST_NAME:
            return self._give_up()
        if self.at == len(self.text):
            return self.last and self._give_up()
        if self._name == "all":
            if self._head[0] == _PART:
                self.mark()
            self._head.clear()
            return self.turn(self._text)
        if self._name not in self._known:
            return self._give_up()
        return self.turn(self._open)

    def _open(self) -> bool:
        """State between a tool's name and its arguments."""
        begin = self.at
        found = self.skip_blank()
        self._head.append(self.text[begin : self.at])
        if not found:
            return self.last and self._give_up()
        if self.text[self.at] != "{":
            return self._give_up()
        self.begin(self._name)
        self._arguments = JsonValue()
        return self.turn(self._argue)

    def _give_up(self) -> bool:
        self.say("".join(self._head))
        self._head.clear()
        return self.turn(self._content)

    def _argue(self) -> bool:
        self.argue(self._arguments.take(self))
        ended = self._arguments.done or self._arguments.broken
        return ended and self.turn(self._tail)

    def _tail(self) -> bool:
        """State after a call; a surplus closing bracket is ignored."""
        if not self.skip_blank():
            return False
        if self.text[self.at] == "}":
            self.at += 1
            return True
        return self.turn(self._content)

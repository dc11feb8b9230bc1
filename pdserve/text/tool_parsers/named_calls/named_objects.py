"""Parses the formats whose calls are a header with the tool's name, and then an object.

    <|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}<|tool_call_end|>
    <function=NAME>{...}</function>

Families differ in the markers and in the header; `NamedObjects` describes them. The header extends
to the object's brace. A header that is not one of the family, or too long, is content with all that
follows it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final

from pdserve.text.incremental_reader import partial_marker_length
from pdserve.text.tool_parsers.base import SchemaFree, ToolCallReader
from pdserve.text.tool_parsers.partial_json import JsonValue, json_or_none
from pdserve.text.tool_parsers.tool_call_grammar import (
    ToolCallGrammar,
    call_id,
    lark_string,
    properties_of,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pdserve.protocols.completion_requests import Tool
    from pdserve.text.output_parts import OutputParser
    from pdserve.text.tool_parsers.base import ToolChoiceMode

__all__ = ["NamedObjects", "NamedObjectsReader"]

_LONGEST_HEADER: Final = 512


@dataclass(frozen=True)
class NamedObjects(SchemaFree):
    """A family's markers, and how its calls are laid out.

    The grammar is `section`, calls with `between` between them, `section_end`; each call is `call`,
    the header, the object, `tail`, `call_end`. Without a section, each call stands alone.
    """

    call: str
    call_end: str
    header: re.Pattern[str]
    """Matches a whole header; the group `name` is the tool's, `id` the call's, if it has one."""
    header_before: str
    header_after: str
    """The header as it is written, before and after the name."""
    section: str = ""
    section_end: str = ""
    tail: str = ""
    between: str = ""
    separators: tuple[str, ...] = ()
    """Markers inside of a header."""
    around: tuple[str, ...] = ()
    """Markers around text, which are not shown."""
    other_sections: tuple[str, ...] = ()
    """Other spellings of the section's markers."""
    loose: bool = False
    """A header may follow the section's start at once."""
    only_known: bool = False
    """Only the name of a tool of the request makes a call."""
    marks: tuple[str, ...] = ()
    """A template of the family has all of these."""
    foreign: tuple[str, ...] = ()
    """A template with one of these is not of the family."""

    @cached_property
    def starts(self) -> tuple[str, ...]:
        sections = [each for each in (self.section, *self.other_sections) if each]
        return (*sections, self.call)

    @cached_property
    def markers(self) -> tuple[str, ...]:
        ends = tuple(each for each in (self.call_end, self.section_end) if each)
        return (*self.starts, *ends, *self.separators, *self.around)

    @cached_property
    def closings(self) -> tuple[str, ...]:
        """Markers that end a call, even if it is not complete."""
        return tuple(each for each in self.markers if each not in self.separators)

    @cached_property
    def marker_pattern(self) -> re.Pattern[str]:
        return re.compile("|".join(re.escape(each) for each in self.markers))

    @cached_property
    def header_ends(self) -> re.Pattern[str]:
        return re.compile("|".join([r"\{", *(re.escape(each) for each in self.closings)]))

    def detect(self, template: str) -> bool:
        return all(each in template for each in (self.call, *self.marks)) and not any(
            each in template for each in self.foreign
        )

    def parser(self, tools: Sequence[Tool]) -> OutputParser:
        return NamedObjectsReader(self, tools)

    def name_of(self, header: re.Match[str], tools: Sequence[Tool]) -> str:
        """The name of the tool that a header calls; empty if it calls none."""
        name = header["name"]
        if self.only_known and all(tool.function.name != name for tool in tools):
            return ""
        return name

    def infers(self, header: re.Match[str]) -> bool:
        """Whether a header that calls no tool by name calls the one that takes the arguments."""
        return False

    def header_term(self, grammar: ToolCallGrammar, tool: Tool) -> str:
        """A grammar's term for a tool's header."""
        written = [f"{self.header_before}{tool.function.name}{self.header_after}"]
        for marker in self.separators:
            pieces = [piece.partition(marker) for piece in written]
            written = [part for piece in pieces for part in piece if part]
        return " ".join(
            grammar.marker(part) if part in self.separators else lark_string(part)
            for part in written
        )

    def grammar(
        self,
        tools: Sequence[Tool],
        choice: ToolChoiceMode,
        parallel: bool,
        special: Mapping[str, int] | None = None,
    ) -> str:
        grammar = ToolCallGrammar(tools, choice, parallel, special)
        named = grammar.any_call(
            f"{self.header_term(grammar, tool)} {grammar.arguments(tool)}" for tool in grammar.tools
        )
        rest = f"{named} {lark_string(self.tail)} {grammar.marker(self.call_end)}"
        between = lark_string(self.between)
        if not self.section:
            return grammar.tagged(self.call, rest, between=between)
        calls = grammar.sequence(f"{grammar.marker(self.call)} {rest}", between)
        body = f"{calls} {grammar.marker(self.section_end)}"
        return grammar.tagged(self.section, body, again=False)

    def call_id(self) -> str:
        return call_id()


class NamedObjectsReader(ToolCallReader):
    """Reads the output of one choice."""

    __slots__ = (
        "_arguments",
        "_format",
        "_header",
        "_held",
        "_ids",
        "_parameters",
        "_tools",
        "_unnamed",
    )

    def __init__(self, format: NamedObjects, tools: Sequence[Tool]) -> None:
        super().__init__(self._content)
        self._format = format
        self._tools = tools
        self._header: list[str] = []
        """Text since the call's start."""
        self._held: list[str] = []
        """Arguments that are held back."""
        self._arguments = JsonValue()
        self._unnamed: re.Match[str] | None = None
        """The header of a call whose arguments tell the tool."""
        self._parameters: list[tuple[str, set[str], set[str]]] | None = None
        """(name, parameters, required ones) of each tool, once they are needed."""
        self._ids: set[str] = set()
        """Ids of this answer's calls."""

    def _content(self) -> bool:
        marker = self.seek_call(self._format.marker_pattern, self._format.markers)
        if marker == self._format.call:
            return self._header_begins()
        if marker in self._format.starts:
            return self.turn(self._section)
        return bool(marker)

    def _header_begins(self) -> bool:
        self._header.clear()
        return self.turn(self._read_header)

    def _section(self) -> bool:
        """State behind the start of a section."""
        if not self.say_blank():
            return False
        marker = self.meets(self._format.markers)
        if marker is None:
            return False
        self.drop_half(self._format.markers)
        if self.at == len(self.text):
            return False
        if marker or not self._format.loose:
            return self.turn(self._content)
        return self._header_begins()

    def _read_header(self) -> bool:
        text, found = self.seek(self._format.header_ends, self._format.closings)
        self._header.append(text)
        if not found and not self.last:
            if sum(map(len, self._header)) <= _LONGEST_HEADER:
                return False
            return self._give_up()
        self.at -= len(found)
        matched = self._matched(ended=bool(found))
        name = self._format.name_of(matched, self._tools) if matched is not None else ""
        if matched is None or not name:
            if matched is None or found != "{" or not self._format.infers(matched):
                return self._give_up()
            self._unnamed = matched
            self._held.clear()
            self._arguments = JsonValue(self._format.closings)
            return self.turn(self._read_unnamed)
        self._start(name, matched)
        if found == "{":
            self._arguments = JsonValue(self._format.closings)
            return self.turn(self._argue)
        if found:
            self.argue("{}")
        return self.turn(self._content)

    def _matched(self, *, ended: bool) -> re.Match[str] | None:
        """The header, if it is one. At the end of the text its name may be cut short unless more
        of the header follows it."""
        text = "".join(self._header)
        if not ended:
            text = text[: len(text) - partial_marker_length(text, self._format.separators)]
            self._header = [text]
        matched = self._format.header.fullmatch(text) if len(text) <= _LONGEST_HEADER else None
        if matched is None or ended or matched.end("name") < len(text):
            return matched
        return None

    def _read_unnamed(self) -> bool:
        """State in arguments which tell the tool: they are held back until they are complete."""
        begin = self.at
        self._held.append(self._arguments.take(self))
        self._header.append(self.text[begin : self.at])
        ended = self._arguments.done or self._arguments.broken
        if not (ended or self.last):
            return False
        header = self._unnamed
        assert header is not None
        arguments = "".join(self._held)
        name = self._tool_for(arguments) if self._arguments.done else ""
        if not name:
            return self._give_up()
        self._start(name, header)
        self.argue(arguments)
        return self.turn(self._tail)

    def _tool_for(self, arguments: str) -> str:
        """The only tool that takes these arguments; empty if it is not certain."""
        value = json_or_none(arguments)
        given = set(value) if isinstance(value, dict) else None
        if given is None:
            return ""
        if self._parameters is None:
            self._parameters = [_parameters(tool) for tool in self._tools]
        fitting = [name for name, some, must in self._parameters if must <= given <= some]
        return fitting[0] if len(fitting) == 1 else ""

    def _start(self, name: str, header: re.Match[str]) -> None:
        written = header.groupdict().get("id")
        id = written if written and written not in self._ids else ""
        self._ids.add(id)
        self.begin(name, id)

    def _give_up(self) -> bool:
        self.say_raw("".join(self._header), self._format.marker_pattern)
        self._header.clear()
        return self.turn(self._content)

    def _argue(self) -> bool:
        self.argue(self._arguments.take(self))
        ended = self._arguments.done or self._arguments.broken
        return ended and self.turn(self._tail)

    def _tail(self) -> bool:
        """State between the arguments and the marker behind them: surplus brackets and the end of a
        fence."""
        if not self.skip_blank():
            return False
        if self.text[self.at] in "}`":
            self.at += 1
            return True
        if self.meets(self._format.markers) is None:
            return False
        self.drop_half(self._format.markers)
        return self.at < len(self.text) and self.turn(self._content)


def _parameters(tool: Tool) -> tuple[str, set[str], set[str]]:
    found = properties_of(tool.function.parameters or {})
    return (
        tool.function.name,
        {name for name, _, _ in found},
        {name for name, _, must in found if must},
    )

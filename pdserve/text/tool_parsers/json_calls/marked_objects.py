"""Parses the formats whose calls are JSON objects behind a marker, alone or in a list.

    <tool_call>{"name": ..., "arguments": {...}}</tool_call>
    <TOOLCALL>[{"name": ..., "arguments": {...}}, ...]</TOOLCALL>

Families differ in the markers and in the keys; `MarkedObjects` describes them. Behind a marker any
name makes a call, and several objects are several calls, in a list or not. A missing end counts as
there.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final, Protocol

from pdserve.text.tool_parsers.base import SchemaFree, ToolCallReader
from pdserve.text.tool_parsers.partial_json import CallObject
from pdserve.text.tool_parsers.tool_call_grammar import ToolCallGrammar, call_id, lark_string

if TYPE_CHECKING:
    from collections.abc import Container, Mapping, Sequence

    from pdserve.protocols.completion_requests import Tool
    from pdserve.text.output_parts import OutputParser
    from pdserve.text.tool_parsers.base import ToolChoiceMode

__all__ = ["MarkedObjects", "MarkedObjectsReader"]


class ObjectReader(Protocol):
    """Reads one object; `CallObject` is the usual one."""

    failed: bool

    @property
    def raw(self) -> str: ...

    def read(self, reader: ToolCallReader) -> bool: ...


@dataclass(frozen=True)
class MarkedObjects(SchemaFree):
    """A family's markers, and how its calls are laid out.

    The grammar is `start`, `head`, calls with `joint` between them, `tail`, `end`. Where `joint` is
    empty, each call has markers of its own, with `between` between them.
    """

    start: str
    end: str = ""
    head: str = "["
    joint: str = ", "
    tail: str = "]"
    between: str = "\n"
    other_starts: tuple[str, ...] = ()
    """Markers that begin a call as well."""
    within: tuple[str, ...] = ()
    """Markers that may follow the start."""
    around: tuple[str, ...] = ()
    """Markers around text, which are not shown."""
    behind: tuple[str, ...] = ()
    """Text right behind a call that is not shown."""
    bare_starts: tuple[str, ...] = ()
    """Text that begins a call only if a tool's name follows."""
    name_key: str = "name"
    arguments_key: str = "arguments"
    marks: tuple[str, ...] = ()
    """A template of the family has all of these, and at least one start."""
    foreign: tuple[str, ...] = ()
    """A template with one of these is not of the family."""

    @cached_property
    def starts(self) -> tuple[str, ...]:
        return (self.start, *self.other_starts)

    @cached_property
    def markers(self) -> tuple[str, ...]:
        own = (self.start, self.end, *self.other_starts, *self.within, *self.around)
        return tuple(each for each in own if each and each not in self.bare_starts)

    @cached_property
    def closings(self) -> tuple[str, ...]:
        """Markers that end a call, even if it is not complete."""
        return tuple(each for each in self.markers if each not in self.within)

    @cached_property
    def marker_pattern(self) -> re.Pattern[str]:
        return re.compile("|".join(re.escape(each) for each in self.markers))

    @cached_property
    def seeks(self) -> tuple[str, ...]:
        """All that a reader looks for in text."""
        return (*self.markers, *self.bare_starts)

    @cached_property
    def seek_pattern(self) -> re.Pattern[str]:
        return re.compile("|".join(re.escape(each) for each in self.seeks))

    def detect(self, template: str) -> bool:
        return (
            any(each in template for each in self.starts)
            and all(each in template for each in self.marks)
            and not any(each in template for each in self.foreign)
        )

    def parser(self, tools: Sequence[Tool]) -> OutputParser:
        return MarkedObjectsReader(self, tools)

    def object_reader(self, known: Container[str] | None) -> ObjectReader:
        """A reader of one object. `known`: the names that make it a call; None: any."""
        return CallObject(
            self.closings, known=known, bare=known is None, name_keys=(self.name_key, "name")
        )

    def call_term(self, grammar: ToolCallGrammar, tool: Tool) -> str:
        """A grammar's term for one object."""
        head = f'{{"{self.name_key}": {json.dumps(tool.function.name)}, "{self.arguments_key}": '
        return f'{lark_string(head)} {grammar.arguments(tool)} "}}"'

    def grammar(
        self,
        tools: Sequence[Tool],
        choice: ToolChoiceMode,
        parallel: bool,
        special: Mapping[str, int] | None = None,
    ) -> str:
        grammar = ToolCallGrammar(tools, choice, parallel, special)
        calls = grammar.any_call(self.call_term(grammar, tool) for tool in grammar.tools)
        end = grammar.marker(self.end)
        if not self.joint:
            body = f"{lark_string(self.head)} {calls} {lark_string(self.tail)} {end}"
            return grammar.tagged(self.start, body, between=lark_string(self.between))
        listed = grammar.sequence(calls, lark_string(self.joint))
        body = f"{lark_string(self.head)} {listed} {lark_string(self.tail)} {end}"
        return grammar.tagged(self.start, body, again=False)

    def call_id(self) -> str:
        return call_id()


_FENCE: Final = "```"


class MarkedObjectsReader(ToolCallReader):
    """Reads the output of one choice."""

    __slots__ = ("_bare", "_call", "_format", "_known", "_listed", "_raw")

    def __init__(self, format: MarkedObjects, tools: Sequence[Tool]) -> None:
        super().__init__(self._content)
        self._format = format
        self._known = {tool.function.name for tool in tools} if format.bare_starts else set[str]()
        self._bare = False
        """The call follows a bare start."""
        self._listed = False
        """A bracket has opened a list."""
        self._raw: list[str] = []
        """Text since the start that has not become a call."""
        self._call = format.object_reader(None)

    def _content(self) -> bool:
        text, found = self.seek(self._format.seek_pattern, self._format.seeks)
        self.say(text)
        if not found or self._may_grow(found):
            return False
        self._raw.clear()
        self._listed = found.endswith("[")
        self._bare = found in self._format.bare_starts
        if self._bare:
            self._raw.append(found)
            return self.turn(self._block)
        self.mark()
        return self.turn(self._marked) if found in self._format.starts else True

    def _may_grow(self, found: str) -> bool:
        """Whether what was found at the end of the text may become a longer marker; then the reader
        returns to it."""
        begin = self.at - len(found)
        rest = self.text[begin:]
        longer = (each for each in self._format.seeks if len(each) > len(rest))
        if self.last or not any(each.startswith(rest) for each in longer):
            return False
        self.at = begin
        return True

    def _marked(self) -> bool:
        """State right behind a marker, or behind a call: whitespace may be content."""
        return self.say_blank() and self.turn(self._block)

    def _give_up(self) -> bool:
        self.say_raw("".join(self._raw), self._format.marker_pattern)
        self._raw.clear()
        return self.turn(self._content)

    def _block(self) -> bool:
        """State where an object or the opening of a list may stand."""
        begin = self.at
        found = self.skip_blank()
        if self._raw:
            self._raw.append(self.text[begin : self.at])
        if not found:
            return self.last and self._give_up()
        markers = self._format.markers
        marker = self.meets(markers)
        if marker is None:
            return False
        if not self._bare:
            self.drop_half(markers)
        if self.at == len(self.text):
            return True
        if marker in self._format.within:
            self.at += len(marker)
            return True
        char = self.text[self.at]
        if not marker and char == "{":
            self._call = self._format.object_reader(self._known if self._bare else None)
            return self.turn(self._object)
        if not marker and char == "[" and not self._listed:
            self._listed = True
            self._raw.append(char)
            self.at += 1
            return True
        if char == "]" and self._listed and not self._bare:
            # The list has no calls.
            self._raw.clear()
            self.at += 1
            return self.turn(self._content)
        return self._give_up()

    def _object(self) -> bool:
        if not self._call.read(self):
            return False
        if self._call.failed:
            self._raw.append(self._call.raw)
            return self._give_up()
        self._raw.clear()
        return self.turn(self._surplus)

    def _surplus(self) -> bool:
        """State after a call: separators, the end of a list and surplus brackets."""
        if not self.skip_blank():
            return False
        char = self.text[self.at]
        inside = self._listed or bool(self._format.end)
        if char == "}" or (char in ",;" and inside):
            self.at += 1
            return True
        if char == "]" and self._listed:
            self.at += 1
            self._listed = False
            return self.turn(self._list_ended)
        if char == "{" or (char == "[" and not self._bare):
            return self.turn(self._block)
        return self._ends()

    def _ends(self) -> bool:
        """State behind a call that no other follows at once."""
        behind = (*self._format.behind, *([_FENCE] if self._bare else []))
        follows = (*self._format.markers, *behind)
        marker = self.meets(follows)
        if marker is None:
            return False
        if marker in behind:
            self.at += len(marker)
            return self.turn(self._content)
        self.drop_half(follows)
        return self.at < len(self.text) and self.turn(self._content)

    def _list_ended(self) -> bool:
        """State behind a list: whitespace may be content."""
        return self.say_blank() and self.turn(self._surplus)

"""Declares the format of Apertus: a list of objects, each with the arguments under the tool's name.

<|tools_prefix|>[{"NAME": {...}}, ...]<|tools_suffix|>
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdserve.text.tool_parsers.json_calls.marked_objects import MarkedObjects
from pdserve.text.tool_parsers.partial_json import JsonValue, json_or_none
from pdserve.text.tool_parsers.tool_call_grammar import lark_string

if TYPE_CHECKING:
    from collections.abc import Container

    from pdserve.protocols.completion_requests import Tool
    from pdserve.text.tool_parsers.base import ToolCallReader
    from pdserve.text.tool_parsers.json_calls.marked_objects import ObjectReader
    from pdserve.text.tool_parsers.tool_call_grammar import ToolCallGrammar


@dataclass(frozen=True)
class Apertus(MarkedObjects):
    start: str = "<|tools_prefix|>"
    end: str = "<|tools_suffix|>"

    def object_reader(self, known: Container[str] | None) -> ObjectReader:
        return NamedObject(self.closings)

    def call_term(self, grammar: ToolCallGrammar, tool: Tool) -> str:
        head = f"{{{json.dumps(tool.function.name)}: "
        return f'{lark_string(head)} {grammar.arguments(tool)} "}}"'


class NamedObject:
    """Reads one object of which each key is the name of a tool, and its value the arguments."""

    __slots__ = ("_arguments", "_closings", "_expect", "_name", "_raw", "begun", "done", "failed")

    def __init__(self, closings: tuple[str, ...] = ()) -> None:
        self._closings = closings
        self._expect = "{"
        """What must come next: a character, `key`, `name`, `value` or `arguments`."""
        self._name: list[str] = []
        self._arguments = JsonValue(closings)
        """The key or the value that is being read."""
        self._raw: list[str] = []
        """Text that has not become a call."""
        self.begun = False
        self.done = False
        self.failed = False
        """What comes next is no call; `raw` is all its text."""

    @property
    def raw(self) -> str:
        return "".join(self._raw)

    def read(self, reader: ToolCallReader) -> bool:
        """Continue; returns whether it is `done` or `failed`."""
        while not (self.done or self.failed):
            begin, before = reader.at, self._expect
            more = self._step(reader)
            if "arguments" in (before, self._expect):
                self._raw.clear()
            else:
                self._raw.append(reader.text[begin : reader.at])
            if not more and not reader.last:
                return False
            if not more:
                self._stop()
        return True

    def _stop(self) -> None:
        """The object ends here, although it is not complete."""
        self.done = self.begun and self._expect in ("arguments", ",")
        self.failed = not self.done

    def _step(self, reader: ToolCallReader) -> bool:
        if self._expect in ("name", "arguments"):
            return self._take(reader)
        if not reader.skip_blank():
            return False
        char = reader.text[reader.at]
        if self._expect == "key" and char == '"':
            self._open("name")
            self._name.clear()
        elif self._expect == "value" and char == "{":
            self._begin(reader)
        elif self._expect == "value" and char == "n":
            return self._null(reader)
        elif self._expect == "," and char == "}":
            reader.at += 1
            self.done = True
        elif char == self._expect:
            reader.at += 1
            self._expect = {"{": "key", ":": "value", ",": "key"}[char]
        else:
            self._stop()
        return True

    def _open(self, expect: str) -> None:
        self._arguments = JsonValue(self._closings)
        self._expect = expect

    def _begin(self, reader: ToolCallReader) -> None:
        name = json_or_none("".join(self._name))
        if not name:
            self.failed = True
            return
        reader.begin(name)
        self.begun = True
        self._open("arguments")

    def _null(self, reader: ToolCallReader) -> bool:
        """Read `null`, which stands for no arguments."""
        found = reader.meets(("null",))
        if found:
            reader.at += len(found)
            self._begin(reader)
            reader.argue("{}")
            self._expect = ","
            self._raw.clear()
        elif found is not None:
            self._stop()
        return found is not None

    def _take(self, reader: ToolCallReader) -> bool:
        text = self._arguments.take(reader)
        if self._expect == "name":
            self._name.append(text)
        else:
            reader.argue(text)
        if self._arguments.broken:
            self._stop()
            return True
        if self._arguments.done:
            self._expect = ":" if self._expect == "name" else ","
        return self._arguments.done
